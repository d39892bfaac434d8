"""What does the client see of its request, from the first comment to an error? Written over one `Responder`.

A stream that waits for long is begun before its answer: with status 200 and the comment `: waiting`, again and again,
so that nobody in between takes it for dead. What would have been an error answer is then an error event.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Final

from gateway.http.errors import ApiError
from gateway.http.headers import forward_response_headers
from gateway.http.responder import Responder
from gateway.proxy.refusals import rate_limit_headers
from gateway.request.routes import Route
from gateway.telemetry.record import RequestRecord
from policies.request import Request

if TYPE_CHECKING:
    from gateway.pool.pool import Pool
    from gateway.pool.waiting import Place

__all__ = ["Reply"]

Header = tuple[bytes, bytes]

WAITING: Final = b": waiting\n\n"
WAITED: Final = b":\n\n"
"""Goes out in one piece with what follows comments. `vllm bench serve` strips each piece that it reads, so the end of a
comment is lost to it, and without another one so is the whole answer."""
EVENT_STREAM: Final = (
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),  # nginx would keep the comments to itself
)


class Reply:
    """The answer to one request as its client gets it: comments while it waits, then the engine's bytes or an error."""

    __slots__ = ("_place", "_pool", "_record", "_request", "_responder", "_route", "relays")

    def __init__(self, responder: Responder, request: Request, record: RequestRecord, route: Route, pool: Pool) -> None:
        self._responder = responder
        self._request = request
        self._record = record
        self._route = route
        self._pool = pool
        self._place: Place | None = None
        self.relays = False
        """Has something of the engine's answer gone to the client? Until then the request may go to another engine."""

    @property
    def is_begun(self) -> bool:
        """Is its head out, be it for a comment?"""
        return self._responder.started

    def wait(self) -> None:
        """The request asks for admission."""
        waiting = self._pool.waiting
        if waiting is not None and self._request.streamed and self._route.streams_events:
            self._place = waiting.add(self, self._request.arrived_s)

    def say_waiting(self) -> None:
        """Nothing has gone to the client for long."""
        responder = self._responder
        if responder.started:
            responder.write(WAITING)
        else:
            responder.start(200, [*EVENT_STREAM, *self._standing()], first=WAITING)

    def begin(self, status: int, headers: list[Header], first: bytes) -> None:
        """Something of the engine's answer is there; from here on it is written to the responder as it comes."""
        self.relays = True
        self._responder.let_body_go()
        self.leave_place()
        if self._responder.started:
            self._responder.write(WAITED + first)
        else:
            self._responder.start(status, self._fields(headers), first=first)

    def whole(self, status: int, headers: list[Header], body: bytes) -> None:
        """Send an engine's answer in one piece. No part of it has been sent before."""
        self.leave_place()
        self._responder.respond(status, self._fields(headers), body)

    def leave_place(self) -> None:
        """It waits no longer, whatever has come of it."""
        if self._place is not None:
            self._place.leave()
            self._place = None

    def error(self, error: ApiError, *, is_engines: bool = False, is_within: bool = False) -> None:
        """An error, in whatever way is still open: an answer, an event in the stream, a broken body.

        `is_engines`: what an engine found wrong. `is_within`: a part of something has been relayed, and not its rest.
        """
        responder, dialect = self._responder, self._route.dialect
        if responder.closed:
            return
        if not responder.started:
            own = self._own() if is_engines else [self._request_id()]
            responder.respond(error.status, [*error.headers(), *own], error.body(dialect))
        elif is_within:
            responder.abort()
        else:
            responder.write((b"" if self.relays else WAITED) + error.sse_event(dialect))
            responder.end()

    def _fields(self, headers: list[Header]) -> list[Header]:
        """The head of an engine's answer, with what is ours."""
        return forward_response_headers(headers) + self._own()

    def _own(self) -> list[Header]:
        fields = self._standing()
        if self._pool.debug_headers:
            fields += self._record.debug_headers(self._pool.policy_name)
        return fields

    def _standing(self) -> list[Header]:
        """What can be said whether or not an engine has the request."""
        fields = [self._request_id()]
        if self._pool.quotas is not None:
            fields += rate_limit_headers(self._pool.quotas.standing(self._request.flow.tenant, time.monotonic()))
        return fields

    def _request_id(self) -> Header:
        return b"x-request-id", self._request.id.encode()
