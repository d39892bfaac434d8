"""The record of one request, from which the access log, the metrics and the span are written."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from gateway.telemetry.trace import TraceContext
from policies.admission.waits import seconds_of
from policies.request import Request, ServiceTokens

NO_SERVICE: Final = ServiceTokens(0, 0)
PATH_LENGTH_MAX: Final = 200
NO_WAIT: Final[Mapping[str, float]] = {}


class Outcome:
    """The ways in which a request ends, in the words of the log and the metrics."""

    COMPLETED: Final = "completed"
    ABANDONED: Final = "abandoned"
    """The client went away."""
    FAILED: Final = "failed"
    """The engine failed, or the connection to it."""
    REFUSED: Final = "refused"
    """The request was not admitted, or the gateway or the engine found it invalid."""


class RequestRecord:
    """A request and its outcome. Times on the monotonic clock, tokens as settled.

    Attributes:
        id: given by the server; every answer carries it as `x-request-id`.
        client_id: the client's own `x-request-id`; empty if that is not well-formed.
        client: address of the client: the peer's, unless the peer is trusted to name another.
        path: as sent, without a query.
        tenant: the tenant that pays, by the head; empty if none is known.
        group: the group that the tenant is in. key: the label of the request's key.
        app: the app of its tenant.
        model: the requested model, by the engines' name once a pool is found.
        stream: whether a streamed answer is requested.
        is_batch: whether it comes from a stored batch, whose result carries its usage.
        request: the request for admission; None if it never asked for admission.
        trace: its place in a trace, if traces are followed.
        pool: where it was admitted or refused; empty if nowhere. policy: once it has ended, the policy of that pool.
        backend: the engine that had it last. tries: how often it was dispatched.
        sends: how often it was completely sent to an engine that went away without an answer.
        arrived_s: when it had arrived completely.
        was_dispatched: whether it was dispatched and has not returned to the queue.
        dispatched_s: when it was dispatched; if it never was, when it ended. queue_s: from arrival to dispatched_s.
        first_token_s: from arrival; None if no token was seen (the answer was not streamed, or there was none).
        outcome: as in `Outcome`. reason: why it did not complete.
        ended_s: when it ended. total_s: from arrival to the end.
        waited_s: once it has ended, its wait in seconds by obstacle. The sum is `queue_s` without the time in which the
            gateway read the request.
        service: tokens received.
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
    policy: str = ""
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
        """Note that the request went back to the queue."""
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
