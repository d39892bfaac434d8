"""The head of a request to an engine, without the lines that depend on which engine it is."""

from __future__ import annotations

from gateway.http.headers import forward_request_headers
from gateway.http.http_request import HttpRequest


def upstream_head(request: HttpRequest) -> bytes:
    """The head of this request."""
    parts = [request.method.encode(), b" ", request.target, b" HTTP/1.1\r\n"]
    fields = forward_request_headers(request.headers)
    if request.trace is not None:
        fields = request.trace.passed_on(fields)
    for name, value in fields:
        parts += (name, b": ", value, b"\r\n")
    parts += (b"x-request-id: ", request.id.encode(), b"\r\n")
    return b"".join(parts)
