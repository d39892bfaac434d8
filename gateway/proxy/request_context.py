"""A request from its head to its log line, and the ways to answer it.

A stream that waits for long is begun before its answer: with status 200 and a comment that begins with `: waiting`,
again and again, so that no intermediary takes it for dead. A later error is then an error event.
"""

from __future__ import annotations

import time
from typing import Final

from backends.answers.sse import Dialect, StreamMeter
from gateway.http.errors import ApiError, Reason, expected_wait_headers
from gateway.http.headers import REQUEST_DROPPED, RESPONSE_DROPPED, Header, forwarded, header_of
from gateway.http.http_request import HttpRequest
from gateway.http.responder import Responder
from gateway.keys.identity import Keyring, Principal
from gateway.keys.stored_responses import StoredResponses
from gateway.pool.pool import Pool
from gateway.pool.waiting import WaitingStreams
from gateway.proxy.engine_errors import OWN_ERROR_EVENTS
from gateway.proxy.refusals import in_words, rate_limit_headers
from gateway.request.apis import AUDIO, OTHER
from gateway.request.body.form import is_form, read_form
from gateway.request.body.payload import Payload, read_json
from gateway.request.routes import Route
from policies.queue.expected_wait import interval_s
from policies.request import State

WAITING: Final = b": waiting\n\n"
WAITED: Final = b":\n\n"
"""Sent in one piece with the first data after comments. `vllm bench serve` strips each piece that it reads and so loses
the end of a comment; without a further comment it would lose the whole answer."""
EVENT_STREAM: Final = (
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),  # nginx would buffer the comments
)


class RequestContext(HttpRequest):
    """A request, whose parts are set step by step: `route` and `principal` with the head, `responder` with the
    complete request, `payload` when it is read, `serving_pool` when admission is asked for.

    Attributes:
        route: the kind of request.
        principal: the caller, by the key.
        responder: the writer of the answer.
        payload: the body.
        serving_pool: the pool where the request waits and is answered.
        responses: the registry of stored responses.
        keyring: the keys that are valid now.
        engine: the only engine that can serve the request, since it has the response that the request continues; "" for
            any.
        relays: whether part of an engine's answer has gone to the client. Until then another engine may get the
            request.
    """

    route: Route
    principal: Principal
    responder: Responder
    payload: Payload
    serving_pool: Pool
    engine: str = ""
    responses: StoredResponses
    keyring: Keyring
    relays: bool = False
    _waits_in: WaitingStreams | None = None

    def comes_from(self, principal: Principal) -> None:
        """Record the caller, as named by the key."""
        self.principal = principal
        self.tenant, self.group, self.key = principal.tenant, principal.group, principal.label

    def read_body(self, json_bytes_max: int) -> Payload:
        """Read a body of JSON of at most `json_bytes_max` bytes, or a form where the API takes forms. Raise `ApiError`
        for a larger body of JSON, and for one that cannot be read.

        All other bodies are read as JSON whatever their content-type, since some engines ignore it.
        """
        api = self.route.api
        if api is AUDIO or api is OTHER:
            content_type = header_of(self.headers, b"content-type")
            if is_form(content_type):
                return read_form(self.body, content_type, api)
            if api is AUDIO:
                message = "a form with a file is expected: content-type multipart/form-data"
                raise ApiError(Reason.INVALID_REQUEST, message)
        if len(self.body) > json_bytes_max:
            message = f"the body has {len(self.body)} bytes of JSON, and at most {json_bytes_max} are read"
            raise ApiError(Reason.BODY_TOO_LARGE, message)
        return read_json(self.body, api)

    def upstream_head(self) -> bytes:
        """Return the head of the request to any engine, without the lines that depend on the engine."""
        head, trace = self.head, self.trace
        passed_on = None if trace is None else trace.passed_on(forwarded(head.headers, REQUEST_DROPPED))
        lines = head.forwarded() if passed_on is None else head.lines(passed_on)
        return lines + b"x-request-id: " + self.id.encode() + b"\r\n"

    def wait(self) -> None:
        """Register a stream for comments while it waits."""
        waiting = self.serving_pool.waiting
        if waiting is not None and self.stream and self.route.streams_events:
            waiting.add(self, self.arrived_s)
            self._waits_in = waiting

    def say_waiting(self) -> None:
        """Send a comment, with the expected wait while the request is queued. Start the answer if needed."""
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
            responder.start(200, self._add_own_fields([*EVENT_STREAM]), first=comment)

    def stop_waiting(self) -> None:
        """End the comments."""
        if self._waits_in is not None:
            self._waits_in.leave(self)
            self._waits_in = None

    def begin_answer(self, status: int, headers: list[Header], first: bytes) -> None:
        """Begin to relay an engine's answer. No other engine gets the request now, so its body is dropped."""
        self.relays = True
        self.payload.body = b""
        responder = self.responder
        responder.let_body_go()
        self.stop_waiting()
        if responder.started:
            responder.write(WAITED + first)
        else:
            responder.start(status, self._add_own_fields(forwarded(headers, RESPONSE_DROPPED)), first=first)

    def answer(self, status: int, headers: list[Header], body: bytes) -> None:
        """Send an engine's answer in one piece. No part of it has been sent before."""
        self.stop_waiting()
        self.responder.respond(status, self._add_own_fields(forwarded(headers, RESPONSE_DROPPED)), body)

    def gives_out(self, id: str) -> None:
        """Remember the tenant and the engine of a stored response. An empty id is ignored."""
        if id and self.route.dialect is Dialect.RESPONSES:
            payload = self.payload
            self.responses.note((self.tenant, id, payload.asked, payload.model, self.backend), time.monotonic())

    def error(self, error: ApiError, *, is_engines: bool = False, is_within: bool = False) -> None:
        """Send an error in the way that is still open: as an answer, as a stream event, or by aborting.

        Args:
            is_engines: the error comes from an engine.
            is_within: the client has received part of an event or body.
        """
        responder, dialect = self.responder, self.route.dialect
        if responder.closed:
            return
        if not responder.started:
            own = self._add_own_fields([]) if is_engines else [self.id_field()]
            responder.respond(error.status, [*error.headers(), *own], error.body(dialect))
        elif is_within:
            responder.abort()
        else:
            responder.write((b"" if self.relays else WAITED) + error.sse_event(dialect))
            responder.end()

    def stream_meter(self, choices: int) -> StreamMeter:
        """Return a meter for an event stream that holds `choices` answers side by side."""
        dialect = self.route.dialect
        strip = self.route.reports_usage and self.payload.stream and not self.payload.asks_usage
        return StreamMeter(dialect, strip_usage=strip, own_error=OWN_ERROR_EVENTS[dialect], choices=choices)

    def id_field(self) -> Header:
        """Return the header field with the request's id."""
        return b"x-request-id", self.id.encode()

    def _add_own_fields(self, fields: list[Header]) -> list[Header]:
        """Return these header fields with those that need no engine: id, expected wait and rate limits."""
        fields.append(self.id_field())
        wait = self.request.progress.wait if self.request is not None else None
        if wait is not None and wait.expected is not None:
            fields += expected_wait_headers(wait.expected.wait_s)
        quotas = self.serving_pool.quotas
        if quotas is not None:
            names = self.request.quota_names if self.request is not None else ()
            fields += rate_limit_headers(quotas.standing(self.tenant, time.monotonic(), names))
        return fields
