"""What is known of one request, from its head to its log line, and what does its client see of it?

A stream that waits for long is begun before its answer: with status 200 and the comment `: waiting`, again and again,
so that nobody in between takes it for dead. What would have been an error answer is then an error event.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Final

from backends.answers.sse import Dialect, StreamMeter
from gateway.http.errors import ApiError, expected_wait_headers
from gateway.http.headers import Header, forward_response_headers
from gateway.http.http_request import HttpRequest
from gateway.http.responder import Responder
from gateway.keys.identity import Principal
from gateway.proxy.engine_errors import OWN_ERROR_EVENTS
from gateway.proxy.refusals import in_words, rate_limit_headers
from gateway.request.body.payload import Payload
from gateway.request.routes import Route
from policies.queue.expected_wait import interval_s
from policies.request import State

if TYPE_CHECKING:
    from gateway.keys.stored_responses import StoredResponses
    from gateway.pool.pool import Pool
    from gateway.pool.waiting import Place

WAITING: Final = b": waiting\n\n"
WAITED: Final = b":\n\n"
"""Goes out in one piece with what follows comments. `vllm bench serve` strips each piece that it reads, so the end of a
comment is lost to it, and without another one so is the whole answer."""
EVENT_STREAM: Final = (
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),  # nginx would keep the comments to itself
)


class RequestContext(HttpRequest):
    """One request. Each part is there once its station was passed: `route` and `principal` since the head, `responder`
    since the request is there whole, `payload` since it was read, `serving_pool` since admission was asked for.

    Attributes:
        route: what kind of request it is. principal: who asks, as the key has it.
        responder: writes its answer. payload: its body.
        serving_pool: where it waits and is answered.
        responses: knows where the responses are that answers give out.
        engine: the only one that can serve it, since it has what the request goes on from; "": any.
        relays: something of the engine's answer has gone to the client. Until then another engine may get the request.
    """

    __slots__ = (
        "_place",
        "engine",
        "payload",
        "principal",
        "relays",
        "responder",
        "responses",
        "route",
        "serving_pool",
    )

    route: Route
    principal: Principal
    responder: Responder
    payload: Payload
    serving_pool: Pool
    engine: str
    responses: StoredResponses
    relays: bool
    _place: Place | None

    def arrived(self, responder: Responder, now: float) -> None:
        """It is there whole, and is to be answered by this."""
        self.responder = responder
        self.arrived_s = now
        self.engine = ""
        self.relays = False
        self._place = None

    def comes_from(self, principal: Principal) -> None:
        """The key names who asks."""
        self.principal = principal
        self.tenant, self.group, self.key = principal.tenant, principal.group, principal.label

    def wait(self) -> None:
        """It asks for admission."""
        waiting = self.serving_pool.waiting
        if waiting is not None and self.stream and self.route.streams_events:
            self._place = waiting.add(self, self.arrived_s)

    def say_waiting(self) -> None:
        """Nothing has gone to the client for long."""
        responder, dispatcher = self.responder, self.serving_pool.dispatcher
        comment, request = WAITING, self.request
        if request is not None and request.progress.state is State.QUEUED:
            expected = dispatcher.engine.requests.expected(request, dispatcher.clock(), comes=False)
            ahead = max(0, round(expected.turns) - 1)
            least, most = (in_words(bound_s) for bound_s in interval_s(expected.wait_s))
            text = f": waiting, between {least} and {most}, behind {ahead} request{'' if ahead == 1 else 's'}"
            comment = text.encode() + b"\n\n"
        if responder.started:
            responder.write(comment)
        else:
            fields = [*EVENT_STREAM]
            self._add_own_fields(fields)
            responder.start(200, fields, first=comment)

    def leave_place(self) -> None:
        """It waits no longer, whatever has come of it."""
        if self._place is not None:
            self._place.leave()
            self._place = None

    def begin_answer(self, status: int, headers: list[Header], first: bytes) -> None:
        """Something of the engine's answer is there; from here on it is written to the responder as it comes. No other
        engine gets the request, so nobody needs its body."""
        self.relays = True
        self.payload.body = b""
        responder = self.responder
        responder.let_body_go()
        self.leave_place()
        if responder.started:
            responder.write(WAITED + first)
        else:
            responder.start(status, self._answer_fields(headers), first=first)

    def answer(self, status: int, headers: list[Header], body: bytes) -> None:
        """Send an engine's answer in one piece. No part of it has been sent before."""
        if self._place is not None:
            self.leave_place()
        self.responder.respond(status, self._answer_fields(headers), body)

    def gives_out(self, id: str) -> None:
        """Remember whose the response of this id is, and which engine has it. Empty: the answer has no id."""
        if id and self.route.dialect is Dialect.RESPONSES:
            payload = self.payload
            self.responses.note((self.tenant, id, payload.asked, payload.model, self.backend), time.monotonic())

    def error(self, error: ApiError, *, is_engines: bool = False, is_within: bool = False) -> None:
        """An error, in whatever way is still open: an answer, an event in the stream, a broken body.

        `is_engines`: what an engine found wrong. `is_within`: a part of something has been relayed, and not its rest.
        """
        responder, dialect = self.responder, self.route.dialect
        if responder.closed:
            return
        if not responder.started:
            own = self._answer_fields([]) if is_engines else [self.id_field()]
            responder.respond(error.status, [*error.headers(), *own], error.body(dialect))
        elif is_within:
            responder.abort()
        else:
            responder.write((b"" if self.relays else WAITED) + error.sse_event(dialect))
            responder.end()

    def stream_meter(self, choices: int) -> StreamMeter:
        """Reads its answer, which is a stream of events of so many choices."""
        dialect = self.route.dialect
        strip = self.route.reports_usage and self.payload.stream and not self.payload.asks_usage
        meter = StreamMeter(dialect, strip_usage=strip, own_error=OWN_ERROR_EVENTS[dialect])
        meter.choices = choices
        return meter

    def id_field(self) -> Header:
        """What every answer says."""
        return b"x-request-id", self.id.encode()

    def _answer_fields(self, headers: list[Header]) -> list[Header]:
        """The head of an engine's answer, with what is ours."""
        pool, fields = self.serving_pool, forward_response_headers(headers)
        self._add_own_fields(fields)
        if pool.debug_headers:
            fields += self._debug_fields(pool.policy_name)
        return fields

    def _add_own_fields(self, fields: list[Header]) -> None:
        """What can be said whether or not an engine has the request."""
        fields.append((b"x-request-id", self.id.encode()))
        wait = self.request.progress.wait if self.request is not None else None
        if wait is not None and wait.expected is not None:
            fields += expected_wait_headers(wait.expected.wait_s)
        quotas = self.serving_pool.quotas
        if quotas is not None:
            names = self.request.quota_names if self.request is not None else ()
            fields += rate_limit_headers(quotas.standing(self.tenant, time.monotonic(), names))

    def _debug_fields(self, policy: str) -> list[Header]:
        """Who was served how, for the client to see. `policy` is the pool's."""
        queue_ms = f"{self.queue_s * 1000:.1f}"
        fields = {
            "x-fairgate-tenant": self.tenant,
            "x-fairgate-policy": policy,
            "x-fairgate-backend": self.backend,
            "x-fairgate-queue-ms": queue_ms,
            "server-timing": f"queue;dur={queue_ms}",
        }
        return [(name.encode(), value.encode()) for name, value in fields.items()]
