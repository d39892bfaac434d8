"""The head of a request to an engine, without the lines that depend on which engine it is."""

from __future__ import annotations

from typing import Final

from gateway.http.headers import forward_request_headers
from gateway.http.request import HttpRequest
from gateway.telemetry.trace import Trace

__all__ = ["of_length", "upstream_head"]

LENGTH: Final = b"\r\ncontent-length: "
"""The last line, if there is a body."""


def upstream_head(request: HttpRequest, body_bytes: int, trace: Trace | None) -> bytes:
    """The head of this request."""
    method = request.method
    parts = [method.encode(), b" ", request.target, b" HTTP/1.1\r\n"]
    fields = forward_request_headers(request.headers)
    if trace is not None:
        fields = trace.passed_on(fields)
    for name, value in fields:
        parts += (name, b": ", value, b"\r\n")
    parts += (b"x-request-id: ", request.id.encode())
    if body_bytes or method in ("POST", "PUT", "PATCH"):
        parts += (LENGTH, str(body_bytes).encode())
    parts.append(b"\r\n")
    return b"".join(parts)


def of_length(head: bytes, body_bytes: int) -> bytes:
    """The same head for another body."""
    return b"%b%b%d\r\n" % (head[: head.rindex(LENGTH)], LENGTH, body_bytes)
