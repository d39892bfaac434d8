"""When does a gateway sync with the others, what is repeated, and when is the gateway alone? No I/O.

Every sync round has a number. Its report is kept until a reply comes. After a loss the report is sent again under its
number, and the store counts it once. A gateway that got no reply for `ALONE_S` goes on alone with the average of its
recent grants. A gateway that has never got a reply does not know what is left of a limit, so its requests with a limit
wait for `START_S`. A process may also have stood still without noticing. Such a gateway starts nothing until its next
sync round (`TRUST_S` in `replicas.grants`), because its part may have been given to others.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, Protocol

from policies.admission.decisions import Decision
from policies.replicas.messages import ReplicaReport, ReplicaView

INTERVAL_S: Final = 0.025
IDLE_S: Final = 4 * INTERVAL_S
"""Time between sync rounds while the gateway is not busy, and until the next try after a loss."""
WAITS_S: Final = 3 * IDLE_S
"""Age of a reply beyond which a request that waited at another gateway no longer delays a request here."""
URGENT_S: Final = INTERVAL_S / 5
"""Time between sync rounds while the source is urgent."""
DEADLINE_S: Final = 20 * INTERVAL_S
"""Time after which a reply counts as lost."""
ALONE_S: Final = 2 * DEADLINE_S
"""Time without a reply after which a gateway goes on alone."""
START_S: Final = 15 * ALONE_S
"""Time without a first reply after which a new gateway goes on alone with limits. Envoy waits as long for its first
configuration (`initial_fetch_timeout`)."""


class ReportSource(Protocol):
    """The source of a gateway's reports: about one pool (`PoolReplica`), or about tenants (`TenantReplica`)."""

    def is_urgent(self) -> bool: ...

    def is_busy(self) -> bool: ...

    def report(self, now: float) -> ReplicaReport: ...

    def receive(self, view: ReplicaView, asked_s: float, now: float) -> Sequence[Decision]: ...

    def cut_off(self, now: float) -> Sequence[Decision]:
        """Go on alone. Called after each loss while no reply comes from the store."""


class Schedule:
    """State of one gateway's sync rounds about one pool or about the tenants: when the next begins, what is repeated,
    when to go on alone.

    The schedule takes the report from its source, numbers it, repeats it after a loss, and hands the reply on. When no
    reply comes for too long, the schedule decides that the gateway is partitioned, and tells the source (`cut_off`).
    """

    def __init__(self, source: ReportSource, *, start_s: float = ALONE_S) -> None:
        """Begin. `start_s`: time without a first reply after which the gateway goes on alone."""
        self.is_alone = False
        self._source = source
        self._number = 0
        self._pending: ReplicaReport | None = None
        self._is_repeated = self._is_late = False
        self._alone_s = start_s
        self._asked_s = self._answered_s = self._due_s = float("-inf")

    def due_s(self) -> float:
        """Return when the next sync round begins. Not to be called during a round."""
        is_urgent = self._source.is_urgent()
        if self.is_alone or not (is_urgent or self._source.is_busy()):
            return self._due_s
        return min(self._due_s, self._asked_s + (URGENT_S if is_urgent else INTERVAL_S))

    def ask(self, now: float) -> tuple[int, ReplicaReport]:
        """Begin a sync round, and return its number and its report. `answered` or `lost` must follow."""
        if self._answered_s == float("-inf"):
            self._answered_s = now
        self._is_repeated = self._pending is not None
        # A process that stood still has not yet read which requests ended meanwhile, so its report may be out of date.
        self._is_late = self._due_s != float("-inf") and now - self._due_s > ALONE_S
        if self._pending is None:
            self._number += 1
            self._pending = self._source.report(now)
        self._asked_s = now
        return self._number, self._pending

    def answered(self, view: ReplicaView, now: float) -> Sequence[Decision]:
        """End a sync round with the store's reply."""
        self._pending = None
        self._alone_s = ALONE_S
        # A grant based on the state before the process stood still is only as fresh as that state.
        as_of_s = self._answered_s if self._is_late else self._asked_s
        self._answered_s = self._asked_s
        # A repeated report is old: changes since then are reported at once.
        interval_s = INTERVAL_S if self._source.is_busy() else IDLE_S
        self._due_s = now if self._is_repeated or self._is_late else self._asked_s + interval_s
        self.is_alone = False
        return self._source.receive(view, as_of_s, now)

    def lost(self, now: float) -> Sequence[Decision]:
        """End a sync round without a reply."""
        self._due_s = now + IDLE_S
        if not self.is_alone and now - self._answered_s < self._alone_s:
            return ()
        self.is_alone = True
        return self._source.cut_off(now)
