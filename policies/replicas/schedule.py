"""When does a gateway talk to the others, what is said again, and when is it on its own? No I/O: see `gateway.redis`.

An exchange is numbered, and what it said is kept until an answer comes: whatever was lost on the way is said again
under the same number, and counts once. Who has not been answered for `ALONE_S` goes on alone, with the share it last
had. Who was away without noticing, because its process stood still, owns nothing until it has asked (`TRUST_S` in
`replicas.grants`): others may have been given what was its own.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from policies.admission.decisions import Decision
from policies.replicas.messages import Heard, Told

__all__ = ["DEADLINE_S", "Schedule", "Speaker"]

INTERVAL_S = 0.025
IDLE_S = 0.1
"""While nothing is queued or dispatched here."""
URGENT_S = 0.005
"""The least time between two exchanges."""
DEADLINE_S = 0.5
"""An answer that takes longer is lost."""
AGAIN_S = 0.1
"""After a loss."""
ALONE_S = 1.0


class Speaker(Protocol):
    """What a gateway has to say: about one pool (`PoolReplica`), or about tenants (`TenantReplica`)."""

    def is_urgent(self) -> bool: ...

    def is_busy(self) -> bool: ...

    def tell(self, now: float) -> Told: ...

    def hear(self, heard: Heard, asked_s: float, now: float) -> Sequence[Decision]: ...

    def cut_off(self, now: float) -> Sequence[Decision]:
        """Called again and again, for as long as nobody is heard."""


class Schedule:
    """One gateway's side of the exchanges about one of them."""

    def __init__(self, speaker: Speaker) -> None:
        self.is_alone = False
        self._speaker = speaker
        self._number = 0
        self._pending: Told | None = None
        self._is_repeated = self._is_late = False
        self._asked_s = self._heard_s = self._due_s = float("-inf")

    def due_s(self) -> float:
        """When is the next exchange to begin? Not while one is under way."""
        if self.is_alone:
            return self._due_s
        if self._speaker.is_urgent():
            return min(self._due_s, self._asked_s + URGENT_S)
        if self._speaker.is_busy():
            return min(self._due_s, self._asked_s + INTERVAL_S)
        return self._due_s

    def ask(self, now: float) -> tuple[int, Told]:
        """An exchange begins: its number and what is said. `heard` or `lost` must follow."""
        if self._heard_s == float("-inf"):
            self._heard_s = now
        self._is_repeated = self._pending is not None
        # It stood still, and has not read yet what has ended meanwhile: what it says it holds it may hold no more.
        self._is_late = self._due_s != float("-inf") and now - self._due_s > ALONE_S
        if self._pending is None:
            self._number += 1
            self._pending = self._speaker.tell(now)
        self._asked_s = now
        return self._number, self._pending

    def heard(self, heard: Heard, now: float) -> Sequence[Decision]:
        """It was answered."""
        self._pending = None
        # What is granted for what was held before it stood still is as old as that.
        as_of_s = self._heard_s if self._is_late else self._asked_s
        self._heard_s = self._asked_s
        # What was said again is old: what has changed since is said at once.
        interval_s = INTERVAL_S if self._speaker.is_busy() else IDLE_S
        self._due_s = now if self._is_repeated or self._is_late else self._asked_s + interval_s
        self.is_alone = False
        return self._speaker.hear(heard, as_of_s, now)

    def lost(self, now: float) -> Sequence[Decision]:
        """It was not answered."""
        self._due_s = now + AGAIN_S
        if not self.is_alone and now - self._heard_s < ALONE_S:
            return ()
        self.is_alone = True
        return self._speaker.cut_off(now)
