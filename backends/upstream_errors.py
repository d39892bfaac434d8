"""Typed errors between the gateway and a backend.

`before_first_byte` tells whether no byte of an answer had arrived. Only then may the request go to another backend, but
not after `ReadTimeout`.
"""

from __future__ import annotations


class UpstreamError(Exception):
    """Base of all errors of a backend; never raised itself."""

    def __init__(self, backend: str, what: str, *, before_first_byte: bool = False) -> None:
        super().__init__(f"backend {backend}: {what}")
        self.backend = backend
        self.before_first_byte = before_first_byte


class ConnectFailed(UpstreamError):
    """No answer could be obtained: refused, unreachable, TLS failed, too slow, or (a control request) reset."""

    def __init__(self, backend: str, what: str) -> None:
        super().__init__(backend, what, before_first_byte=True)


class ConnectionLost(UpstreamError):
    """The connection ended before the answer was complete."""


class ReadTimeout(UpstreamError):
    """The backend sent nothing for longer than allowed."""


class ProtocolViolation(UpstreamError):
    """The answer is not HTTP/1.1, or its framing is broken."""
