"""AdmissionEngine: which request is dispatched, when and where? The only place where a decision is made.

Events go in with the time, decisions come out as values; nothing here waits, reads a clock or does I/O. The gateway
maps decisions to connections and timers, the simulation maps them to a heap, and both see the same decisions.

A request is in one state at a time:

    arrived -> queued -> dispatched -> ended            (finished, cancelled, broken: charged for what it received)
                 |  ^        |
                 |  '--------'  refused or not reached: back to the head of its flow, unbilled
                 '-> rejected (queue bounds, deadline, no backend left to try) or cancelled: charged nothing
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import StrEnum
from typing import NamedTuple

from policies.base import Limit, Policy, Pressure, Refusal, Request, ServiceTokens
from policies.capacity import BackendLedger, CapacitySettings, Gauges, Lease, Obstacle
from policies.lengths import OutputLengths, OutputPredictor
from policies.shares import Shares
from policies.waiting import QueueLimits, WaitingRoom

__all__ = ["AdmissionEngine", "Decision", "Dispatch", "Failure", "QueueLimits", "Refusal", "Reject"]

CHARGING_INTERVAL_S = 0.01
"""Streamed tokens reach the counters in batches this far apart, so that a token costs almost nothing."""


class Failure(StrEnum):
    """How did a dispatched request fail?"""

    REFUSED = "refused"
    """The backend has no room. Backpressure: it goes back to the queue."""
    UNREACHED = "unreached"
    """No answer began: it may be tried elsewhere, a bounded number of times."""
    BROKEN = "broken"
    """The answer broke off: what was received stays charged."""


class Dispatch(NamedTuple):
    id: str
    backend: str


class Reject(NamedTuple):
    id: str
    reason: Refusal
    retry_after_s: float
    limit: Limit | None = None
    """The limit that it is beyond, if that is why."""


Decision = Dispatch | Reject
NOTHING: Sequence[Decision] = ()


class AdmissionEngine:
    """One pool's queue, its backends' ledgers, and the policy that orders it."""

    def __init__(
        self,
        policy: Policy,
        *,
        limits: QueueLimits | None = None,
        capacity: CapacitySettings | None = None,
        lengths: OutputPredictor | None = None,
    ):
        self.policy = policy
        self.limits = limits or QueueLimits()
        self.capacity = capacity or CapacitySettings()
        self.backends: dict[str, BackendLedger] = {}
        self.lengths = lengths if lengths is not None else OutputLengths()
        self.obstacle: Obstacle | None = None
        """What the head of the queue waits for; None when nothing waits."""
        self._shares = Shares()
        self._waiting = WaitingRoom(self.limits)
        self._leases: dict[str, Lease] = {}
        self._uncharged: list[Lease] = []
        self._charged_s = float("-inf")
        self._room = 0
        self._now = 0.0
        self._dispatch_interval_s = 0.0
        self._dispatched_s = float("-inf")

    def __repr__(self) -> str:
        counts = f"{len(self._waiting)} queued, {len(self._leases)} dispatched, {len(self.backends)} backends"
        return f"<AdmissionEngine {counts}>"

    # --- what is asked of it ---

    @property
    def queued(self) -> int:
        return len(self._waiting)

    @property
    def queued_bytes(self) -> int:
        return self._waiting.bytes

    @property
    def dispatched(self) -> int:
        return len(self._leases)

    def received(self, request_id: str, now: float) -> ServiceTokens:
        """What is a dispatched request believed to have received? Counted if streamed, else estimated from its age."""
        lease = self._leases[request_id]
        if not lease.request.streamed:
            self.backends[lease.backend].unseen(now)
        return self._received(lease)

    def next_wakeup(self) -> float | None:
        """When must `woke` be called if nothing else happens? None: not at all."""
        if not self._waiting:
            return None
        times = [self._waiting.earliest_deadline_s()]
        for ledger in self.backends.values():
            opens_s = ledger.opens_s(self._now)
            if opens_s is not None:
                times.append(opens_s)
        eligible = self.policy.next_eligible(self._now)
        if eligible is not None:
            times.append(eligible)
        return min(times)

    def place(self, request: Request) -> str | None:
        """The backend that can start it now and is least full (ClusterView)."""
        if request.blocked_at == self._room:
            return None
        spare = self._shares.is_below(request)
        absent = self._shares.someone_is_absent()
        best: BackendLedger | None = None
        best_load = 0.0
        paced = self._shares.is_flooding(request)
        for ledger in self.backends.values():
            obstacle = ledger.obstacle(request, spare=spare, absent=absent, now=self._now, paced=paced)
            if obstacle is not None:
                self.obstacle = obstacle
                continue
            load = ledger.kv_fraction()
            if best is None or load < best_load:
                best, best_load = ledger, load
        if best is None:
            request.blocked_at = self._room
            return None
        return best.name

    # --- events ---

    def add_backend(self, name: str, *, max_num_seqs: int | None = None, healthy: bool = True) -> None:
        ledger = BackendLedger(name, self.capacity, max_num_seqs=max_num_seqs)
        ledger.healthy = healthy
        self.backends[name] = ledger

    def arrived(self, request: Request, now: float) -> Sequence[Decision]:
        """A request wants service. It is queued, or refused at once."""
        self._now = now
        if not any(ledger.healthy for ledger in self.backends.values()):
            return (Reject(request.id, Refusal.NO_BACKEND, 5.0),)
        refused = self.policy.refusal(request, now, self._pressure())
        if refused is not None:
            return (Reject(request.id, *refused),)
        victims = self._waiting.giving_way(request)
        if victims is None:
            return (Reject(request.id, Refusal.QUEUE_FULL, self._drain_estimate_s()),)
        decisions: list[Decision] = []
        for victim in victims:
            decisions.append(Reject(victim.id, Refusal.QUEUE_FULL, self._drain_estimate_s()))
            self._withdraw(victim, now)
        request.deadline_s = now + self.limits.wait_s_max
        self._shares.seen(request, now)
        self._enqueue(request, now, front=False)
        self._decide(now, decisions)
        return decisions

    def progressed(self, request_id: str, output_tokens: int, now: float) -> Sequence[Decision]:
        """So many more output tokens of a dispatched request were seen; 0 with the first sign of its start."""
        lease = self._leases.get(request_id)
        if lease is None:
            return NOTHING
        if output_tokens:
            if lease.charged_tokens == lease.output_tokens:
                self._uncharged.append(lease)
            lease.output_tokens += output_tokens
        if lease.started_s is not None:
            return NOTHING
        self.backends[lease.backend].started(lease, now)
        return self._room_changed(now)

    def finished(self, request_id: str, service: ServiceTokens, now: float) -> Sequence[Decision]:
        """A dispatched request is complete, and this is what it took."""
        lease = self._leases[request_id]
        lease.output_tokens = service.output
        self.lengths.learn(lease.request, service.output)
        if not lease.request.streamed:
            self.backends[lease.backend].answered(lease, now)
        self._end(lease, service, now)
        return self._room_changed(now)

    def failed(
        self, request_id: str, failure: Failure, now: float, service: ServiceTokens | None = None
    ) -> Sequence[Decision]:
        """A dispatched request did not complete. `service`: what it received, where that is known."""
        lease = self._leases[request_id]
        ledger = self.backends[lease.backend]
        request = lease.request
        if failure is Failure.BROKEN:
            self._end(lease, service or self._received(lease), now)
            return self._room_changed(now)
        ledger.refused(now)
        if failure is Failure.REFUSED:
            ledger.full()
        else:
            request.attempts += 1
        if request.attempts >= self.limits.attempts_max:
            self._end(lease, ServiceTokens(0, 0), now)
            return [Reject(request.id, Refusal.BACKEND_FAILED, 1.0), *self._room_changed(now)]
        self._end(lease, ServiceTokens(0, 0), now)
        self._shares.seen(request, now)
        self._enqueue(request, now, front=True)
        return self._room_changed(now)

    def cancelled(self, request_id: str, now: float, service: ServiceTokens | None = None) -> Sequence[Decision]:
        """Its client is gone: out of the queue uncharged, or ended and charged for what it received."""
        request = self._waiting.get(request_id)
        if request is not None:
            self._withdraw(request, now)
            return self._room_changed(now)
        self._end(self._leases[request_id], service or self.received(request_id, now), now)
        return self._room_changed(now)

    def backend_changed(self, name: str, change: Gauges | bool, now: float) -> Sequence[Decision]:
        """A backend was scraped (gauges), or has become healthy or unhealthy (a boolean)."""
        ledger = self.backends[name]
        if isinstance(change, bool):
            ledger.healthy = change
        else:
            ledger.observe(change, now)
        return self._room_changed(now)

    def woke(self, now: float) -> Sequence[Decision]:
        """The time that `next_wakeup` named has come."""
        return self._room_changed(now)

    # --- deciding ---

    def _room_changed(self, now: float) -> Sequence[Decision]:
        self._now = now
        self._room += 1
        if not self._waiting:
            self.obstacle = None
            return NOTHING
        decisions: list[Decision] = []
        self._expire(now, decisions)
        self._decide(now, decisions)
        return decisions

    def _decide(self, now: float, decisions: list[Decision]) -> None:
        """Dispatch in the policy's order for as long as the next in order fits."""
        if now - self._charged_s >= CHARGING_INTERVAL_S:
            self._charge_progress(now)
        while self._waiting:
            selection = self.policy.pop(now, self)
            if selection is None:
                return
            decisions.append(self._dispatch(selection.request, selection.backend, now))
        self.obstacle = None

    def _dispatch(self, request: Request, backend: str, now: float) -> Dispatch:
        self._waiting.remove(request)
        lease = Lease(request, backend, now)
        self._leases[request.id] = lease
        ledger = self.backends[backend]
        ledger.add(lease, spare=self._shares.is_below(request))
        self._shares.dispatched(request, lease.held_tokens)
        self.policy.charge(request, ServiceTokens(request.prompt_tokens, 0), now, final=False)
        if request.arrived_s < self._dispatched_s:
            # It was waiting at the last dispatch, so the time since then is what one place in the queue takes.
            self._dispatch_interval_s += 0.05 * (now - self._dispatched_s - self._dispatch_interval_s)
        self._dispatched_s = now
        return Dispatch(request.id, backend)

    def _charge_progress(self, now: float) -> None:
        """Bring counters and ledgers up to the tokens that have streamed."""
        self._charged_s = now
        for ledger in self.backends.values():
            ledger.unseen(now)
        self._room += 1
        uncharged, self._uncharged = self._uncharged, []
        for lease in uncharged:
            request = lease.request
            if lease.charged_tokens == lease.output_tokens or self._leases.get(request.id) is not lease:
                continue
            lease.charged_tokens = lease.output_tokens
            self.policy.charge(request, self._received(lease), now, final=False)
            held = lease.held_tokens
            self.backends[lease.backend].regrown(lease)
            if lease.held_tokens != held:
                self._shares.grew(request, lease.held_tokens - held)

    def _received(self, lease: Lease) -> ServiceTokens:
        return ServiceTokens(lease.request.prompt_tokens, lease.output_tokens)

    def _end(self, lease: Lease, service: ServiceTokens, now: float) -> None:
        request = lease.request
        del self._leases[request.id]
        self.backends[lease.backend].remove(lease, now)
        self._shares.ended(request, lease.held_tokens)
        self.policy.charge(request, service, now, final=True)

    # --- the queue ---

    def _enqueue(self, request: Request, now: float, *, front: bool) -> None:
        request.output_tokens_expected = self.lengths.expected(request)
        request.output_tokens_reserved = self.lengths.reserved(request)
        request.blocked_at = -1
        self._waiting.add(request, front=front)
        self.policy.push(request, now, front=front)

    def _withdraw(self, request: Request, now: float) -> None:
        self._waiting.remove(request)
        self.policy.remove(request, now)
        self._shares.withdrawn(request)

    def _expire(self, now: float, decisions: list[Decision]) -> None:
        while (request := self._waiting.expired(now)) is not None:
            self._withdraw(request, now)
            decisions.append(Reject(request.id, Refusal.QUEUE_TIMEOUT, self._drain_estimate_s()))

    def _pressure(self) -> Pressure:
        return Pressure(False, "", self._drain_estimate_s())

    def _drain_estimate_s(self) -> float:
        """How long what waits takes at the measured rate of dispatch; within a minute, so that clients do come back."""
        return min(60.0, max(1.0, len(self._waiting) * self._dispatch_interval_s))
