"""What happened to one request? The one record that the access log and the metrics are written from."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from gateway.telemetry.trace import TraceContext
from policies.admission.waits import seconds_of
from policies.request import Request, ServiceTokens

NO_SERVICE: Final = ServiceTokens(0, 0)
PATH_LENGTH_MAX: Final = 200
"""So much of a path is written."""
NO_WAIT: Final[Mapping[str, float]] = {}


class Outcome:
    """How did it end? In words, as the log and the metrics have it."""

    COMPLETED: Final = "completed"
    ABANDONED: Final = "abandoned"
    """The client went away."""
    FAILED: Final = "failed"
    """The engine, or the way to it, failed."""
    REFUSED: Final = "refused"
    """It was queued, or asked to be, and was not served; or somebody, be it the engine, found it wrong by itself."""


class RequestRecord:
    """A request and what became of it. Times on the monotonic clock, tokens as settled.

    Attributes:
        id: given by the server; every answer carries it as `x-request-id`.
        client_id: what the client calls it in its own `x-request-id`; empty if that is not well-formed.
        client: the address of the client: that of the peer, unless the peer is trusted to name it.
        path: as sent, without a query.
        tenant: who pays, as the head says; empty: nobody in particular.
        group: the group that the tenant is in. key: the label of the key that it came with.
        app: which app of its tenant asks.
        model: the model that is asked for, by the engines' name once a pool is found.
        stream: a streamed answer is asked for.
        is_batch: it comes from a stored batch, whose result carries its usage.
        request: what asked for admission; None: it never came to that.
        trace: its place in a trace, if traces are followed.
        pool: where it was admitted or refused; "": nowhere.
        backend: the engine that had it last; tries: how often an engine was given it.
        sends: how often it was sent whole to an engine that went away without an answer.
        arrived_s: when it was there whole.
        was_dispatched: an engine had it, and did not give it back.
        dispatched_s: when it went to its engine; if it never did, when it ended. queue_s: from arrival to then.
        first_token_s: from arrival; None: no token was seen (the answer was not streamed, or there was none).
        outcome: as `Outcome` has it. reason: why, if it did not complete.
        ended_s, total_s: when it ended, and how long after its arrival.
        waited_s: once it has ended, what held it back, in seconds by obstacle. Their sum is `queue_s` without the time
        in which the gateway read the request.
        service: what it received.
    """

    id: str = ""
    client_id: str = ""
    client: str = ""
    path: str = ""
    tenant: str = ""
    group: str = ""
    key: str = ""
    app: str = ""
    model: str = ""
    stream: bool = False
    is_batch: bool = False
    request: Request | None = None
    trace: TraceContext | None = None
    pool: str = ""
    backend: str = ""
    tries: int = 0
    sends: int = 0
    arrived_s: float = 0.0
    was_dispatched: bool = False
    dispatched_s: float = 0.0
    queue_s: float = 0.0
    first_token_s: float | None = None
    outcome: str = ""
    reason: str = ""
    ended_s: float = 0.0
    total_s: float = 0.0
    waited_s: Mapping[str, float] = NO_WAIT
    service: ServiceTokens = NO_SERVICE

    def dispatched(self, backend: str, now: float) -> None:
        self.backend = backend
        self.tries += 1
        self.was_dispatched = True
        self.dispatched_s = now
        self.queue_s = now - self.arrived_s

    def returned(self) -> None:
        """It went back to the queue."""
        self.was_dispatched = False
        self.first_token_s = None

    def ended(self, outcome: str, reason: str, service: ServiceTokens, now: float) -> None:
        self.outcome = outcome
        self.reason = reason
        self.service = service
        self.ended_s = now
        self.total_s = now - self.arrived_s
        if not self.was_dispatched:
            self.dispatched_s, self.queue_s = now, self.total_s
        wait = None if self.request is None else self.request.progress.wait
        if wait is not None:
            self.waited_s = seconds_of(wait)
