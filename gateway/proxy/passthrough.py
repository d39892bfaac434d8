"""The direct way of a request without admission to an engine. The answer is relayed, an error in the gateway's format.

A request that no engine has received completely goes to the next engine.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from backends.upstream_errors import ConnectFailed, ProtocolViolation, ReadTimeout, UpstreamError
from gateway.http.errors import Reason
from gateway.http.headers import RESPONSE_DROPPED, Header, forwarded
from gateway.pool.backend import Backend
from gateway.pool.pool import Pool
from gateway.proxy.engine_errors import ERROR_BODY_BYTES_MAX
from gateway.proxy.refusals import failure_error
from gateway.proxy.relay import HELD, RELAYED, RETURNED, JsonEndCheck, Phase, Relay
from gateway.proxy.request_context import RequestContext
from gateway.request.body.payload import Payload
from gateway.telemetry.record import NO_SERVICE, Outcome
from policies.request import ServiceTokens

Ended = Callable[[RequestContext], None]


class PassThrough(Relay):
    """A relayed request and its answer. `ended` is called once, at the end."""

    __slots__ = ("_ended", "_ending", "_engines", "_error", "_payload")

    def __init__(
        self, context: RequestContext, payload: Payload | None, engines: Iterator[Backend], ended: Ended
    ) -> None:
        super().__init__(context)
        self._engines = engines
        self._ended = ended
        self._payload = payload
        """The body, until an engine answers; None without one."""
        self._ending = JsonEndCheck([])
        self._error = b""

    def begin(self) -> None:
        """Send the request to the first engine."""
        self.context.responder.on_disconnect = self._client_gone
        self.send(next(self._engines), self._payload)

    def head_received(self, status: int, headers: list[Header]) -> None:
        self._upstream_head, self._payload = b"", None
        self._status, self._headers = status, headers
        self._ending = JsonEndCheck(headers)
        is_error = status >= 300 and status != 304  # 304 confirms the client's copy
        self.phase = (HELD if is_error else RELAYED)[self.phase]

    def body_received(self, data: bytes) -> None:
        if self.phase is Phase.HELD:
            self._error += data
            if len(self._error) > ERROR_BODY_BYTES_MAX:
                self.cancel()
                self.fail_with_error(b"")
            return
        self._ending.feed(data)
        responder = self.context.responder
        if responder.started:
            responder.write(data)
        else:
            responder.start(self._status, self._fields(), first=data)

    def completed(self) -> None:
        if self.phase is Phase.HELD:
            self.fail_with_error(self._error)
            return
        if self._ending.is_missing:
            what = "ended an answer before its end"
            self.failed(ProtocolViolation(self.backend.name, what))
            return
        responder = self.context.responder
        if responder.started:
            responder.end()
        else:
            responder.respond(self._status, self._fields(), b"")
        self.end(Outcome.COMPLETED, "")

    def failed(self, error: UpstreamError) -> None:
        if isinstance(error, ConnectFailed):
            self.backend.connect_failed(error)
        assert self._call is not None
        other = None if self._call.sends else next(self._engines, None)
        if other is not None:
            self.phase = RETURNED[self.phase]
            self.send(other, self._payload)
            return
        timed_out = isinstance(error, ReadTimeout)
        reason = Reason.BACKEND_FAILED if self._call.sends else Reason.NO_BACKEND
        reason = Reason.BACKEND_TIMEOUT if timed_out else reason
        what = failure_error(reason, "the engine did not answer", self.context.id, self.backend.again_s)
        self.context.error(what, is_within=True)
        self.end(Outcome.FAILED, reason.value)

    def _client_gone(self) -> None:
        self.cancel()
        self.end(Outcome.ABANDONED, "client_disconnected")

    def end(self, outcome: str, reason: str, service: ServiceTokens = NO_SERVICE) -> None:
        super().end(outcome, reason, service)
        self._ended(self.context)

    def _fields(self) -> list[Header]:
        return [*forwarded(self._headers, RESPONSE_DROPPED), self.context.id_field()]


def engines_of(pools: Sequence[Pool]) -> Iterator[Backend]:
    """Yield each engine in service, pool by pool, the least loaded at that moment first."""
    tried: set[str] = set()
    for pool in pools:
        while (backend := pool.least_loaded(tried)) is not None:
            tried.add(backend.name)
            yield backend
