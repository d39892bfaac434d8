"""One request on its way: from admission to a backend, from there to the client, and to a settled account.

An `Exchange` is written in callbacks, since it runs for every token. It ends exactly once, in one of these ways:

    completed   the answer went out whole: settled with the usage that the engine reported
    abandoned   the client went away: out of the queue, or its upstream connection closed at once
    failed      the engine refused for good, broke off or fell silent: the client sees an error, never a clean end
    refused     admission gave it up: an error that says when to come back

A backend that refuses (503, 429, a 200 with an error inside, an empty abort while it drains) has done no work: as long
as nothing has gone to the client, the request returns to the head of its flow, unbilled.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Final

from backends.base import Usage
from backends.errors import ReadTimedOut, UpstreamError
from backends.sse import Dialect, StreamMeter
from backends.upstream import Call
from backends.usage import read_answer, usage_in_tail
from gateway.answer.refusals import rate_limit_headers, refusal_error
from gateway.http.errors import ApiError, Reason
from gateway.http.headers import forward_response_headers
from gateway.http.responder import Responder
from gateway.request.payload import Payload
from gateway.request.routes import Route
from gateway.telemetry.record import NO_SERVICE, Outcome, Record
from policies.admission.decisions import Failure, Reject
from policies.request import Request, ServiceTokens

if TYPE_CHECKING:
    from gateway.pool.pool import Backend, Pool

__all__ = ["Exchange"]

ERROR_BODY_BYTES_MAX: Final = 1 << 20
USAGE_TAIL_BYTES: Final = 4096
RETRYABLE_IN_STREAM: Final = frozenset({429, 503})


class Exchange:
    """A client's request, its place in the pool, and the answer. Implements `Admitted` and `Receiver`."""

    __slots__ = (
        "_answer", "_answer_bytes", "_backend", "_call", "_done", "_headers", "_meter", "_passing", "_payload", "_pool",
        "_responder", "_started", "_status", "_upstream_head", "record", "request", "route",
    )  # fmt: skip

    def __init__(
        self,
        request: Request,
        pool: Pool,
        route: Route,
        payload: Payload,
        upstream_head: bytes,
        responder: Responder,
        record: Record,
    ) -> None:
        self.request = request
        self.record = record
        self.route = route
        self._pool = pool
        self._payload = payload
        self._upstream_head = upstream_head
        self._responder = responder
        self._backend: Backend | None = None
        self._call: Call | None = None
        self._done = False
        self._begin_answer()

    def _begin_answer(self) -> None:
        self._status = 0
        self._headers: list[tuple[bytes, bytes]] = []
        self._meter: StreamMeter | None = None
        self._answer: list[bytes] = []
        self._answer_bytes = 0
        self._passing = False
        self._started = False

    def submit(self) -> None:
        """Ask for admission."""
        responder = self._responder
        # Not the bound methods: compiled, those cost five times as much to make.
        responder.on_disconnect = lambda: self._client_gone()
        responder.on_pause = lambda: self._pause()
        responder.on_resume = lambda: self._resume()
        self._pool.dispatcher.submit(self)

    # --- what admission decides ---

    def dispatched(self, backend: str) -> None:
        target = self._backend = self._pool.backends[backend]
        self.record.dispatched(backend, time.monotonic())
        self._call = target.upstream.send(b"".join((self._upstream_head, target.head_end)), self._payload.body, self)

    def refused(self, decision: Reject) -> None:
        self._end(Outcome.REFUSED, decision.reason.value)
        self._respond_error(refusal_error(decision))

    def give_up(self, error: ApiError) -> None:
        """The gateway stops: end this one now, wherever it is."""
        if self._done:
            return
        service = None
        if self._call is not None:
            self._call.cancel()
            service = self._received()
        self._pool.dispatcher.cancelled(self.request.id, service)
        self._end(Outcome.FAILED, error.code.value, service)
        self._visible_error(error)

    # --- what the backend says ---

    def head_received(self, status: int, reason: bytes, headers: list[tuple[bytes, bytes]]) -> None:
        self._status = status
        self._headers = headers
        if status == 200 and _is_event_stream(headers):
            strip = self.route.dialect is Dialect.OPENAI and self._payload.stream and not self._payload.asks_usage
            self._meter = StreamMeter(self.route.dialect, strip_usage=strip)

    def body_received(self, data: bytes) -> None:
        meter = self._meter
        if meter is None:
            self._collect(data)
            return
        before = meter.token_events
        forward = meter.feed(data)
        responder = self._responder
        if not responder.started and self._is_refused_in_stream(meter):
            return
        tokens = meter.token_events - before
        if tokens:
            if not self._started:
                self._first_token()
            self._pool.dispatcher.progressed(self.request.id, tokens)
        elif meter.started and not self._started:
            self._first_token()
            self._pool.dispatcher.progressed(self.request.id, 0)
        if forward:
            if responder.started:
                responder.write(forward)
            else:
                responder.start(self._status, self._client_headers(), first=forward)

    def completed(self) -> None:
        if self._meter is not None:
            self._complete_stream(self._meter)
        else:
            self._complete_body()

    def failed(self, error: UpstreamError) -> None:
        backend = self._backend
        assert backend is not None
        backend.broke(error)
        if error.before_first_byte and not self._responder.started and not isinstance(error, ReadTimedOut):
            self._again(Failure.UNREACHED)
            return
        service = self._received() if self._started or self._passing else ServiceTokens(0, 0)
        self._pool.dispatcher.failed(self.request.id, Failure.BROKEN, service)
        timed_out = isinstance(error, ReadTimedOut)
        reason = Reason.BACKEND_TIMEOUT if timed_out else Reason.BACKEND_FAILED
        self._end(Outcome.FAILED, reason.value, service)
        what = "fell silent" if timed_out else "broke off its answer"
        self._visible_error(ApiError(reason, f"the engine {what}; request {self.request.id}"))

    # --- streams ---

    def _first_token(self) -> None:
        self._started = True
        self.record.first_token(time.monotonic())

    def _is_refused_in_stream(self, meter: StreamMeter) -> bool:
        """Was this 200 a refusal after all? Then it is on its way back to the queue."""
        error = meter.error
        refused = meter.aborted or (error is not None and error.status in RETRYABLE_IN_STREAM)
        if refused and not meter.token_events:
            assert self._call is not None
            self._call.cancel()
            self._again(Failure.REFUSED)
            return True
        return False

    def _complete_stream(self, meter: StreamMeter) -> None:
        rest = meter.flush()
        responder = self._responder
        if not responder.started:
            if self._is_refused_in_stream(meter):
                return
            responder.start(self._status, self._client_headers(), first=rest)
        elif rest:
            responder.write(rest)
        responder.end()
        if meter.error is not None:
            service = self._received()
            self._pool.dispatcher.failed(self.request.id, Failure.BROKEN, service)
            self._end(Outcome.FAILED, Reason.BACKEND_FAILED.value, service)
        else:
            self._settle(meter.usage, meter.awaits_more, meter.answer_id)

    # --- whole bodies ---

    def _collect(self, data: bytes) -> None:
        """Keep the answer until it is whole: only then is it known whether it was one."""
        if self._passing:
            self._pass(data)
            return
        self._answer.append(data)
        self._answer_bytes += len(data)
        limit = self._pool.response_buffer_bytes_max if self._status == 200 else ERROR_BODY_BYTES_MAX
        if self._answer_bytes > limit:
            self._passing = True
            held, self._answer = b"".join(self._answer), []
            self._responder.start(self._status, self._client_headers())
            self._pass(held)

    def _pass(self, data: bytes) -> None:
        """Too long to keep: pass it on, and keep the end, where the usage is."""
        self._responder.write(data)
        last = (self._answer[0] + data) if self._answer and len(data) < USAGE_TAIL_BYTES else data
        self._answer = [last[-USAGE_TAIL_BYTES:]]

    def _complete_body(self) -> None:
        body = b"".join(self._answer)
        backend = self._backend
        assert backend is not None
        if self._passing:
            self._responder.end()
            self._settle_body(usage_in_tail(body))
            return
        answer = read_answer(body)
        refused = answer.is_drained if self._status == 200 else backend.adapter.is_refusal(self._status, body)
        if refused:
            self._again(Failure.REFUSED)
            return
        self._responder.respond(self._status, self._client_headers(), body)
        self._settle_body(answer.usage, answer.awaits_more, answer.id)

    def _settle_body(self, usage: Usage | None, awaits_more: bool | None = None, answer_id: str = "") -> None:
        if 200 <= self._status < 300:
            self._settle(usage, awaits_more, answer_id)
        else:
            # The engine judged the request itself wrong, and spent nothing on it.
            self._pool.dispatcher.failed(self.request.id, Failure.BROKEN, ServiceTokens(0, 0))
            self._end(Outcome.FAILED, f"status_{self._status}")

    # --- ends ---

    def _again(self, failure: Failure) -> None:
        """It has cost nothing: back to the queue, unless it has been tried too often."""
        self._call = None
        self._begin_answer()
        self.record.returned()
        self._pool.dispatcher.failed(self.request.id, failure)

    def _settle(self, usage: Usage | None, awaits_more: bool | None, answer_id: str) -> None:
        service = self._service(usage)
        request = self.request
        if usage is not None:
            self._pool.learn(self._payload, usage)
        if not awaits_more and (self._payload.demands_tool or request.claim.extends):
            awaits_more = None  # a demanded tool is called with the reason "stop", and a raw text ends with no other
        if answer_id and self.route.dialect is Dialect.RESPONSES and self._pool.claims is not None:
            self._pool.claims.answered(request.flow, request.claim, request.progress.stage, answer_id)
        self._pool.dispatcher.finished(request.id, service, awaits_more)
        self._end(Outcome.COMPLETED, "", service)

    def _client_gone(self) -> None:
        if self._done:
            return
        service = None
        if self._call is not None:
            self._call.cancel()
            service = self._received()
        self._pool.dispatcher.cancelled(self.request.id, service)
        self._end(Outcome.ABANDONED, "client_disconnected", service)

    def _service(self, usage: Usage | None) -> ServiceTokens:
        """What a whole answer took, by the engine's word or else by our own count."""
        if usage is not None:
            return ServiceTokens(usage.prompt_tokens, usage.output_tokens, usage.cached_tokens)
        counted = self._meter.token_events if self._meter is not None else 0
        return ServiceTokens(self.request.prompt_tokens, counted)

    def _received(self) -> ServiceTokens:
        """What an answer that breaks off has taken so far."""
        meter = self._meter
        if meter is None:
            return self._pool.dispatcher.received(self.request.id)
        # A usage from before the end (Anthropic's message_start) knows the prompt, not yet the output.
        service = self._service(meter.usage)
        return ServiceTokens(service.prompt, max(service.output, meter.token_events), service.cached)

    def _end(self, outcome: str, reason: str, service: ServiceTokens | None = None) -> None:
        self._done = True
        self._call = None
        responder = self._responder
        responder.on_disconnect = responder.on_pause = responder.on_resume = None
        self.record.ended(outcome, reason, service or NO_SERVICE, self.request.prompt_tokens, time.monotonic())
        self._pool.ended(self.record)

    def _visible_error(self, error: ApiError) -> None:
        """Tell the client, in whatever way is still open: an error answer, an event in its stream, a broken body."""
        responder = self._responder
        if responder.closed:
            return
        if not responder.started:
            self._respond_error(error)
        elif self._meter is not None:
            responder.write(error.sse_event(self.route.dialect))
            responder.end()
        else:
            responder.abort()

    def _respond_error(self, error: ApiError) -> None:
        if self._responder.closed:
            return
        headers = [*error.headers(), (b"x-request-id", self.request.id.encode())]
        self._responder.respond(error.status, headers, error.body(self.route.dialect))

    # --- small things ---

    def _client_headers(self) -> list[tuple[bytes, bytes]]:
        headers = forward_response_headers(self._headers)
        headers.append((b"x-request-id", self.request.id.encode()))
        if self._pool.quotas is not None:
            headers += rate_limit_headers(self._pool.quotas.standing(self.request.flow.tenant, time.monotonic()))
        if self._pool.debug_headers:
            headers += self.record.debug_headers(self._pool.policy_name)
        return headers

    def _pause(self) -> None:
        if self._call is not None:
            self._call.pause()

    def _resume(self) -> None:
        if self._call is not None:
            self._call.resume()


def _is_event_stream(headers: list[tuple[bytes, bytes]]) -> bool:
    for name, value in headers:
        if name == b"content-type":
            return value.startswith(b"text/event-stream")
    return False
