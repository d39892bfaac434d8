"""When does a gateway talk to the others, what is said again, and when is it on its own? No I/O: see `gateway.state`.

An exchange is numbered, and what it said is kept until an answer comes: whatever was lost on the way is said again
under the same number, and counts once. Who has not been answered for `ALONE_S` goes on alone, with the share it last
had. Who was away without noticing, because its process stood still, owns nothing until it has asked (`TRUST_S` in
`policies.capacity`): others may have been given what was its own.
"""

from __future__ import annotations

from collections.abc import Sequence

from policies.decisions import Decision
from policies.engine import AdmissionEngine
from policies.replication import Heard, Told

__all__ = ["DEADLINE_S", "Conversation"]

INTERVAL_S = 0.02
IDLE_S = 0.1
"""While nothing is queued or dispatched here."""
URGENT_S = 0.005
"""The least time between two exchanges."""
DEADLINE_S = 0.25
"""An answer that takes longer is lost."""
AGAIN_S = 0.1
"""After a loss."""
ALONE_S = 0.5


class Conversation:
    """One gateway's side of the exchanges of one pool."""

    def __init__(self, engine: AdmissionEngine, *, first: int = 1) -> None:
        """`first`: the number of the first exchange, greater than any that was used under the same name."""
        engine.share()
        self.is_alone = False
        self._engine = engine
        self._number = first - 1
        self._pending: Told | None = None
        self._is_repeated = False
        self._asked_s = self._heard_s = self._due_s = float("-inf")

    def due_s(self) -> float:
        """When is the next exchange to begin? Not while one is under way."""
        if self.is_alone:
            return self._due_s
        if self._engine.is_urgent():
            return min(self._due_s, self._asked_s + URGENT_S)
        if self._engine.queued:
            return min(self._due_s, self._asked_s + INTERVAL_S)
        return self._due_s

    def ask(self, now: float) -> tuple[int, Told]:
        """An exchange begins: its number and what is said. `heard` or `lost` must follow."""
        if self._heard_s == float("-inf"):
            self._heard_s = now
        self._is_repeated = self._pending is not None
        if self._pending is None:
            self._number += 1
            self._pending = self._engine.tell(now)
        self._asked_s = now
        return self._number, self._pending

    def heard(self, heard: Heard, now: float) -> Sequence[Decision]:
        """It was answered."""
        self._pending = None
        self._heard_s = self._asked_s
        # What was said again is old: what has changed since is said at once.
        interval_s = INTERVAL_S if self._engine.queued or self._engine.dispatched else IDLE_S
        self._due_s = now if self._is_repeated else self._asked_s + interval_s
        self.is_alone = False
        return self._engine.hear(heard, self._asked_s, now)

    def lost(self, now: float) -> Sequence[Decision]:
        """It was not answered."""
        self._due_s = now + AGAIN_S
        if self.is_alone or now - self._heard_s < ALONE_S:
            return ()
        self.is_alone = True
        return self._engine.cut_off(now)
