"""A lean HTTP/1.1 client for backends.

It consists of callbacks: on a kept-alive connection a request costs no task, no coroutine, no timer and no future. The
pool neither queues nor limits; admission alone decides how much is in flight.
"""

from __future__ import annotations

import asyncio
import ssl
from typing import Any, Final, Protocol, cast

import httptools
from yarl import URL

from backends.client.outbox import BatchedWriter, Outbox
from backends.client.recurring_head import AnswerHead, answer_head
from backends.tls_contexts import client_context, what_failed
from backends.upstream_errors import ConnectFailed, ConnectionLost, ProtocolViolation, ReadTimeout, UpstreamError

_JOIN_BYTES_MAX: Final = 16384
_HEADER_BYTES_MAX: Final = 65536


class Receiver(Protocol):
    """The consumer of an answer: `head_received`, any number of `body_received`, then `completed` or `failed`, once."""

    def head_received(self, status: int, headers: list[tuple[bytes, bytes]]) -> None:
        """Take the final answer's head, its names in lower case. Heads of 1xx answers are skipped."""

    def body_received(self, data: bytes) -> None:
        """Take the payload of one read of the socket, without chunk framing."""

    def completed(self) -> None: ...

    def failed(self, error: UpstreamError) -> None: ...


class UpstreamCall:
    """A request in flight."""

    __slots__ = (
        "body", "connecting", "connection", "head", "is_over", "is_paused", "limit", "receiver", "sends",
    )  # fmt: skip

    def __init__(self, head: bytes, body: bytes | memoryview, receiver: Receiver) -> None:
        self.head = head
        self.body: bytes | memoryview = body
        self.receiver = receiver
        self.connection: _Connection | None = None
        self.connecting: asyncio.Task[str] | None = None
        self.limit: asyncio.Timeout | None = None
        self.is_over = False
        self.is_paused = False
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
        self.is_paused = True
        if self.connection is not None:
            self.connection.pause()

    def resume(self) -> None:
        self.is_paused = False
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


class UpstreamConnections:
    """Connections to one backend, idle and busy.

    Args:
        url: only its origin is used; the path is in the caller's head.
        idle_s: idle time before a connection is closed, below the backend's own keep-alive timeout (uvicorn: 5 s).
        silence_s: time without a byte after which an owed answer fails. One shared timer keeps both within a quarter.
        tls: the context for https, in place of the system's trust.
        address: where to connect, in place of the URL's host. Certificate and Host header stay those of the URL.
    """

    def __init__(
        self,
        name: str,
        url: str,
        *,
        connect_timeout_s: float = 5.0,
        idle_s: float = 3.0,
        silence_s: float = 600.0,
        tls: ssl.SSLContext | None = None,
        address: str | None = None,
    ) -> None:
        origin = URL(url)
        self.name = name
        self._tls = (tls or client_context()) if origin.scheme == "https" else None
        self._name, self._port = origin.raw_host or "", origin.port or 0
        self._address = address or self._name
        self._origin = str(origin.with_host(self._address).origin())
        self.host_header = (origin.host_port_subcomponent or "").encode("ascii")
        self._connect_timeout_s = connect_timeout_s
        self._tick_s = min(idle_s, silence_s) / 4
        self._idle_ticks_max = int(idle_s / self._tick_s)
        self._silent_ticks_max = int(silence_s / self._tick_s) + 1
        self._silence_s = silence_s
        self._idle: list[_Connection] = []  # the most recently used last
        self._busy: set[_Connection] = set()
        self._connecting: dict[asyncio.Task[str], UpstreamCall] = {}
        self._timer: asyncio.TimerHandle | None = None
        self._outbox = Outbox()
        self._answer_head: AnswerHead | None = None
        """Head of the last answer with status 200 that came whole in one read."""
        self._closed: asyncio.Future[None] | None = None

    @property
    def is_busy(self) -> bool:
        """Return whether a call waits for an answer or a connection."""
        return bool(self._busy or self._connecting)

    def __repr__(self) -> str:
        connecting = len(self._connecting)
        counts = f"{len(self._busy)} busy, {len(self._idle)} idle, {connecting} connecting"
        return f"<UpstreamConnections {self.name}: {counts}>"

    def send(self, head: bytes, body: bytes | memoryview, receiver: Receiver, is_fresh: bool = False) -> UpstreamCall:
        """Send one request and return at once; `receiver` is called later.

        Args:
            head: with its final empty line.
            is_fresh: use a new connection, which the backend cannot be closing as idle, so the request is sent only
                once.
        """
        if self._closed is not None:
            raise RuntimeError(f"backend {self.name}: the pool is closed")
        call = UpstreamCall(head, body, receiver)
        while self._idle and not is_fresh:
            connection = self._idle.pop()
            if not connection._transport.is_closing():
                self._busy.add(connection)
                connection.start(call)
                return call
        self.open(call)
        return call

    async def close(self) -> None:
        """Close every connection and return when all are gone. A call in flight fails with ConnectionLost."""
        if self._closed is None:
            self._closed = asyncio.get_running_loop().create_future()
            for task, call in list(self._connecting.items()):
                if call.connection is None:
                    task.cancel()
            for connection in [*self._idle, *self._busy]:
                connection.abort()
            self._check_closed()
        await asyncio.shield(self._closed)

    def open(self, call: UpstreamCall) -> None:
        """Send a request over a new connection."""
        loop = asyncio.get_running_loop()
        task = call.connecting = loop.create_task(self._connect(call))
        self._connecting[task] = call
        task.add_done_callback(lambda task: self._connected(call, task))
        if self._timer is None:
            self._timer = loop.call_later(self._tick_s, self._tick)

    async def _connect(self, call: UpstreamCall) -> str:
        """Open a connection that starts the call. Return what went wrong, or ""."""
        try:
            async with asyncio.timeout(self._connect_timeout_s) as call.limit:
                name = self._name if self._tls is not None else None
                await asyncio.get_running_loop().create_connection(
                    lambda: _Connection(self, call), self._address, self._port, ssl=self._tls, server_hostname=name
                )
        except TimeoutError:
            return f"cannot connect to {self._origin} within {self._connect_timeout_s:g} s"
        except (OSError, UnicodeError) as error:
            return f"cannot connect to {self._origin}: {what_failed(error)}"
        return ""

    def _connected(self, call: UpstreamCall, task: asyncio.Task[str]) -> None:
        """End the connecting task of a call. Fail the call if there is no connection."""
        self._connecting.pop(task, None)
        call.connecting = None
        if call.connection is None:
            failure = "the pool was closed before it was connected" if task.cancelled() else task.result()
            call.fail(ConnectFailed(self.name, failure))
        self._check_closed()

    def _forget(self, connection: _Connection) -> None:
        if connection in self._busy:
            self._busy.remove(connection)
        elif connection in self._idle:
            self._idle.remove(connection)

    def _check_closed(self) -> None:
        """Finish closing once no connection is left."""
        if self._closed is None or self._connecting or self._busy or self._idle:
            return
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if not self._closed.done():
            self._closed.set_result(None)

    def _tick(self) -> None:
        """Close connections idle for too long; fail those silent for too long."""
        for connection in [each for each in self._idle if each.tick() >= self._idle_ticks_max]:
            connection.abort()
        for connection in [each for each in self._busy if each.tick() >= self._silent_ticks_max]:
            why = f"sent nothing for {self._silence_s:g} s"
            connection.fail(ReadTimeout(self.name, why, before_first_byte=not connection.has_answered))
        self._timer = None
        if self._idle or self._busy or self._connecting:
            self._timer = asyncio.get_running_loop().call_later(self._tick_s, self._tick)


class _Connection(asyncio.Protocol):
    """A socket: parses the answer to one call at a time and decides whether the connection can be reused."""

    def __init__(self, pool: UpstreamConnections, call: UpstreamCall) -> None:
        self._pool = pool
        self._call: UpstreamCall | None = call
        self._transport: asyncio.Transport = cast("asyncio.Transport", None)
        self._ticks = 0
        self._parts: list[bytes] = []
        self.on_body = self._parts.append  # the parser appends payload with no Python frame in between
        self._parser: Any = httptools.HttpResponseParser(self)
        self._is_fresh = True
        self._is_paused = False
        self.has_answered = False

    # Called by the pool and the call.

    def start(self, call: UpstreamCall) -> None:
        """Write the request; reset the state of the previous answer."""
        self._call = call
        call.connection = self
        call.sends += 1
        self._ticks = 0
        self.has_answered = False
        self._begins_as_http11 = False
        self._is_head_done = False
        self._is_complete = False
        self._is_framed = False
        self._is_kept_alive = False
        self._is_bodiless = call.head.startswith(b"HEAD ")
        self._violation = ""
        self._status = 0
        self._reason_bytes = 0
        self._headers: list[tuple[bytes, bytes]] = []
        self._bytes_without_payload = 0
        if call.is_paused:
            # Later: both loops start reading after connection_made, even if it paused.
            asyncio.get_running_loop().call_soon(self._pause_for, call)
        if len(call.body) <= _JOIN_BYTES_MAX:
            self._writer.write(call.head + call.body)
        else:
            self._writer.write(call.head)
            self._writer.write(call.body)
        if self._is_fresh:
            call.head = call.body = b""  # never sent again, so not held during the answer

    def tick(self) -> int:
        """Count a tick of the shared timer, and return the ticks since the last byte; 0 while reading is paused."""
        self._ticks = 0 if self._is_paused else self._ticks + 1
        return self._ticks

    def abort(self) -> None:
        self._transport.abort()

    def fail(self, error: UpstreamError) -> None:
        call, self._call = self._call, None
        self._transport.abort()
        if call is not None:
            call.fail(error)

    def pause(self) -> None:
        if not self._is_paused and not self._transport.is_closing():
            self._is_paused = True
            self._transport.pause_reading()

    def _pause_for(self, call: UpstreamCall) -> None:
        if self._call is call and call.is_paused:
            self.pause()

    def resume(self) -> None:
        if self._is_paused:
            self._is_paused = False
            if not self._transport.is_closing():
                self._transport.resume_reading()

    # Called by the transport. asyncio and uvloop set TCP_NODELAY themselves.

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)
        self._writer = BatchedWriter(self._pool._outbox, self._transport)
        call = self._call
        if call is None or call.is_over or self._pool._closed is not None or call.has_timed_out():
            self._transport.abort()
            return
        self._pool._busy.add(self)
        self.start(call)

    def data_received(self, data: bytes) -> None:
        self._ticks = 0
        call = self._call
        if call is None or call.is_over:
            self._transport.abort()  # no request is open, so these bytes must not answer the next one
            return
        if not self.has_answered:
            self.has_answered = True
            call.head = call.body = b""
            known = self._pool._answer_head
            if known is not None and not self._is_bodiless:
                head, headers = known
                begin, length = head.found(data, 0)
                if begin and begin + length == len(data):  # the parser does not see it, and stands where it stood
                    self._is_head_done = self._is_complete = self._is_kept_alive = True
                    self._status, self._headers = 200, [*headers, (b"content-length", b"%d" % length)]
                    self._tell(call, data[begin:], is_head_new=True)
                    return
            self._begins_as_http11 = data.startswith(b"HTTP/1.1 ")
            if not self._begins_as_http11 and data.lstrip(b"\r\n")[:1] not in (b"H", b""):
                # The parser accepts RTSP and ICE as well.
                self.fail(ProtocolViolation(self._pool.name, "does not speak HTTP"))
                return
        was_head_done = self._is_head_done
        try:
            self._parser.feed_data(data)
        except (httptools.HttpParserError, httptools.HttpParserUpgrade) as error:
            if not self._is_complete:
                self._violation = self._violation or f"broke HTTP framing: {error}"
        parts = self._parts
        if was_head_done and len(parts) == 1 and not self._violation and not self._is_bodiless:
            self._bytes_without_payload = 0
            call.receiver.body_received(parts.pop())
            if self._is_complete and not call.is_over:
                self._finish(call)
            return
        payload = self._take_payload(len(data), was_head_done)
        if self._violation and not self._is_complete:
            self.fail(ProtocolViolation(self._pool.name, self._violation))
            return
        is_head_new = self._is_head_done and not was_head_done
        if is_head_new and self._is_kept_alive and not self._is_bodiless:
            self._pool._answer_head = answer_head(data, self._headers)
        self._tell(call, payload, is_head_new=is_head_new)

    def _tell(self, call: UpstreamCall, payload: bytes, *, is_head_new: bool) -> None:
        """Pass the head, the bytes and the end that have arrived to the receiver."""
        receiver = call.receiver
        if is_head_new:
            receiver.head_received(self._status, self._headers)
        if payload and not call.is_over:
            receiver.body_received(payload)
        if self._is_complete and not call.is_over:
            self._finish(call)

    def connection_lost(self, exc: Exception | None) -> None:
        pool, call, self._call = self._pool, self._call, None
        pool._forget(self)
        self._parser = self.on_body = cast("Any", None)  # breaks the reference cycle
        if call is not None and not call.is_over:
            call.connection = None
            if not self.has_answered and not self._is_fresh and self._ticks <= 1 and pool._closed is None:
                pool.open(call)  # closed at once: the backend closed it as idle while the request was on its way
            elif exc is None and self._is_head_done and not self._is_framed and pool._closed is None:
                call.is_over = True
                call.receiver.completed()
            else:
                what = "closed the connection" if exc is None else "reset the connection"
                if isinstance(exc, ssl.SSLError):
                    what = f"ended TLS ({what_failed(exc)})"
                when = "in the middle of its answer" if self.has_answered else "before it answered"
                call.fail(ConnectionLost(pool.name, f"{what} {when}", before_first_byte=not self.has_answered))
        pool._check_closed()

    def _take_payload(self, read_bytes: int, was_head_done: bool) -> bytes:
        parts = self._parts
        if parts:
            self._bytes_without_payload = 0
            payload = parts[0] if len(parts) == 1 else b"".join(parts)
            parts.clear()
            if self._is_bodiless:
                return b""
        else:
            payload = b""
            self._bytes_without_payload += read_bytes
        overhead = self._bytes_without_payload
        if self._is_head_done and not was_head_done and read_bytes > _HEADER_BYTES_MAX:
            overhead = self._reason_bytes + sum(len(name) + len(value) for name, value in self._headers)
        elif self._is_complete:
            return payload
        if overhead > _HEADER_BYTES_MAX:
            # One bound for heads, endless 1xx, trailers and chunk extensions.
            self._is_complete = False
            self._violation = f"sent more than {_HEADER_BYTES_MAX} bytes of head or framing"
        return payload

    def _finish(self, call: UpstreamCall) -> None:
        """End the call; keep the connection only if its state is beyond doubt."""
        call.is_over = True
        call.connection = self._call = None
        transport = self._transport
        if (
            self._violation
            or self._is_bodiless  # the parser still waits for the body that the answer to a HEAD announces
            or not self._is_kept_alive
            or self._writer.unsent_bytes()  # the backend answered before it had read the whole request
            or transport.is_closing()
            or self._pool._closed is not None
        ):
            transport.abort()
        else:
            if self._is_paused:
                self.resume()
            self._is_fresh = False
            self._pool._busy.discard(self)
            self._pool._idle.append(self)
        call.receiver.completed()
        # The request that takes this slot must not wait for other reads of this turn: the engine would run a step
        # without it.
        self._pool._outbox.flush()

    # Called by the parser, which refuses two lengths, a length with chunks, bad chunks, bare LF and folded lines.

    def on_message_begin(self) -> None:
        if self._is_complete:
            self._refuse("sent more after the end of its answer")

    def on_status(self, status: bytes) -> None:
        self._reason_bytes += len(status)

    def on_header(self, name: bytes, value: bytes) -> None:
        if self._is_head_done:
            return  # a trailer
        name = name.lower()
        if name == b"content-length":
            self._is_framed = True
        elif name == b"transfer-encoding":
            if self._is_framed or value.lower() != b"chunked" or self._parser.get_http_version() != "1.1":
                self._refuse(f"sent an answer framed in doubt: transfer-encoding {value[:40]!r}")
            self._is_framed = True
        self._headers.append((name, value))

    def on_headers_complete(self) -> None:
        status = self._parser.get_status_code()
        if not 100 <= status <= 599:
            self._refuse(f"sent a status that is none: {status}")
        if status < 200:
            if status == 101:
                self._refuse("switched protocols without being asked")
            for name, value in self._headers:
                if name == b"transfer-encoding" or (name == b"content-length" and value.strip(b"0")):
                    self._refuse(f"sent a body with status {status}")  # the parser would read that body as the answer's
            self._headers = []
            self._reason_bytes = 0
            self._is_framed = self._begins_as_http11 = False  # the next head may be of any version
            return
        if not self._begins_as_http11 and self._parser.get_http_version() not in ("1.1", "1.0"):
            self._refuse("does not speak HTTP/1.1")
        self._status = status
        self._is_head_done = True
        if self._is_bodiless:
            self._is_complete = True

    def on_message_complete(self) -> None:
        if self._is_head_done:
            self._is_complete = True
            self._is_kept_alive = self._parser.should_keep_alive()  # the parser forgets this afterwards

    def _refuse(self, why: str) -> None:
        self._violation = why
        raise httptools.HttpParserError(why)
