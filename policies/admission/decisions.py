"""The admission engine's decisions as values, and a bounded memory of the latest ones."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, Final, NamedTuple

from policies.request import Flow, Limit, PlacementReason, Pressure, RejectReason, Request, Wait

RECENT_MAX: Final = 4096


class Failure(StrEnum):
    """The way in which a dispatched request failed."""

    REFUSED = "refused"
    """The backend refused the request, usually for lack of room. The request returns to the queue, unless backends have
    refused it `attempts_max` times while they took others."""
    UNREACHED = "unreached"
    """No connection was made. The request returns to the queue, up to `attempts_max` times."""
    DROPPED = "dropped"
    """The backend closed the connection without an answer. The request may be the cause, so it never goes to that
    backend again, but other requests do."""
    BROKEN = "broken"
    """The answer broke off. The received service stays charged."""
    PREEMPTED = "preempted"
    """The request was preempted. The request returns to the queue, and its service so far stays charged."""


@dataclass(slots=True, init=False, unsafe_hash=True)
class Dispatch:
    """The decision to send a queued request to a backend."""

    id: str
    backend: str

    def __init__(self, id: str, backend: str) -> None:
        self.id = id
        self.backend = backend


class Reject(NamedTuple):
    """The decision to reject a request."""

    id: str
    reason: RejectReason
    retry_after_s: float
    limit: Limit | None = None
    """The exceeded limit, if a limit is the reason."""
    ceiling: str = ""
    """A sentence on the ceiling that kept the request waiting; "" if none did."""


class Preempt(NamedTuple):
    """The decision to preempt a dispatched batch request in favour of interactive work (`tree.preemption`)."""

    id: str


Decision = Dispatch | Reject | Preempt


class DecisionRecord(NamedTuple):
    """A decision with the facts behind it."""

    id: str
    client_id: str
    tenant: str
    app: str
    user: str
    now: float
    wait: Wait | None
    """The wait; None if the decision was made at once."""
    stage: int
    inside: bool
    placed: PlacementReason | None
    """Reason for the choice of the engine, if one was chosen."""
    cached_tokens: int
    """Prompt tokens that the engine was expected to have cached."""
    backend: str
    """Name of the engine; "" if the request was rejected."""
    rejected: Reject | None
    pressure: Pressure

    @property
    def decision(self) -> Dispatch | Reject:
        return self.rejected or Dispatch(self.id, self.backend)

    @property
    def flow(self) -> Flow:
        return Flow(self.tenant, self.app, self.user)


class RecentDecisions:
    """The latest decisions, the newest one last.

    Each decision is kept as a plain tuple of the fields of `DecisionRecord`, without the request. Tuples save memory
    and, above all, work of the garbage collector, which scans all objects that live for a while.
    """

    def __init__(self, most: int) -> None:
        self._decided: deque[tuple[Any, ...]] = deque(maxlen=min(most, RECENT_MAX))

    def set(self, most: int) -> None:
        """Replace the number of remembered decisions."""
        self._decided = deque(self._decided, maxlen=min(most, RECENT_MAX))

    def note(self, decision: Dispatch | Reject, request: Request, now: float, pressure: Pressure) -> None:
        """Remember a decision on a request, with the facts of this moment."""
        progress = request.progress
        backend, rejected = (decision.backend, None) if isinstance(decision, Dispatch) else ("", decision)
        about = progress.wait, progress.stage, progress.inside, progress.placed, progress.cached_tokens
        self._decided.append((request.id, request.client_id, *request.flow, now, *about, backend, rejected, pressure))

    def last(self, request_id: str) -> DecisionRecord | None:
        """Return the latest decision on this request, if it is remembered."""
        for noted in reversed(self._decided):
            if noted[0] == request_id:
                return DecisionRecord(*noted)
        return None

    def of_client(self, client_id: str) -> list[str]:
        """Return the ids of the remembered requests with this client id, the latest first."""
        return list(dict.fromkeys(noted[0] for noted in reversed(self._decided) if noted[1] == client_id))
