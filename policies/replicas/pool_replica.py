"""A gateway's side of the sync rounds about one pool, whose engines several gateways use."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from policies.admission.decisions import Decision
from policies.admission.engine import AdmissionEngine
from policies.capacity.obstacle import ASLEEP, Obstacle
from policies.replicas.grants import GrantedEngines
from policies.replicas.messages import REPORTED_MAX, Charge, Departure, ReplicaReport, ReplicaView, Standing
from policies.replicas.schedule import INTERVAL_S, WAITS_S
from policies.replicas.shared_counters import AHEAD_S, SharedCounters
from policies.replicas.tallies import SharedCounts
from policies.request import Request, is_batch

MAKES_ROOM_S: Final = 4 * INTERVAL_S
"""Least time between two preemptions of batch work for other gateways: they first learn of the room and use it."""


class PoolReplica:
    """The link of one admission engine to the store: reports its usage, charges and needs, and applies the replies.

    Before the first sync round this gateway may use no engine. An engine that is added later may be used after the
    first round about it.
    """

    def __init__(self, engine: AdmissionEngine, *, epoch_s: float = 0.0) -> None:
        """Follow an engine. `epoch_s`: seconds by which the gateways' common clock is ahead of the engine's clock."""
        order = engine.policy.order
        backlog = order.backlog if len(engine.policy.queues()) == 1 else None
        self._engine = engine
        self._counters = SharedCounters(backlog, epoch_s=epoch_s) if backlog is not None else None
        self._counts = [SharedCounts(name, counts, epoch_s=epoch_s) for name, counts in order.counts.items()]
        self._grants = GrantedEngines(engine.backends)
        self._next_elsewhere: Standing | None = None
        self._replicas = 1
        """Number of gateways, this one included, as of the last reply."""
        self._reported_s = self._answered_s = self._made_room_s = float("-inf")
        engine.room.rivals = self

    def is_preceded(self, request: Request, now: float) -> bool:
        """Return whether a request that waits at another gateway goes before this request."""
        elsewhere = self._next_elsewhere
        if elsewhere is None or now > self._answered_s + WAITS_S:
            return False
        if self._counters is None:
            return elsewhere.is_earlier(_of_first_come(request, self._answered_s), by_s=AHEAD_S)
        return self._counters.is_ahead(request.flow, elsewhere, self._answered_s)

    def is_busy(self) -> bool:
        """Return whether anything is queued or dispatched here, so that the next report should come soon."""
        return bool(self._engine.dispatched or self._engine.queued)

    def is_urgent(self) -> bool:
        """Return whether the head came after the last report and lacks slots or KV, so that a round should begin."""
        blocked = self._engine.blocked
        if blocked is None or blocked.request.arrived_s < self._reported_s:
            return False
        return any(why in (Obstacle.SLOTS, Obstacle.KV) for why in blocked.obstacles.values())

    def report(self, now: float) -> ReplicaReport:
        """Return the report of this gateway's use, charges and needs. `receive` or `cut_off` must follow."""
        engine, counters = self._engine, self._counters
        now = self._reported_s = engine.catch_up(now)
        blocked = engine.blocked
        wants_room = blocked is not None and blocked.nearest() not in ASLEEP
        head = blocked.request if blocked is not None and wants_room else None
        charges: list[Charge] = []
        lefts: list[Departure] = []
        quantum = 0.0
        if counters is not None:
            standings, quantum = counters.standings(now), counters.quantum
            charges, lefts = counters.report(now)
        else:
            standings = [] if head is None else [_of_first_come(head, now)]
        holdings = self._grants.holdings(head, engine.queued, now)
        tallies = [tally for counts in self._counts for tally in counts.report(REPORTED_MAX)]
        usage = engine.requests.tree.report(REPORTED_MAX)
        return ReplicaReport(standings, holdings, charges, tallies, [], usage, lefts, quantum)

    def receive(self, view: ReplicaView, asked_s: float, now: float) -> Sequence[Decision]:
        """Apply the reply to the last report, which was made at `asked_s`."""
        engine = self._engine
        asked_s += engine.set_back_s
        since_s = asked_s - self._answered_s
        self._answered_s = asked_s
        self._next_elsewhere = view.next_elsewhere
        if self._counters is not None:
            self._counters.receive(view.totals, view.left, since_s, is_forgotten=view.is_forgotten)
            self._counters.wait_elsewhere(view.standings, view.replicas)
        counted = iter(view.counted)
        for counts in self._counts:
            counts.receive(counted, is_forgotten=view.is_forgotten)
        self._grants.receive(view.grants, asked_s)
        self._replicas = max(1, view.replicas)
        engine.requests.tree.set_elsewhere(view.usage)
        engine.room.changed()
        decisions = engine.woke(now)
        elsewhere = view.next_elsewhere
        if elsewhere is not None and not is_batch(elsewhere.tenant) and asked_s >= self._made_room_s + MAKES_ROOM_S:
            made = engine.wanted_elsewhere(now)
            self._made_room_s = asked_s if made else self._made_room_s
            decisions = [*decisions, *made]
        return decisions

    def cut_off(self, now: float) -> Sequence[Decision]:
        """Go on alone with the average of the recent grants, while no reply comes from the store."""
        self._next_elsewhere = None
        if self._counters is not None:
            self._counters.wait_elsewhere((), self._replicas)
        self._grants.cut_off(self._replicas)
        self._engine.requests.tree.set_elsewhere((), self._replicas)
        self._engine.room.changed()
        return self._engine.woke(now)


def _of_first_come(request: Request, now: float) -> Standing:
    """Return the standing of a request under a policy that counts no service: the oldest goes first."""
    return Standing("", "", 0.0, 0.0, now - request.arrived_s, inside=False)
