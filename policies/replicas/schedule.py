"""When does a gateway exchange with the others, what is repeated, and when is it alone? No I/O.

Every sync round has a number. Its report is kept until a reply comes. After a loss the same content goes out again
under the same number, and the store counts it once. A gateway that got no answer for `ALONE_S` goes on alone with the
average of its recent grants. A process may also have stood still without noticing. It then uses nothing until its next
exchange (`TRUST_S` in `replicas.grants`), because its part may have been given to others.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, Protocol

from policies.admission.decisions import Decision
from policies.replicas.messages import ReplicaReport, ReplicaView

INTERVAL_S: Final = 0.025
IDLE_S: Final = 4 * INTERVAL_S
"""Between exchanges while nothing is queued or dispatched here, and until the next try after a loss."""
WAITS_S: Final = 3 * IDLE_S
"""A request that waited at another gateway longer ago than this no longer delays one here."""
URGENT_S: Final = INTERVAL_S / 5
"""The least time between two exchanges."""
DEADLINE_S: Final = 20 * INTERVAL_S
"""An answer that takes longer counts as lost."""
ALONE_S: Final = 2 * DEADLINE_S


class Speaker(Protocol):
    """What a gateway has to report: about one pool (`PoolReplica`), or about tenants (`TenantReplica`)."""

    def is_urgent(self) -> bool: ...

    def is_busy(self) -> bool: ...

    def report(self, now: float) -> ReplicaReport: ...

    def receive(self, view: ReplicaView, asked_s: float, now: float) -> Sequence[Decision]: ...

    def cut_off(self, now: float) -> Sequence[Decision]:
        """Called again and again for as long as no reply comes from the store."""


class Schedule:
    """One gateway's side of the exchanges on one subject."""

    def __init__(self, speaker: Speaker) -> None:
        self.is_alone = False
        self._speaker = speaker
        self._number = 0
        self._pending: ReplicaReport | None = None
        self._is_repeated = self._is_late = False
        self._asked_s = self._answered_s = self._due_s = float("-inf")

    def due_s(self) -> float:
        """When does the next exchange begin? Not to be asked while one is under way."""
        if self.is_alone:
            return self._due_s
        if self._speaker.is_urgent():
            return min(self._due_s, self._asked_s + URGENT_S)
        if self._speaker.is_busy():
            return min(self._due_s, self._asked_s + INTERVAL_S)
        return self._due_s

    def ask(self, now: float) -> tuple[int, ReplicaReport]:
        """Begin a sync round: its number and its report. `answered` or `lost` must follow."""
        if self._answered_s == float("-inf"):
            self._answered_s = now
        self._is_repeated = self._pending is not None
        # The process stood still, and has not yet read which requests ended meanwhile. Its report may be out of
        # date.
        self._is_late = self._due_s != float("-inf") and now - self._due_s > ALONE_S
        if self._pending is None:
            self._number += 1
            self._pending = self._speaker.report(now)
        self._asked_s = now
        return self._number, self._pending

    def answered(self, view: ReplicaView, now: float) -> Sequence[Decision]:
        """The answer came."""
        self._pending = None
        # A grant based on the state before the process stood still is only as fresh as that state.
        as_of_s = self._answered_s if self._is_late else self._asked_s
        self._answered_s = self._asked_s
        # A repeated message is old: what has changed since is reported at once.
        interval_s = INTERVAL_S if self._speaker.is_busy() else IDLE_S
        self._due_s = now if self._is_repeated or self._is_late else self._asked_s + interval_s
        self.is_alone = False
        return self._speaker.receive(view, as_of_s, now)

    def lost(self, now: float) -> Sequence[Decision]:
        """No answer came."""
        self._due_s = now + IDLE_S
        if not self.is_alone and now - self._answered_s < ALONE_S:
            return ()
        self.is_alone = True
        return self._speaker.cut_off(now)
