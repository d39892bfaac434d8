"""What is one request in flight to a backend, and who takes its answer?"""

from __future__ import annotations

import asyncio
from typing import Protocol

from backends.upstream_errors import UpstreamError


class Receiver(Protocol):
    """Who takes the answer? After `head_received` and the bodies comes exactly one of `completed` and `failed`."""

    def head_received(self, status: int, headers: list[tuple[bytes, bytes]]) -> None:
        """The final answer's head, names in lower case. 1xx answers are passed over."""

    def body_received(self, data: bytes) -> None:
        """Payload without chunk framing: all that one read of the socket brought."""

    def completed(self) -> None: ...

    def failed(self, error: UpstreamError) -> None: ...


class Carrier(Protocol):
    """The connection that carries a call, as the call sees it."""

    def abort(self) -> None: ...
    def pause(self) -> None: ...
    def resume(self) -> None: ...


class UpstreamCall:
    """One request in flight."""

    __slots__ = (
        "_is_paused", "body", "connecting", "connection", "head", "is_over", "limit", "receiver", "sends",
    )  # fmt: skip

    def __init__(self, head: bytes, body: bytes | memoryview, receiver: Receiver) -> None:
        self.head = head
        self.body: bytes | memoryview = body
        self.receiver = receiver
        self.connection: Carrier | None = None
        self.connecting: asyncio.Task[str] | None = None
        self.limit: asyncio.Timeout | None = None
        self.is_over = False
        self._is_paused = False
        self.sends = 0
        """How often it went out whole, as far as we know: the backend may have read it so often."""

    def cancel(self) -> None:
        """Close the connection at once, so that the engine frees what it holds. No callback comes after this."""
        if self.is_over:
            return
        self.is_over = True
        if self.connection is not None:
            self.connection.abort()
        elif self.connecting is not None:
            # Not once there is a connection: uvloop then forgets to say that it is lost.
            self.connecting.cancel()

    def pause(self) -> None:
        """Read no more from the backend until `resume`; the silence is then not the backend's."""
        self._is_paused = True
        if self.connection is not None:
            self.connection.pause()

    def resume(self) -> None:
        self._is_paused = False
        if self.connection is not None:
            self.connection.resume()

    def has_timed_out(self) -> bool:
        """Is it too late for this connection? If not, it no longer can be: a connecting task that is ended after its
        connection was made takes the connection with it, and uvloop forgets to say that it is lost."""
        limit, self.limit = self.limit, None
        task = self.connecting
        if limit is None or task is None or task.cancelling():
            return True
        limit.reschedule(None)
        return False

    def fail(self, error: UpstreamError) -> None:
        if not self.is_over:
            self.is_over = True
            self.receiver.failed(error)
