"""The writer of an answer to its client: synchronous calls, without a task or a coroutine."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from http import HTTPStatus
from typing import Final, Protocol

from backends.client.outbox import BatchedWriter
from gateway.http.headers import Header

_STATUS_LINES: Final = {s.value: f"HTTP/1.1 {s.value} {s.phrase}\r\n".encode("ascii") for s in HTTPStatus}
_NO_LENGTH: Final = -1
_CHUNK_BYTES_KNOWN: Final = 1024
_CHUNK_HEADS: Final = [b"%x\r\n" % size for size in range(_CHUNK_BYTES_KNOWN)]
"""First lines of small chunks, written once: most chunks are one token."""


class _Owner(Protocol):
    """The connection, as an answer sees it."""

    def may_keep_alive(self) -> bool: ...
    def release_body(self) -> None: ...
    def answered(self, *, keep_alive: bool) -> None: ...
    def break_off(self, *, reset: bool) -> None: ...


class Responder:
    """The answer to one request.

    Call `respond`, or `start`, `write` any number of times and `end`; `abort` is possible at any time. Once `closed`
    (the answer ended or was aborted, or the client went away) every call does nothing, so that a relay need not race
    the client. Header fields must not include `content-length`, `transfer-encoding` or `connection`, which are written
    here. A header value with CR, LF or NUL raises ValueError.
    """

    __slots__ = (
        "_bodiless", "_chunked", "_connection", "_is_head", "_is_http10", "_keep_alive", "_left", "_writer", "closed",
        "more_fields", "on_disconnect", "on_pause", "on_resume", "started",
    )  # fmt: skip

    def __init__(
        self, connection: _Owner, writer: BatchedWriter, method: str, is_http10: bool, keep_alive: bool
    ) -> None:
        self._connection = connection
        self._writer = writer
        self._is_head = method == "HEAD"
        self._is_http10 = is_http10
        self._keep_alive = keep_alive
        self._bodiless = False
        self._chunked = False
        self._left = _NO_LENGTH
        self.more_fields = b""
        """Complete header lines for the head of any answer, an engine's or the gateway's own."""
        self.started = False
        self.closed = False
        self.on_disconnect: Callable[[], object] | None = None
        """Called at once, and at most once, if the client goes away before the answer has ended."""
        self.on_pause: Callable[[], object] | None = None
        """Called if the client reads too slowly. Nothing should be written until `on_resume`."""
        self.on_resume: Callable[[], object] | None = None

    def let_body_go(self) -> None:
        """Report that the body of the request is no longer held."""
        if not self.closed:
            self._connection.release_body()

    def respond(self, status: int, headers: Sequence[Header], body: bytes) -> None:
        """Send a complete answer."""
        if self.closed:
            return
        head = self._head(status, headers, len(body))
        self._writer.write(head if self._bodiless else head + body)
        self._finish()

    def start(self, status: int, headers: Sequence[Header], *, length: int | None = None, first: bytes = b"") -> None:
        """Begin a streaming answer, with its first data in the same write.

        Without `length` the answer is chunked, or for HTTP/1.0 ended by closing the connection.
        """
        if self.closed:
            return
        head = self._head(status, headers, length)
        self._writer.write(head + self._framed(first) if first else head)

    def write(self, data: bytes) -> None:
        """Send a piece of a streaming answer."""
        if self.closed:
            return
        size = len(data)
        if self._chunked and 0 < size < _CHUNK_BYTES_KNOWN:
            self._writer.write(_CHUNK_HEADS[size] + data + b"\r\n")
        elif size and (framed := self._framed(data)):
            self._writer.write(framed)

    def end(self) -> None:
        """End a streaming answer, or abort it if it is shorter than its announced length."""
        if self.closed:
            return
        if self._left > 0 and not self._bodiless:
            self.abort()
            return
        if self._chunked:
            self._writer.write(b"0\r\n\r\n")
        self._finish()

    def abort(self) -> None:
        """Break the answer off recognisably: nothing that looks like its end is sent."""
        if self.closed:
            return
        self.closed = True
        # An answer without length ends with its connection, so only a reset shows that it is incomplete.
        unmarked = self.started and not self._chunked and self._left == _NO_LENGTH
        self._connection.break_off(reset=unmarked)

    def disconnected(self) -> None:
        """Report that the client went away. Called by the connection."""
        if not self.closed:
            self.closed = True
            if self.on_disconnect is not None:
                self.on_disconnect()

    def _head(self, status: int, headers: Sequence[Header], length: int | None) -> bytes:
        parts: list[bytes] = []
        for name, value in headers:
            parts += (name, b": ", value, b"\r\n")
        fields = b"".join(parts)
        # One check of all fields together is faster: the only line ends must be those written here.
        if len(fields) - len(fields.translate(None, b"\r\n\0")) != 2 * len(headers):
            raise ValueError("a header field holds CR, LF or NUL")
        status_line = _STATUS_LINES.get(status)
        if status_line is None:
            status_line = b"HTTP/1.1 %d \r\n" % status
        self.started = True
        return b"".join((status_line, fields, self.more_fields, self._framing(status, length), b"\r\n"))

    def _framing(self, status: int, length: int | None) -> bytes:
        """Return the fields that say where the answer ends and whether the connection goes on."""
        no_content = status in (204, 304)
        self._bodiless = no_content or self._is_head
        framing = b""
        if no_content:
            pass
        elif length is not None:
            self._left = length
            framing = b"content-length: %d\r\n" % length
        elif not self._is_http10:
            self._chunked = not self._is_head
            framing = b"transfer-encoding: chunked\r\n"
        elif not self._is_head:
            self._keep_alive = False
        self._keep_alive = self._keep_alive and self._connection.may_keep_alive()
        if not self._keep_alive:
            return framing + b"connection: close\r\n"
        return framing + b"connection: keep-alive\r\n" if self._is_http10 else framing

    def _framed(self, data: bytes) -> bytes:
        if self._bodiless:
            return b""
        if self._chunked:
            return b"%x\r\n%b\r\n" % (len(data), data)
        if self._left != _NO_LENGTH:
            if len(data) > self._left:
                self.abort()
                raise RuntimeError("the answer is longer than its announced length")
            self._left -= len(data)
        return data

    def _finish(self) -> None:
        self.closed = True
        self._connection.answered(keep_alive=self._keep_alive)
