"""What was decided, and why? The admission engine's decisions as values, and a bounded memory of the latest."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, Final, NamedTuple

from policies.request import Flow, Limit, Placed, Pressure, Refusal, Request, Wait

RECENT_MAX: Final = 4096


class Failure(StrEnum):
    """How did a dispatched request fail?"""

    REFUSED = "refused"
    """The backend refused it, for lack of room as a rule. The request goes back to the queue."""
    UNREACHED = "unreached"
    """No connection was made. The request may be tried elsewhere, a bounded number of times."""
    DROPPED = "dropped"
    """The backend had the request, and closed the connection without an answer. It goes to another backend, if at all:
    this one may have died of it, and other requests still go there."""
    BROKEN = "broken"
    """The answer broke off. What was received stays charged."""
    GIVEN_BACK = "given_back"
    """It was stopped by a `GiveBack`. It goes back to the queue, and stays charged with what it received until then."""


@dataclass(slots=True, init=False, unsafe_hash=True)
class Dispatch:
    id: str
    backend: str

    def __init__(self, id: str, backend: str) -> None:
        self.id = id
        self.backend = backend


class Reject(NamedTuple):
    id: str
    reason: Refusal
    retry_after_s: float
    limit: Limit | None = None
    """The limit that it is beyond, if that is the reason."""
    ceiling: str = ""
    """The ceiling that kept it waiting, in words."""


class GiveBack(NamedTuple):
    """This dispatched request can wait, and other work has no room: it is to be stopped (`queue.giving_back`)."""

    id: str


Decision = Dispatch | Reject | GiveBack


class Decided(NamedTuple):
    """One decision with what it was based on."""

    id: str
    client_id: str
    tenant: str
    app: str
    user: str
    now: float
    wait: Wait | None
    """What the request had waited for; None: it was decided at once."""
    stage: int
    inside: bool
    placed: Placed | None
    """Why it went to its engine, if it did."""
    cached_tokens: int
    """Of its prompt, what that engine was expected to have cached."""
    backend: str
    """"": it was rejected."""
    rejected: Reject | None
    pressure: Pressure

    @property
    def decision(self) -> Dispatch | Reject:
        return self.rejected or Dispatch(self.id, self.backend)

    @property
    def flow(self) -> Flow:
        return Flow(self.tenant, self.app, self.user)


class Recent:
    """The latest decisions, the newest one last.

    Each is kept as a plain tuple of the fields of `Decided`, without the request itself, its claim and its prompt. That
    is less memory, and above all less for Python's garbage collector, which looks through whatever is kept for a while.
    """

    def __init__(self, most: int) -> None:
        self._decided: deque[tuple[Any, ...]] = deque(maxlen=min(most, RECENT_MAX))

    def set(self, most: int) -> None:
        """From now on so many are remembered."""
        self._decided = deque(self._decided, maxlen=min(most, RECENT_MAX))

    def note(self, decision: Dispatch | Reject, request: Request, now: float, pressure: Pressure) -> None:
        progress = request.progress
        backend, rejected = (decision.backend, None) if isinstance(decision, Dispatch) else ("", decision)
        about = progress.wait, progress.stage, progress.inside, progress.placed, progress.cached_tokens
        self._decided.append((request.id, request.client_id, *request.flow, now, *about, backend, rejected, pressure))

    def last(self, request_id: str) -> Decided | None:
        """The latest decision on this request, if it is remembered."""
        for noted in reversed(self._decided):
            if noted[0] == request_id:
                return Decided(*noted)
        return None

    def of_client(self, client_id: str) -> list[str]:
        """Ids of the requests among them that their clients call so, the latest first."""
        return list(dict.fromkeys(noted[0] for noted in reversed(self._decided) if noted[1] == client_id))
