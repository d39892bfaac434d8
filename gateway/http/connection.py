"""One client's connection: reads its requests and carries their answers, in order, one at a time."""

from __future__ import annotations

import asyncio
import fcntl
import logging
import select
import struct
import termios
from collections.abc import Callable
from socket import SO_LINGER, SOL_SOCKET
from typing import TYPE_CHECKING, Final, cast

from backends.outbox import Outlet
from gateway.http.errors import ApiError, Reason, dialect_of
from gateway.http.request import Header, HttpRequest, RequestReader
from gateway.http.responder import Responder

if TYPE_CHECKING:
    from gateway.http.server import HttpServer

__all__ = ["Connection", "Handler", "HeadHook"]

Handler = Callable[[HttpRequest, Responder], None]
HeadHook = Callable[[HttpRequest], tuple[int, list[Header], bytes] | None]
"""Runs when a head is complete, before the body is read; what it returns is the answer, and the body is not read."""

_log = logging.getLogger(__name__)

_NEVER: Final = float("inf")
_EVERY_SWEEP: Final = 0.0
_BUSY_RETRY_S: Final = 2.0
_RESET_ON_CLOSE: Final = struct.pack("ii", 1, 0)
_INT: Final = struct.Struct("i")

# What a connection is doing. The first two read a request, all others do not.
_HEAD: Final = 0
_BODY: Final = 1
_ANSWER: Final = 2
_LINGER: Final = 3
_CLOSED: Final = 4


def _internal_error() -> ApiError:
    return ApiError(Reason.INTERNAL_ERROR, "The gateway failed on this request.")


class Connection(asyncio.Protocol):
    """The protocol of one accepted connection; `deadline` is when the server's sweep should call `expire`."""

    __slots__ = (
        "_body_bytes_held",
        "_drained_at",
        "_limits",
        "_outlet",
        "_pending",
        "_reader",
        "_reading_paused",
        "_responder",
        "_server",
        "_state",
        "_transport",
        "_undrained_bytes",
        "_writing_paused",
        "deadline",
    )

    def __init__(self, server: HttpServer) -> None:
        self._server = server
        self._limits = server.limits
        self._state = _HEAD
        self._responder: Responder | None = None
        self._pending = b""  # what follows the request that is being answered; not looked at before
        self._body_bytes_held = 0
        self._reading_paused = False
        self._writing_paused = False
        self._undrained_bytes = 0
        self._drained_at = 0.0
        self.deadline = _NEVER

    # asyncio.Protocol

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        self._outlet = Outlet(self._server.outbox, self._transport)
        address = transport.get_extra_info("peername")
        self._reader = RequestReader(self._limits, address[0] if isinstance(address, tuple) else str(address))
        self._transport.set_write_buffer_limits(high=self._limits.write_buffer_bytes)
        self._set_deadline(self._limits.head_timeout_s)
        if not self._server.admit(self):
            self._refuse(ApiError(Reason.SERVER_BUSY, "Too many connections.", retry_after_s=_BUSY_RETRY_S))
            self._close()  # without lingering: what is refused for want of room must not take room

    def data_received(self, data: bytes) -> None:
        if self._state < _ANSWER:
            self._read(self._pending + data if self._pending else data)
        elif self._state == _ANSWER:
            self._keep(self._pending + data)

    def eof_received(self) -> None:
        self._client_gone()

    def connection_lost(self, exc: Exception | None) -> None:
        self._client_gone()
        self._reader.close()
        self._server.forget(self)

    def pause_writing(self) -> None:
        self._writing_paused = True
        self._undrained_bytes = self._waiting_bytes()
        self._drained_at = self._server.now
        if self._state < _LINGER:
            self.deadline = _EVERY_SWEEP
        if self._responder is not None and self._responder.on_pause is not None:
            self._responder.on_pause()

    def resume_writing(self) -> None:
        self._writing_paused = False
        if self._state == _ANSWER:
            self.deadline = _EVERY_SWEEP if self._reading_paused else _NEVER
        elif self._state < _ANSWER:
            self._set_deadline(self._limits.idle_s)
            self._read_pending()
        if self._responder is not None and self._responder.on_resume is not None:
            self._responder.on_resume()

    # reading

    def _read(self, data: bytes) -> None:
        """Read requests until one waits for its answer; what follows is kept."""
        self._pending = b""
        at, size = 0, len(data)
        reader = self._reader
        try:
            while at < size and self._state < _ANSWER and not self._writing_paused:
                if self._state == _HEAD:
                    if not reader.partial:
                        self._set_deadline(self._limits.head_timeout_s)
                    at = reader.take_head(data, at)
                    if reader.request is not None:
                        self._begin(reader.request, body_follows=not reader.complete, body_is_here=at < size)
                else:
                    at = reader.take_body(data, at)
                    self._hold_body(reader.body_bytes)
                if self._state < _ANSWER and reader.complete:
                    self._serve()
                    if at < size:
                        self._outlet.flush()  # whether the client takes its answers decides whether to read on
        except ApiError as error:
            self._refuse(error)
        except Exception:
            _log.exception("the head hook failed")
            self._refuse(_internal_error())
        if self._state == _ANSWER or (self._writing_paused and self._state < _ANSWER):
            self._keep(data[at:])
        elif self._state == _BODY:
            self._set_deadline(self._limits.body_timeout_s)

    def _begin(self, request: HttpRequest, *, body_follows: bool, body_is_here: bool) -> None:
        """A head is complete: refuse it now, or read its body."""
        request.id = self._server.next_request_id()
        hook = self._server.on_head
        answer = hook(request) if hook is not None else None
        if answer is not None:
            responder = self._new_responder(request, keep_alive=self._reader.keep_alive and not body_follows)
            responder.respond(*answer)
        elif body_follows:
            self._state = _BODY
            if self._reader.expects_continue and not body_is_here:
                self._outlet.write(b"HTTP/1.1 100 Continue\r\n\r\n")

    def _hold_body(self, body_bytes: int) -> None:
        """Count what is held of unfinished bodies, on all connections together."""
        server = self._server
        server.bodies_bytes += body_bytes - self._body_bytes_held
        self._body_bytes_held = body_bytes
        if server.bodies_bytes > self._limits.bodies_bytes_max:
            message = "The server is receiving too many large requests: try again."
            raise ApiError(Reason.SERVER_BUSY, message, retry_after_s=_BUSY_RETRY_S)

    def _serve(self) -> None:
        request = self._reader.request
        assert request is not None
        self._release_body()
        responder = self._new_responder(request, keep_alive=self._reader.keep_alive)
        try:
            self._server.handler(request, responder)
        except Exception:
            _log.exception("the handler failed on %s %s", request.method, request.path)
            if responder.started:
                responder.abort()
            else:
                error = _internal_error()
                responder.respond(error.status, error.headers(), error.body(dialect_of(request.path)))

    def _new_responder(self, request: HttpRequest, *, keep_alive: bool) -> Responder:
        self._state = _ANSWER
        self.deadline = _NEVER
        self._responder = Responder(self, self._outlet, request.method, request.version == "1.0", keep_alive)
        return self._responder

    def _release_body(self) -> None:
        self._server.bodies_bytes -= self._body_bytes_held
        self._body_bytes_held = 0

    def _keep(self, data: bytes) -> None:
        """Hold what is not to be read yet, and read no more of it than is allowed."""
        self._pending = data
        if len(data) > self._limits.pipelined_bytes_max and not self._reading_paused:
            self._reading_paused = True
            self._transport.pause_reading()
            self.deadline = _EVERY_SWEEP

    def _read_pending(self) -> None:
        if self._state >= _ANSWER or self._writing_paused:
            return
        if self._reading_paused:
            self._reading_paused = False
            self._transport.resume_reading()
        if self._pending:
            self._read(self._pending)

    # how an answer ends: called by the responder

    def may_keep_alive(self) -> bool:
        return not self._server.stopping

    def answered(self, *, keep_alive: bool) -> None:
        self._responder = None
        if self._state != _ANSWER:
            return
        if not keep_alive:
            self._linger()
            return
        self._reader.reset()
        self._state = _HEAD
        if self._writing_paused:
            return
        self._set_deadline(self._limits.idle_s)
        if self._pending or self._reading_paused:
            # Not now: the caller of Responder.end() does not expect to be called with the next request.
            self._server.loop.call_soon(self._read_pending)

    def break_off(self, *, reset: bool) -> None:
        self._responder = None
        if reset:
            socket = self._transport.get_extra_info("socket")
            socket.setsockopt(SOL_SOCKET, SO_LINGER, _RESET_ON_CLOSE)
            self._outlet.abort()
        self._close()

    # how a connection ends

    def _refuse(self, error: ApiError) -> None:
        """Answer what cannot be read, and read no further."""
        request = self._reader.request
        responder = Responder(self, self._outlet, request.method if request else "", False, keep_alive=False)
        self._state = _ANSWER
        request_id = request.id if request is not None else self._server.next_request_id()
        headers = [*error.headers(), (b"x-request-id", request_id.encode())]
        responder.respond(error.status, headers, error.body(dialect_of(self._reader.path)))

    def _linger(self) -> None:
        """End the sending side, and drop what still comes until the client has seen the answer.

        Closing at once with unread bytes would reset the connection, and the client might lose the answer.
        """
        self._state = _LINGER
        self._pending = b""
        self._release_body()
        self._undrained_bytes = self._waiting_bytes()
        self._drained_at = self._server.now
        self._set_deadline(self._limits.linger_s)
        if self._transport.is_closing():
            return
        if self._reading_paused:
            self._reading_paused = False
            self._transport.resume_reading()
        self._outlet.write_eof()

    def _client_gone(self) -> None:
        """The client closed its side. Whoever half-closes and still expects an answer is taken for gone, too."""
        if self._state == _ANSWER:
            self._outlet.abort()
        responder, self._responder = self._responder, None
        self._close()
        if responder is not None:
            responder.disconnected()

    def _close(self) -> None:
        if self._state == _CLOSED:
            return
        self._state = _CLOSED
        self._pending = b""
        self._release_body()
        self._drained_at = self._server.now
        self._set_deadline(self._limits.linger_s)
        self._outlet.close()

    def close_if_idle(self) -> None:
        """Close a connection on which nothing is asked or answered."""
        if self._state == _HEAD and not self._reader.partial and not self._pending:
            self._close()

    def cut(self) -> None:
        """Close now, whatever is going on."""
        self._client_gone()
        self._outlet.abort()

    # timers

    def _set_deadline(self, limit_s: float) -> None:
        self.deadline = self._server.now + limit_s

    def expire(self) -> None:
        """The deadline has passed: is somebody to be waited for no longer?"""
        if self._state >= _LINGER:
            self._expire_closing()
        elif self._writing_paused and self._is_stalled():
            self.cut()
        elif self._state == _ANSWER:
            if self._reading_paused and self._is_hung_up():
                self._client_gone()
        elif self._writing_paused:
            pass
        elif self._state == _BODY:
            message = f"No byte of the body came for {self._limits.body_timeout_s:g} s."
            self._refuse(ApiError(Reason.CLIENT_TOO_SLOW, message))
        elif self._reader.partial:
            message = f"The request's header was not complete within {self._limits.head_timeout_s:g} s."
            self._refuse(ApiError(Reason.CLIENT_TOO_SLOW, message))
        else:
            self._close()

    def _expire_closing(self) -> None:
        if self._outlet.unsent_bytes() and not self._is_stalled():
            self._set_deadline(self._limits.linger_s)
        else:
            self._outlet.abort()

    def _is_stalled(self) -> bool:
        """Has the client taken nothing for `write_stall_s`?"""
        waiting_bytes = self._waiting_bytes()
        if waiting_bytes < self._undrained_bytes:
            self._drained_at = self._server.now
        self._undrained_bytes = waiting_bytes
        return self._server.now - self._drained_at >= self._limits.write_stall_s

    def _waiting_bytes(self) -> int:
        """What the client has not taken, here and in the kernel, which holds megabytes for a slow one."""
        held_bytes = self._outlet.unsent_bytes()
        if self._transport.is_closing():
            return held_bytes
        unsent = fcntl.ioctl(self._transport.get_extra_info("socket").fileno(), termios.TIOCOUTQ, _INT.pack(0))
        return held_bytes + int(_INT.unpack(unsent)[0])

    def _is_hung_up(self) -> bool:
        """While reading is paused the loop reports no EOF; the kernel knows of it behind unread bytes."""
        poll = select.poll()
        poll.register(self._transport.get_extra_info("socket").fileno(), getattr(select, "POLLRDHUP", 0))
        return bool(poll.poll(0))
