"""The head of a request to any engine, without the lines that depend on the engine."""

from __future__ import annotations

from gateway.http.headers import forward_request_headers
from gateway.http.http_request import HttpRequest


def upstream_head(request: HttpRequest) -> bytes:
    """Return the head for a client's request."""
    head, trace = request.head, request.trace
    passed_on = None if trace is None else trace.passed_on(forward_request_headers(head.headers))
    lines = head.forwarded() if passed_on is None else head.lines(passed_on)
    return lines + b"x-request-id: " + request.id.encode() + b"\r\n"
