"""A request in flight to a backend, and the receiver of its answer."""

from __future__ import annotations

import asyncio
from typing import Protocol

from backends.upstream_errors import UpstreamError


class Receiver(Protocol):
    """The consumer of an answer: `head_received`, any number of `body_received`, then `completed` or `failed`, once."""

    def head_received(self, status: int, headers: list[tuple[bytes, bytes]]) -> None:
        """Take the final answer's head, its names in lower case. Heads of 1xx answers are skipped."""

    def body_received(self, data: bytes) -> None:
        """Take the payload of one read of the socket, without chunk framing."""

    def completed(self) -> None: ...

    def failed(self, error: UpstreamError) -> None: ...


class CallConnection(Protocol):
    """The connection that carries a call, as the call sees the connection."""

    def abort(self) -> None: ...
    def pause(self) -> None: ...
    def resume(self) -> None: ...


class UpstreamCall:
    """A request in flight."""

    __slots__ = (
        "_is_paused", "body", "connecting", "connection", "head", "is_over", "limit", "receiver", "sends",
    )  # fmt: skip

    def __init__(self, head: bytes, body: bytes | memoryview, receiver: Receiver) -> None:
        self.head = head
        self.body: bytes | memoryview = body
        self.receiver = receiver
        self.connection: CallConnection | None = None
        self.connecting: asyncio.Task[str] | None = None
        self.limit: asyncio.Timeout | None = None
        self.is_over = False
        self._is_paused = False
        self.sends = 0
        """Number of complete sends as far as known: the backend may have read the request as often."""

    def cancel(self) -> None:
        """Close the connection at once, so that the engine frees what it holds. No callback comes after this."""
        if self.is_over:
            return
        self.is_over = True
        if self.connection is not None:
            self.connection.abort()
        elif self.connecting is not None:
            # A task that has its connection is not cancelled: uvloop would never report that connection as lost.
            self.connecting.cancel()

    def pause(self) -> None:
        """Read no more from the backend until `resume`. Meanwhile the silence timeout does not run."""
        self._is_paused = True
        if self.connection is not None:
            self.connection.pause()

    def resume(self) -> None:
        self._is_paused = False
        if self.connection is not None:
            self.connection.resume()

    def has_timed_out(self) -> bool:
        """Disarm the connect limit of a connection just made. Return whether the limit was over before.

        A cancelled connecting task would take its new connection along, and uvloop would never report that connection
        as lost.
        """
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
