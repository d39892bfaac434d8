"""The direct way of a request without admission to an engine. The answer is relayed, an error in the gateway's format.

A request that no engine has received completely goes to the next engine.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence

from backends.client.call import UpstreamCall
from backends.upstream_errors import ConnectFailed, ProtocolViolation, ReadTimedOut, UpstreamError
from gateway.http.errors import Reason
from gateway.http.headers import Header, forward_response_headers, retry_after_s
from gateway.pool.backend import Backend
from gateway.pool.pool import Pool
from gateway.proxy.ending import Ending
from gateway.proxy.engine_errors import ERROR_BODY_BYTES_MAX, engine_error, outcome_of
from gateway.proxy.refusals import failure_error
from gateway.proxy.request_context import RequestContext
from gateway.request.body.payload import Payload
from gateway.request.unqueued import Unqueued
from gateway.request.upstream_head import upstream_head
from gateway.telemetry.record import NO_SERVICE, Outcome


class PassThrough:
    """A relayed request and its answer, as a `Receiver`. `settled` is called once, at the end."""

    def __init__(
        self,
        context: RequestContext,
        payload: Payload | None,
        engines: Iterator[Backend],
        unqueued: Unqueued,
        settled: Callable[[RequestContext, str], None],
    ) -> None:
        self._context = context
        self._engines = engines
        self._unqueued = unqueued
        self._backend = next(engines)
        self._settled = settled
        self._call: UpstreamCall | None = None
        self._ending = Ending([])
        self._head = b""
        self._payload = payload
        """The body, until an engine answers; None without one."""
        self._status = 0
        self._headers: list[Header] = []
        self._error: bytes | None = None
        """Bytes of an answer that is an error; None while it is none."""

    def send(self) -> None:
        """Count the request as running and send it. Counted no sooner, since only its end releases the count."""
        context = self._context
        self._unqueued.begin(context.tenant)
        self._head = upstream_head(context)
        self._send()

    def _send(self) -> None:
        context = self._context
        responder = context.responder
        context.dispatched(self._backend.name, time.monotonic())
        call = self._call = self._backend.send(self._head, self._payload, context.tenant, self)
        responder.on_disconnect = self._client_gone
        responder.on_pause = call.pause
        responder.on_resume = call.resume

    def head_received(self, status: int, headers: list[Header]) -> None:
        self._head, self._payload = b"", None
        self._status = status
        self._headers = [*forward_response_headers(headers), self._context.id_field()]
        self._ending = Ending(headers)
        if status >= 300 and status != 304:  # 304 confirms the client's copy
            self._error = b""

    def body_received(self, data: bytes) -> None:
        if self._error is not None:
            self._error += data
            if len(self._error) > ERROR_BODY_BYTES_MAX and self._call is not None:
                self._call.cancel()
                self._fail_with_error(b"")
            return
        self._ending.come(data)
        responder = self._context.responder
        if responder.started:
            responder.write(data)
        else:
            responder.start(self._status, self._headers, first=data)

    def completed(self) -> None:
        if self._error is not None:
            self._fail_with_error(self._error)
            return
        if self._ending.is_missing:
            what = "ended an answer before its end"
            self.failed(ProtocolViolation(self._backend.name, what, before_first_byte=False))
            return
        responder = self._context.responder
        if responder.started:
            responder.end()
        else:
            responder.respond(self._status, self._headers, b"")
        self._end(Outcome.COMPLETED, "")

    def _fail_with_error(self, body: bytes) -> None:
        error = engine_error(self._backend.name, self._status, body, retry_after_s(self._headers))
        self._context.error(error)
        self._end(outcome_of(error), f"status_{self._status}")

    def failed(self, error: UpstreamError) -> None:
        if isinstance(error, ConnectFailed):
            self._backend.connect_failed(error)
        assert self._call is not None
        other = None if self._call.sends else next(self._engines, None)
        if other is not None:
            self._backend = other
            self._send()
            return
        timed_out = isinstance(error, ReadTimedOut)
        reason = Reason.BACKEND_FAILED if self._call.sends else Reason.NO_BACKEND
        reason = Reason.BACKEND_TIMEOUT if timed_out else reason
        what = failure_error(reason, "the engine did not answer", self._context.id, self._backend.again_s)
        self._context.error(what, is_within=True)
        self._end(Outcome.FAILED, reason.value)

    def _client_gone(self) -> None:
        assert self._call is not None
        self._call.cancel()
        self._end(Outcome.ABANDONED, "client_disconnected")

    def _end(self, outcome: str, reason: str) -> None:
        context = self._context
        responder = context.responder
        responder.on_disconnect = responder.on_pause = responder.on_resume = None
        context.ended(outcome, reason, NO_SERVICE, time.monotonic())
        self._unqueued.end(context.tenant)
        self._settled(context, "")


def engines_of(pools: Sequence[Pool]) -> Iterator[Backend]:
    """Yield each engine in service, pool by pool, the least loaded at that moment first."""
    tried: set[str] = set()
    for pool in pools:
        while (backend := pool.least_loaded(tried)) is not None:
            tried.add(backend.name)
            yield backend
