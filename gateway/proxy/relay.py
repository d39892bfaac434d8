"""A request at an engine and its answer to the client, with admission (`Exchange`) or without (`PassThrough`).

    waiting -> sent                  to an engine
    sent -> held                     the answer waits until it is complete and can be judged
    sent, held -> streamed           an event stream, counted event by event
    sent, held -> relayed            in pieces as they come, such as an answer too long to hold
    sent, held, streamed -> waiting  refused or preempted, as long as the client has seen nothing
    sent -> waiting                  the engine was not reached, or went away before a byte of an answer
    any -> ended                     once

Each event is a table: the state before it gives the next one. A state that the table lacks is a fault of the gateway,
and raises KeyError.
"""

from __future__ import annotations

import time
from enum import IntEnum
from typing import Any, Final

from backends.client.upstream import UpstreamCall
from gateway.http.errors import EngineError
from gateway.http.headers import Header, content_type, is_json, retry_after_s
from gateway.pool.backend import Backend
from gateway.proxy.engine_errors import engine_error
from gateway.proxy.request_context import RequestContext
from gateway.request.body.payload import Payload
from gateway.telemetry.record import NO_SERVICE, Outcome
from policies.request import ServiceTokens


class Phase(IntEnum):
    """The states of a request and its answer. Integers are hashed in C, members of a plain `Enum` are not."""

    WAITING = 0
    SENT = 1
    HELD = 2
    STREAMED = 3
    RELAYED = 4
    ENDED = 5


SENT: Final = {Phase.WAITING: Phase.SENT}
HELD: Final = {Phase.SENT: Phase.HELD}
STREAMED: Final = {Phase.SENT: Phase.STREAMED, Phase.HELD: Phase.STREAMED}
RELAYED: Final = {Phase.SENT: Phase.RELAYED, Phase.HELD: Phase.RELAYED}
RETURNED: Final = {Phase.SENT: Phase.WAITING, Phase.HELD: Phase.WAITING, Phase.STREAMED: Phase.WAITING}
ENDED: Final[dict[Phase, Phase]] = dict.fromkeys([phase for phase in Phase if phase is not Phase.ENDED], Phase.ENDED)
_CLOSES: Final = {b"{": b"}", b"[": b"]"}


class JsonEndCheck:
    """A check of an answer that is relayed as it comes: the last byte of JSON must close what the first one opened."""

    __slots__ = ("_first", "_is_json", "_last")

    def __init__(self, headers: list[tuple[bytes, bytes]]) -> None:
        self._is_json = is_json(content_type(headers))
        self._first = self._last = b""

    def feed(self, data: bytes) -> None:
        """Add the next bytes."""
        if self._is_json and not data.isspace():
            self._first = self._first or data.lstrip()[:1]
            self._last = data.rstrip()[-1:]

    @property
    def is_missing(self) -> bool:
        """Return whether the bytes fed so far lack the end of the JSON."""
        return self._last != _CLOSES.get(self._first, self._last)


class Relay:
    """A request, its engine and its answer. Each kind of relay is the `Receiver` of the answer."""

    __slots__ = ("_call", "_headers", "_status", "_upstream_head", "backend", "context", "phase")

    backend: Backend
    """The engine that has the request, or had it last."""

    def __init__(self, context: RequestContext) -> None:
        self.context = context
        self.phase = Phase.WAITING
        self._upstream_head = context.upstream_head()
        self._call: UpstreamCall | None = None
        self._status = 0
        self._headers: list[Header] = []

    def send(self, backend: Backend, payload: Payload | None) -> None:
        """Send the request to this engine, and read from the engine no faster than the client reads."""
        context = self.context
        receiver: Any = self
        self.phase = SENT[self.phase]
        self.backend = backend
        context.dispatched(backend.name, time.monotonic())
        call = self._call = backend.send(
            self._upstream_head, payload, context.tenant, receiver, is_fresh=context.sends > 0
        )
        responder = context.responder
        # Not the bound methods: compiled, those cost five times as much to make.
        responder.on_pause, responder.on_resume = lambda: call.pause(), lambda: call.resume()

    def cancel(self) -> None:
        """Take the request from the engine that has it."""
        if self._call is not None:
            self._call.cancel()

    def fail_with_error(self, body: bytes) -> None:
        """End the answer with the engine's error."""
        error = engine_error(self.backend.name, self._status, body, retry_after_s(self._headers))
        self.context.error(error, is_engines=self.context.request is not None)
        outcome = Outcome.REFUSED if isinstance(error, EngineError) else Outcome.FAILED
        self.end(outcome, f"status_{self._status}")

    def end(self, outcome: str, reason: str, service: ServiceTokens = NO_SERVICE) -> None:
        """Record the end. The client has its answer, or an error, or is gone."""
        self.phase = ENDED[self.phase]
        self._call = None
        context = self.context
        responder = context.responder
        responder.on_disconnect = responder.on_pause = responder.on_resume = None
        context.ended(outcome, reason, service, time.monotonic())
