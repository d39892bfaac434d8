"""What went wrong between the gateway and a backend? One tree of typed errors.

`before_first_byte` says whether the request may be sent to another backend: nothing of an answer was seen.
"""

from __future__ import annotations


class UpstreamError(Exception):
    """Base of the tree; never raised itself."""

    def __init__(self, backend: str, what: str, *, before_first_byte: bool) -> None:
        super().__init__(f"backend {backend}: {what}")
        self.backend = backend
        self.before_first_byte = before_first_byte


class ConnectFailed(UpstreamError):
    """No connection could be made (refused, unreachable, TLS, or not in time)."""

    def __init__(self, backend: str, what: str) -> None:
        super().__init__(backend, what, before_first_byte=True)


class ConnectionLost(UpstreamError):
    """The connection ended before the answer did."""


class ReadTimedOut(UpstreamError):
    """The backend sent nothing for longer than allowed."""


class ProtocolViolation(UpstreamError):
    """What came back is not HTTP/1.1, or breaks its framing."""
