"""A client's connection, which reads requests and carries their answers, in order, one at a time.

    _HEAD -> _BODY -> _ANSWER -> _HEAD    a request and its answer; without a body _BODY is left out
    _HEAD, _BODY -> _ANSWER               an unreadable or late request gets an error as the last answer
    _ANSWER -> _LINGER -> _CLOSED         after the last answer: the sending side ends, further bytes are dropped
    any -> _CLOSED                        the client went away, was idle for too long, or took no data

Bytes that follow a request wait in `_pending`. Beyond `pipelined_bytes_max` reading is paused.
"""

from __future__ import annotations

import asyncio
import logging
import re
from typing import Final, cast

from backends.client.outbox import BatchedWriter
from gateway.http.accounts import Account
from gateway.http.addresses import household
from gateway.http.errors import ApiError, Reason, dialect_of
from gateway.http.http_request import HttpRequest, RequestReader
from gateway.http.responder import Responder
from gateway.http.server import BUSY_RETRY_S, HttpServer
from gateway.http.sockets import abort_if_stalled, is_hung_up, peer_of, reset_on_close

_log = logging.getLogger(__name__)

_SMALL_BODY_BYTES: Final = 4096
"""Largest complete body that is not counted: it is part of the normal cost of a connection."""
_ORIGIN: Final = re.compile(rb"\r\norigin:[ \t]*([!-~]+)[ \t]*(?=\r\n)", re.IGNORECASE)
"""Finds the origin even in a head that is refused unread, so that a page in a browser may read the error."""
_NEVER: Final = float("inf")
_EVERY_SWEEP: Final = 0.0
_INTERNAL_ERROR: Final = ApiError(Reason.INTERNAL_ERROR, "The gateway failed on this request.")

# The states of a connection. Only the first two read a request.
_HEAD: Final = 0
_BODY: Final = 1
_ANSWER: Final = 2
_LINGER: Final = 3
_CLOSED: Final = 4


class Connection(asyncio.Protocol):
    """The protocol of one accepted connection. After `deadline` the server's sweep calls `expire`."""

    __slots__ = (
        "_address", "_body_began_at", "_body_bytes", "_body_of", "_head_began", "_head_bytes", "_is_anonymous",
        "_limits", "_peer", "_peer_is_proxy", "_pending", "_reader", "_reading_paused", "_responder", "_server",
        "_since", "_state", "_tenant", "_transport", "_writer", "_writing_paused", "deadline", "tenant",
    )  # fmt: skip

    def __init__(self, server: HttpServer) -> None:
        self._server = server
        self._limits = server.limits
        self._state = _HEAD
        self._responder: Responder | None = None
        self._pending = b""  # bytes after the request that is being answered
        self._head_bytes = 0  # counted for the address
        self._body_bytes = 0  # counted for tenant, address and server
        self._body_of: HttpRequest | None = None
        self._body_began_at = 0.0
        self._address: Account | None = None
        self._tenant: Account | None = None
        self._head_began = True
        """Whether the time for a head runs: from the connection's start, and after an answer from the first byte, even
        of an empty line."""
        self._is_anonymous = server.on_head is not None
        """Whether no request with a valid key has come yet."""
        self._since = server.now
        """Time of the last answer's end, or of the connection's start."""
        self._reading_paused = False
        self._writing_paused = False
        self.deadline = _NEVER
        self.tenant = ""
        """Tenant of the last request, empty if none is known."""

    # asyncio.Protocol

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        self._writer = BatchedWriter(self._server.outbox, self._transport)
        self._peer = peer_of(transport)
        self._peer_is_proxy = self._server.proxies.trusts(self._peer)
        self._reader = RequestReader(self._limits, self._peer, self._server.kind)
        self._transport.set_write_buffer_limits(high=self._limits.write_buffer_bytes)
        abort_if_stalled(self._transport.get_extra_info("socket"), self._limits.client_stall_s)
        self._set_deadline(self._limits.client_head_s)
        try:
            self._address = self._server.admit(self, self._peer)
        except ApiError as error:
            self._refuse(error)
            self._close()  # without lingering: a connection refused for lack of room must not take room

    def data_received(self, data: bytes) -> None:
        if self._state < _ANSWER:
            self._read(self._pending + data if self._pending else data)
        elif self._state == _ANSWER:
            self._keep(self._pending + data)

    def eof_received(self) -> None:
        self._client_gone()

    def connection_lost(self, exc: Exception | None) -> None:
        self._client_gone()
        self._reader.reset()  # breaks a cycle, since the garbage collector rarely visits old objects
        self._reader.close()
        if self._tenant is not None:
            self._server.tenants.disconnect(self._tenant)
        self._server.holds_answer(self, 0)
        self._server.forget(self, self._address)
        self._address = self._tenant = None

    def pause_writing(self) -> None:
        if self._is_anonymous:
            self.cut()  # an unknown client that takes no answers: no memory is held for it
            return
        self._writing_paused = True
        self._server.holds_answer(self, self._writer.unsent_bytes())
        if self._responder is not None and self._responder.on_pause is not None:
            self._responder.on_pause()

    def resume_writing(self) -> None:
        self._writing_paused = False
        self._server.holds_answer(self, 0)
        if self._state < _ANSWER:
            self._set_deadline(self._limits.client_idle_s)
            self._read_pending()
        if self._responder is not None and self._responder.on_resume is not None:
            self._responder.on_resume()

    # reading

    def _read(self, data: bytes) -> None:
        """Read requests until one waits for its answer, and keep the bytes after it."""
        self._pending = b""
        at, size = 0, len(data)
        reader = self._reader
        try:
            while at < size and self._state < _ANSWER and not self._writing_paused:
                if self._state == _HEAD:
                    if not self._head_began:
                        self._head_began = True
                        self._set_deadline(self._limits.client_head_s)
                    at = reader.take_head(data, at)
                    if self._is_anonymous:
                        self._hold_head(len(reader.partial))
                    if reader.request is not None:
                        self._begin(reader.request, body_is_here=at < size)
                else:
                    at = reader.take_body(data, at)
                    if not reader.complete and reader.request is not None:
                        self._hold_body(reader.request, reader.body_bytes)
                if self._state < _ANSWER and reader.complete:
                    self._serve()
                    if at < size:
                        self._writer.flush()  # the write may pause reading
        except ApiError as error:
            self._refuse(error, data[at:])
        except Exception:  # a fault with one request ends no other
            _log.exception("the head hook failed")
            self._refuse(_INTERNAL_ERROR)
        if self._state == _ANSWER or (self._writing_paused and self._state < _ANSWER):
            if at < size:
                self._keep(data[at:])
        elif self._state == _BODY:
            self._set_body_deadline()

    def _begin(self, request: HttpRequest, *, body_is_here: bool) -> None:
        """Refuse a request with a complete head, or begin to read its body."""
        server = self._server
        request.id = server.next_request_id()
        if self._peer_is_proxy:
            request.client = server.proxies.client(self._peer, request.headers)
        hook = server.on_head
        answer = hook(request) if hook is not None else None
        if answer is not None:
            responder = self._new_responder(request, keep_alive=request.head.keep_alive and not request.body_follows)
            responder.respond(*answer)
            return
        tenant = self.tenant = request.tenant
        if tenant and (self._tenant is None or self._tenant.name != tenant):
            self._belong_to(tenant)
        if request.body_follows:
            self._state = _BODY
            self._body_began_at = server.now
            if request.head.expects_continue and not body_is_here:
                self._writer.write(b"HTTP/1.1 100 Continue\r\n\r\n")

    def _belong_to(self, tenant: str) -> None:
        """Count the connection for the tenant of its last request."""
        self._is_anonymous = False
        tenants = self._server.tenants
        if not self._peer_is_proxy:  # a proxy's connection serves many tenants
            before, self._tenant = self._tenant, tenants.connect(tenant)
            if before is not None:
                tenants.disconnect(before)

    def _serve(self) -> None:
        request = self._reader.request
        assert request is not None
        if len(request.body) > _SMALL_BODY_BYTES:
            self._hold_body(request, len(request.body))
        elif self._body_bytes:
            self.release_body()
        responder = self._new_responder(request, keep_alive=request.head.keep_alive)
        try:
            self._server.handler(request, responder)
        except Exception:  # a fault with one request ends no other
            _log.exception("the handler failed on %s %s", request.method, request.path)
            if responder.started:
                responder.abort()
            else:
                error = _INTERNAL_ERROR
                responder.respond(error.status, error.headers(), error.body(dialect_of(request.path)))

    def _new_responder(self, request: HttpRequest, *, keep_alive: bool) -> Responder:
        self._state = _ANSWER
        self.deadline = _NEVER
        responder = Responder(self, self._writer, request.method, request.head.version == "1.0", keep_alive)
        responder.more_fields = request.answer_fields
        self._responder = responder
        return responder

    def _keep(self, data: bytes) -> None:
        """Hold bytes that may not be read yet, and pause reading beyond the permitted number."""
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

    # bytes of a request until its answer begins; beyond a bound they raise `ApiError` and stay counted until released

    def _hold_head(self, head_bytes: int) -> None:
        """Set the bytes held of a head without a key. Raise ApiError if all unfinished heads of the address together
        exceed the largest permitted head."""
        address = self._address
        if address is None:
            return
        address.heads_bytes += head_bytes - self._head_bytes
        self._head_bytes = head_bytes
        if head_bytes and address.heads_bytes > self._server.limits.header_bytes_max:
            message = "Your address is sending too many unfinished headers at once: send each of them whole."
            raise ApiError(Reason.TOO_MANY_AT_ONCE, message, retry_after_s=BUSY_RETRY_S)

    def _hold_body(self, request: HttpRequest, body_bytes: int) -> None:
        """Set the bytes held of this request's body. Raise ApiError if its tenant, its address or the server holds too
        many."""
        server = self._server
        more_bytes = body_bytes - self._body_bytes
        self._body_of, self._body_bytes = request, body_bytes
        server.bodies_bytes += more_bytes
        try:
            if request.tenant:
                server.tenants.hold(request.tenant, more_bytes)
        finally:
            server.addresses.hold(household(request.client), more_bytes)
        if more_bytes > 0 and server.bodies_bytes > server.limits.bodies_bytes_max:
            message = "The server is receiving too many large requests: try again."
            raise ApiError(Reason.SERVER_BUSY, message, retry_after_s=BUSY_RETRY_S)

    def release_body(self) -> None:
        """Release the body, since an engine answers or the request is dropped."""
        if self._body_of is not None:
            self._hold_body(self._body_of, 0)
            self._body_of = None

    # how an answer ends: called by the responder

    def may_keep_alive(self) -> bool:
        return not self._server.stopping

    def answered(self, *, keep_alive: bool) -> None:
        self._responder = None
        if self._body_bytes:
            self.release_body()
        if self._state != _ANSWER:
            return
        if not keep_alive:
            self._linger()
            return
        self._reader.reset()
        self._head_began = False
        self._state = _HEAD
        self._since = self._server.now
        if self._writing_paused:
            return
        self._set_deadline(self._limits.client_idle_s)
        if self._pending or self._reading_paused:
            # Later, because the caller of Responder.end() does not expect the next request within this call.
            self._server.loop.call_soon(self._read_pending)

    def break_off(self, *, reset: bool) -> None:
        self._responder = None
        if reset:
            reset_on_close(self._transport.get_extra_info("socket"))
            self._writer.abort()
        self._close()

    # how a connection ends

    def _refuse(self, error: ApiError, data: bytes = b"") -> None:
        """Answer a request that cannot be read, and read no further. `data`: the last received bytes."""
        request = self._reader.request
        if request is None:
            head = (self._reader.partial + data).partition(b"\r\n\r\n")[0] + b"\r\n"
            origin = [(b"origin", found[1]) for found in _ORIGIN.finditer(head)]
            request = self._server.unread_request(self._peer, self._reader.path, origin)
        self._server.on_refused(request, error)
        responder = self._new_responder(request, keep_alive=False)
        headers = [*error.headers(), (b"x-request-id", request.id.encode())]
        responder.respond(error.status, headers, error.body(dialect_of(self._reader.path)))

    def _linger(self) -> None:
        """End the sending side, and drop further bytes until the client has seen the answer.

        Closing at once with unread bytes would reset the connection, and the client might lose the answer.
        """
        self._state = _LINGER
        self._drop()
        self._since = self._server.now
        self._set_deadline(self._limits.linger_s)
        if self._transport.is_closing():
            return
        if self._reading_paused:
            self._reading_paused = False
            self._transport.resume_reading()
        self._writer.write_eof()

    def _drop(self) -> None:
        """Drop all received bytes."""
        self._pending = self._reader.partial = b""
        self.release_body()
        self._hold_head(0)

    def _client_gone(self) -> None:
        """End the connection after the client closed its side. A client that half-closes and still expects an answer
        counts as gone, too."""
        if self._state == _ANSWER:
            self._writer.abort()
        responder, self._responder = self._responder, None
        self._close()
        if responder is not None:
            responder.disconnected()

    def _close(self) -> None:
        if self._state == _CLOSED:
            return
        self._state = _CLOSED
        self._drop()
        self._set_deadline(self._limits.linger_s)
        self._writer.close()

    def close_if_idle(self) -> None:
        """Close the connection if no request has begun and no answer is due."""
        if self._state == _HEAD and not self.has_begun():
            self._close()

    def is_asking(self) -> bool:
        """Return whether a request is due: the first one, or the rest of one that has begun."""
        return self._state == _BODY or (self._state == _HEAD and self._head_began)

    def has_begun(self) -> bool:
        """Return whether a part of a request has come whose answer has not ended."""
        if self._state == _HEAD:
            return bool(self._reader.partial or self._pending)
        return self._state < _LINGER

    def idle_since(self) -> float:
        """Return since when the connection has been idle, `_NEVER` if it is not. An incomplete head is no activity."""
        if self._state == _HEAD or (self._state == _LINGER and not self._writer.unsent_bytes()):
            return self._since
        return _NEVER

    def cut(self) -> None:
        """Abort the connection now."""
        self._client_gone()
        self._writer.abort()

    # timers

    def _set_deadline(self, limit_s: float) -> None:
        self.deadline = self._server.now + limit_s

    def _set_body_deadline(self) -> None:
        """Set the deadline of the body, which moves with the bytes received."""
        limits = self._limits
        paid_s = limits.body_grace_s + self._reader.body_bytes / limits.client_body_bytes_per_s
        self.deadline = self._body_began_at + min(limits.client_body_s, paid_s)

    def expire(self) -> None:
        """End the wait that has exceeded its limit, if any has."""
        if self._state >= _LINGER and self._writer.unsent_bytes():
            self._set_deadline(self._limits.linger_s)  # the kernel aborts it once the client takes nothing
        elif self._state >= _LINGER:
            self._writer.abort()
        elif self._state == _ANSWER:
            if self._reading_paused and is_hung_up(self._transport.get_extra_info("socket")):
                self._client_gone()
        elif self._writing_paused:
            pass
        elif self._state == _BODY:
            body_s = self._server.now - self._body_began_at
            message = f"The body came too slowly: {self._reader.body_bytes} bytes in {body_s:.0f} s."
            self._refuse(ApiError(Reason.CLIENT_TOO_SLOW, message))
        elif self._reader.partial:
            message = f"The request's header was not complete within {self._limits.client_head_s:g} s."
            self._refuse(ApiError(Reason.CLIENT_TOO_SLOW, message))
            if self._is_anonymous:
                self._close()  # without lingering, since its time is over
        else:
            self._close()
