"""A request from admission to its settled account: the queue, an engine, and the answer to the client.

An `Exchange` is written in callbacks, since it runs for every token. It ends exactly once, in one of these ways:

    completed   the complete answer went out; settled with the usage that the engine reported
    abandoned   the client went away; the request leaves the queue, or its upstream connection is closed at once
    failed      the engine failed, broke off, fell silent, or sent no end mark; the client sees an error, no [DONE]
    refused     admission rejected the request, with a time to retry, or the engine found the request faulty

A request that its engine refused (503, 429, a 200 with an error inside, an empty abort while it drains), or that was
preempted, may return to the head of its flow until part of an answer has gone to the client (`RequestContext.relays`).
A request whose engine was not reached or went away may return only if no byte of an answer had come. A returned request
is charged nothing. But a preempted request keeps its charge: the charge of its next run replaces it, and without a next
run it stays. A request that an engine received completely before it went away may be the cause. So
it is retried at most once, on another engine (or by the fallback pool), within the retry budget, and not for a tenant
whose answers break anyhow.
"""

from __future__ import annotations

import time
from typing import Final

from backends.answers.answer import Answer, made_bytes, read_answer, usage_finder, usage_found
from backends.answers.body import Usage
from backends.answers.members import MemberFinder
from backends.answers.sse import Dialect, StreamMeter, is_event_stream
from backends.upstream_errors import ProtocolViolation, ReadTimeout, UpstreamError
from gateway.http.errors import ApiError, Reason
from gateway.http.headers import Header, content_type, header_of, is_json, is_text, retry_after_s
from gateway.pool.backend import Backend
from gateway.pool.pool import Pool
from gateway.proxy.engine_errors import ERROR_BODY_BYTES_MAX
from gateway.proxy.model_name_filter import ModelNameFilter
from gateway.proxy.refusals import failure_error, refusal_error, revoked_key_error
from gateway.proxy.relay import HELD, RELAYED, RETURNED, STREAMED, JsonEndCheck, Phase, Relay
from gateway.proxy.request_context import RequestContext
from gateway.request.interaction_claim import answer_keys
from gateway.telemetry.record import NO_SERVICE, Outcome
from policies.admission.decisions import Failure, Reject
from policies.request import Request, ServiceTokens

NOT_STREAMED: Final = "the engine answered in one piece where a stream was asked for, and had been begun"
BREAKING: Final = "most of your latest answers broke off at the engines; slow down, and see what breaks them"
RETRYABLE_IN_STREAM: Final = frozenset({429, 503})
CONTEXT_TOKENS_UNKNOWN: Final = 1 << 20
"""Context assumed for a model whose engines report none."""
ROUNDS_MAX: Final = 16
"""Most rounds of one Responses call. An engine that calls tools itself counts the tokens of every round."""


class Exchange(Relay):
    """A client's request, its place in the pool, and the answer. The `AdmissionClient` of its pool."""

    __slots__ = (
        "_answer_bytes", "_ending", "_finder", "_held", "_held_bytes_max", "_meter", "_name_filter",
        "_pool", "request",
    )  # fmt: skip

    _ending: JsonEndCheck
    """Check of an answer in one piece that is relayed as it comes, while `_finder` searches it for its usage."""

    def __init__(self, context: RequestContext, request: Request) -> None:
        super().__init__(context)
        self.request = request
        self._pool = context.serving_pool
        self._begin_answer()

    def _begin_answer(self) -> None:
        """Prepare for an answer from its beginning."""
        asked, model = self.context.payload.asked, self.context.payload.model
        self._name_filter = None if asked in ("", model) else ModelNameFilter(asked)
        self._meter: StreamMeter | None = None
        self._held: list[bytes] = []
        self._held_bytes_max = self._pool.response_buffer_bytes_max
        self._answer_bytes = 0
        self._finder: MemberFinder | None = None
        """Reader of an answer that is too long to hold, and relayed; None while the answer is held."""

    def submit(self) -> None:
        self.context.responder.on_disconnect = lambda: self._abandon(Outcome.ABANDONED, "client_disconnected")
        self.context.wait()
        self._pool.dispatcher.submit(self)

    # --- decisions of admission ---

    def dispatched(self, backend: str) -> None:
        if self.refuse_if_revoked():  # the event that started the request was that of the revocation
            return
        target = self._pool.backends[backend]
        breaks = self._pool.breaks
        if breaks.paced and (waits_s := breaks.waits_s(self.context.tenant, time.monotonic())):
            self._break_off(Reason.ANSWERS_BREAK, BREAKING, waits_s)
            return
        if not self.context.tries:
            self._pool.retries.sent()
        self.send(target, self.context.payload)

    def rejected(self, decision: Reject) -> None:
        self.end(Outcome.REFUSED, decision.reason.value)
        self.context.error(refusal_error(decision, self._pool.again_s()))

    def preempt(self) -> None:
        """Preempt this batch request. Do nothing once its client has seen any of the answer, or if the engine
        would work on in the background."""
        if self._call is not None and not self.context.relays and not self.context.payload.is_background:
            self.cancel()
            self._requeue(Failure.PREEMPTED)

    def moved(self, request: Request, pool: Pool) -> None:
        """Wait in another pool as `request`, made for that pool. The payload asks for the pool's model already."""
        self.request = self.context.request = request
        self.context.model = self.context.payload.model
        self._pool = self.context.serving_pool = pool
        self._begin_answer()

    def reject(self, error: ApiError, service: ServiceTokens | None = None) -> None:
        """Reject a request that waits, or that an engine has returned after this service."""
        self._pool.dispatcher.cancelled(self.request.id, service)
        self.end(Outcome.REFUSED, error.code.value, service or NO_SERVICE)
        self.context.error(error)

    def refuse_if_revoked(self, service: ServiceTokens | None = None) -> bool:
        """Reject the request if its key was revoked meanwhile, and return whether it was."""
        if self.context.keyring.takes(self.context.principal):
            return False
        self.reject(revoked_key_error(), service)
        return True

    def stop(self, error: ApiError) -> None:
        """End the exchange with this error in any phase, because the gateway stops."""
        if self.phase is not Phase.ENDED:
            self._abandon(Outcome.FAILED, error.code.value)
            self._visible_error(error)

    def _abandon(self, outcome: str, reason: str) -> None:
        """Take the request from the queue or its engine, and settle what it has received."""
        self.cancel()
        service = None if self._call is None else self._received()
        self._pool.dispatcher.cancelled(self.request.id, service)
        self.end(outcome, reason, service or NO_SERVICE)

    # --- answers of the engine ---

    def head_received(self, status: int, headers: list[Header]) -> None:
        self._status = status
        self._headers = headers
        kind = content_type(headers)
        if status == 200 and kind.startswith(b"text/event-stream"):
            self.phase = STREAMED[self.phase]
            self._meter = self.context.stream_meter(self.request.sequences)
            return
        self.phase = HELD[self.phase]
        is_live = kind != b"application/json" and 200 <= status < 300 and kind and not is_json(kind)
        if is_live and not header_of(headers, b"content-length"):
            self._held_bytes_max = 0

    def body_received(self, data: bytes) -> None:
        meter = self._meter
        if meter is None:
            is_first = not self._answer_bytes and self._status == 200
            if not (is_first and self.context.payload.stream and is_event_stream(data)):
                self._collect(data)
                return
            self.phase = STREAMED[self.phase]  # the content-type was wrong
            meter = self._meter = self.context.stream_meter(self.request.sequences)
        before = meter.token_events
        forward = meter.feed(data)
        context = self.context
        if not context.relays and self._is_refused_in_stream(meter):
            return
        tokens = meter.token_events - before
        is_silent = context.first_token_s is None
        if tokens or (is_silent and meter.started and self.backend.adapter.role_is_start):
            if is_silent:
                context.first_token_s = time.monotonic() - context.arrived_s
            self._pool.dispatcher.progressed(self.request.id, tokens)
        if forward:
            if self._name_filter is not None:
                forward = self._name_filter.apply(forward, goes_on=meter.is_amid_event)
            if context.relays:
                context.responder.write(forward)
            else:
                context.gives_out(meter.answer_id)
                context.begin_answer(self._status, self._headers, forward)

    def completed(self) -> None:
        if self._meter is not None:
            self._complete_stream(self._meter)
        else:
            self._complete_body()

    def failed(self, error: UpstreamError) -> None:
        backend, call = self.backend, self._call
        assert call is not None
        if self._meter is not None and self._meter.ended:
            self._complete_stream(self._meter)  # the answer is complete, only its transport is not
            return
        self._pool.answered(backend, self.context.tenant, error, self.context.dispatched_s)
        timed_out = isinstance(error, ReadTimeout)
        if error.before_first_byte and not timed_out and self._may_try_again(backend, call.sends):
            self._requeue(Failure.DROPPED if call.sends else Failure.UNREACHED)
            if call.sends and not self._pool.has_other(backend):
                self._pool.dispatcher.strand(self)
            return
        reason = Reason.BACKEND_TIMEOUT if timed_out else Reason.BACKEND_FAILED
        self._break_off(reason, "the engine fell silent" if timed_out else "the engine broke off its answer")

    def _may_try_again(self, backend: Backend, sends: int) -> bool:
        """Return whether the request may go to an engine again, after this one went away before its first byte."""
        if not sends:
            return True  # this engine never received the complete request
        context, pool = self.context, self._pool
        context.sends += sends
        if context.sends > 1 or self.request.engine or context.tenant in pool.breaks.paced:
            return False
        return (pool.has_other(backend) or pool.healthy_fallback() is not None) and pool.retries.take()

    def _break_off(self, reason: Reason, what: str, again_s: float = 0.0) -> None:
        """End without a complete answer. `again_s`: least seconds until a retry; 0.0 takes the pool's."""
        has_begun = self.phase is Phase.RELAYED or self.context.first_token_s is not None
        service = self._received() if has_begun else NO_SERVICE
        self._pool.dispatcher.failed(self.request.id, Failure.BROKEN, service)
        self.end(Outcome.FAILED, reason.value, service)
        error = failure_error(reason, what, self.request.id, again_s or self._pool.again_s())
        if self.context.sends > 1:  # two engines may have died of the request, so the client must not retry it
            error.retry_after_s, error.should_retry = None, False
        self._visible_error(error)

    def _break_off_truncated(self, what: str) -> None:
        """Break off an answer that the engine ended as if it were complete. `what`: the engine's fault."""
        error = ProtocolViolation(self.backend.name, what)
        self._pool.answered(self.backend, self.context.tenant, error, self.context.dispatched_s)
        self._break_off(Reason.BACKEND_FAILED, "the engine broke off its answer")

    # --- streams ---

    def _is_refused_in_stream(self, meter: StreamMeter) -> bool:
        """Return the request to its queue if this answer of status 200 is a refusal. Return whether it was."""
        error = meter.error
        refused = meter.aborted or error in RETRYABLE_IN_STREAM
        if refused and not meter.token_events:
            self.cancel()
            self._requeue(Failure.REFUSED)
            return True
        return False

    def _complete_stream(self, meter: StreamMeter) -> None:
        """End a stream: complete, with the error inside it, or broken off if its end is missing."""
        rest = meter.flush()
        if not self.context.relays and self._is_refused_in_stream(meter):
            return
        if meter.error is None and not meter.is_over:
            self._break_off_truncated("ended a stream without saying that it is over")
            return
        context = self.context
        if self._name_filter is not None:
            rest = self._name_filter.apply(rest)
        if not context.relays:
            context.begin_answer(self._status, self._headers, rest)
        elif rest:
            context.responder.write(rest)
        context.responder.end()
        if meter.error is not None:
            service = self._received()
            self._pool.dispatcher.failed(self.request.id, Failure.BROKEN, service)
            self.end(Outcome.FAILED, Reason.BACKEND_FAILED.value, service)
        else:
            answer = Answer(meter.usage, meter.awaits_more, meter.answer_id, meter.keys)
            self._settle(answer, meter.token_events)

    # --- whole bodies ---

    def _collect(self, data: bytes) -> None:
        """Hold the answer until it is complete and can be judged, or relay it if it is too long to hold.

        An error answer that is too long is replaced by the gateway's own error. An answer that is too long ends the
        request with an error if a stream was already begun.
        """
        self._answer_bytes += len(data)
        if self._finder is not None:
            self._finder.feed(data)
            self._ending.feed(data)
            self.context.responder.write(self._with_client_model(data))
            return
        self._held.append(data)
        pool = self._pool
        pool.answers_bytes += len(data)
        is_error = not 200 <= self._status < 300
        bytes_max = ERROR_BODY_BYTES_MAX if is_error else self._held_bytes_max
        if self._answer_bytes <= bytes_max and pool.answers_bytes <= pool.answers_bytes_max:
            return
        if is_error:
            self.cancel()
            self.fail_with_error(b"")
        elif self.context.responder.started:
            self.cancel()
            self._break_off(Reason.BACKEND_FAILED, NOT_STREAMED)
        else:
            self.phase = RELAYED[self.phase]
            held, self._held = b"".join(self._held), []
            pool.answers_bytes -= self._answer_bytes
            self._finder = usage_finder()
            self._finder.feed(held)
            self._ending = JsonEndCheck(self._headers)
            self._ending.feed(held)
            self.context.begin_answer(self._status, self._headers, self._with_client_model(held))

    def _with_client_model(self, data: bytes) -> bytes:
        """Return a piece of the answer with the client's name for the model (`ModelNameFilter.apply`)."""
        return data if self._name_filter is None else self._name_filter.apply(data, goes_on=True)

    def _complete_body(self) -> None:
        """End an answer in one piece: judge it, send it if it was held, and settle."""
        if self._finder is not None:
            if self._ending.is_missing:
                self._break_off_truncated("ended an answer before its end")
                return
            self.context.responder.end()
            usage = usage_found(self._finder)
            made = self._made_tokens(self._answer_bytes) if usage is None or usage.output_tokens is None else 0
            self._settle(Answer(usage), made)
            return
        body = self._held[0] if len(self._held) == 1 else b"".join(self._held)
        is_success = 200 <= self._status < 300
        answer = read_answer(body) if is_success else None
        refused = answer.is_drained if answer is not None else self.backend.adapter.is_refusal(self._status, body)
        if refused:
            self._requeue(Failure.REFUSED, retry_after_s(self._headers))
        elif answer is not None and self.context.responder.started:
            self._break_off(Reason.BACKEND_FAILED, NOT_STREAMED)
        elif answer is not None and not answer.is_whole and is_json(content_type(self._headers)):
            self._break_off_truncated("answered what is no whole JSON")
        elif answer is not None:
            shown = body if self._name_filter is None else self._name_filter.apply(body)
            self.context.answer(self._status, self._headers, shown)
            usage = answer.usage
            made = self._made_tokens(made_bytes(body)) if usage is None or usage.output_tokens is None else 0
            self._settle(answer, made)
        else:
            self.fail_with_error(body)

    def _made_tokens(self, length: int) -> int:
        """Return the output tokens of an answer in one piece that the engine does not count, estimated from its
        bytes."""
        if not self.context.route.generates:
            return 0
        length *= is_text(content_type(self._headers))
        tokens = max(1, round(length / self._pool.estimator.bytes_per_token))
        return self._believed(Usage(None, tokens), 0).output

    def fail_with_error(self, body: bytes) -> None:
        """End with the engine's error. The quota counts no tokens; the order charges the prompt (`RequestLedger`)."""
        self._pool.dispatcher.failed(self.request.id, Failure.BROKEN, NO_SERVICE)
        super().fail_with_error(body)

    # --- ends ---

    def _requeue(self, failure: Failure, again_s: float = 0.0) -> None:
        """Return the request to the head of its flow, charged nothing, or with what it received if it was preempted.

        A request whose key was revoked meanwhile ends here.
        """
        received = self._received() if failure is Failure.PREEMPTED else NO_SERVICE
        self.phase = RETURNED[self.phase]
        self._call = self.context.responder.on_pause = self.context.responder.on_resume = None
        self._pool.answers_bytes -= self._answer_bytes
        self._begin_answer()
        self.context.returned()
        if not self.refuse_if_revoked(received):
            self._pool.dispatcher.failed(self.request.id, failure, None, again_s)

    def _settle(self, answer: Answer, counted: int) -> None:
        """End with a complete answer: learn from it, and report its service. `counted`: tokens counted here."""
        self._pool.answered(self.backend, self.context.tenant)
        usage, awaits_more = answer.usage, answer.awaits_more
        request, payload = self.request, self.context.payload
        service = self._believed(usage, counted)
        if usage is not None and usage.prompt_tokens:
            self._pool.estimator.learn(payload.prompt, usage.prompt_tokens)
        if not awaits_more and (payload.demands_tool or request.claim.extends):
            awaits_more = None  # both end with the reason "stop", whether more follows or not
        if self._pool.claims is not None and not request.claim.explicit:
            goes_on_by = answer.id if self.context.route.dialect is Dialect.RESPONSES else ""
            request.progress.answer_keys = answer_keys(request.claim, answer.keys, goes_on_by)
        self.context.gives_out(answer.id)
        if self._works_on(usage):
            self._pool.dispatcher.cancelled(request.id, service)  # an answer still to come teaches nothing
        else:
            self._pool.dispatcher.finished(request.id, service, awaits_more)
        self.end(Outcome.COMPLETED, "", service)

    def _received(self) -> ServiceTokens:
        """Return the service that the request has received so far, while its answer is incomplete."""
        meter = self._meter
        if meter is not None:
            counted, usage = meter.token_events, meter.usage
        elif self.phase is Phase.RELAYED:
            counted, usage = self._made_tokens(self._answer_bytes), None
        elif self._call is not None and self._call.sends and self._works_on(None):
            counted, usage = 0, None
        else:
            return self._pool.dispatcher.received(self.request.id)
        # A usage reported before the end may be outdated.
        service = self._believed(usage, counted)
        return ServiceTokens(service.prompt, max(service.output, counted), service.cached)

    def _believed(self, usage: Usage | None, counted: int) -> ServiceTokens:
        """Return the service that the answer is charged: the engine's report, as far as it can be true, or else our own
        count.

        `counted`: our count of the output, used if the engine reports none. The engine's output count is capped by the
        request's own limit and the model's context, its prompt count by the context, its cached tokens by the prompt.
        An answer in the background without a count is charged its maximum.
        """
        request, payload, route = self.request, self.context.payload, self.context.route
        prompt, output = request.prompt_tokens, request.output_tokens_max if self._works_on(usage) else counted
        if usage is None:
            return ServiceTokens(prompt, output)
        room = self._pool.context_tokens_max(payload.model) or CONTEXT_TOKENS_UNKNOWN
        if route.dialect is Dialect.RESPONSES:
            room *= ROUNDS_MAX
        if usage.prompt_tokens:
            prompt = usage.prompt_tokens
            if prompt > room:
                # Where nothing is generated, each item of a list may be a prompt.
                prompts_max = request.sequences if route.generates else 1 + payload.prompt.commas()
                prompt = min(prompt, room * prompts_max)
        if usage.output_tokens:
            output = usage.output_tokens
            if output > request.output_tokens_max:  # this limit assumes an estimated prompt, so it may be too low
                output = min(output, max(counted, self._output_max(room)))
        return ServiceTokens(prompt, output, min(usage.cached_tokens, prompt))

    def _works_on(self, usage: Usage | None) -> bool:
        """Return whether the engine works on in the background, as far as it has reported."""
        return self.context.payload.is_background and (usage is None or usage.output_tokens is None)

    def _output_max(self, room: int) -> int:
        """Return the most output tokens that the answer can have, in all sequences."""
        payload, route = self.context.payload, self.context.route
        if not route.generates:
            return 0
        asked = payload.output_tokens_max if payload.output_param else None
        if asked is not None and route.dialect is Dialect.RESPONSES:
            asked *= ROUNDS_MAX
        return (room if asked is None else min(asked, room)) * self.request.sequences

    def end(self, outcome: str, reason: str, service: ServiceTokens = NO_SERVICE) -> None:
        if self._finder is None:
            self._pool.answers_bytes -= self._answer_bytes
        self.context.stop_waiting()
        super().end(outcome, reason, service)
        self._pool.ended(self.context)

    def _visible_error(self, error: ApiError) -> None:
        """Send an error to the client, inside the answer if that has begun."""
        meter, context = self._meter, self.context
        context.error(error, is_within=context.relays and (meter is None or meter.is_amid_event))
