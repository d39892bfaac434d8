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
from dataclasses import replace
from typing import Final

from policies.admission.decisions import Decision, Dispatch, Failure, Recent, Reject
from policies.admission.explanation import Explanation, explain_decided, explain_queued
from policies.capacity.fair_shares import Shares
from policies.capacity.gauges import CapacitySettings, Gauges
from policies.capacity.lease import Lease
from policies.capacity.ledger import BackendLedger
from policies.capacity.obstacle import Obstacle
from policies.capacity.output_lengths import OutputLengths, OutputPredictor
from policies.capacity.overload import Overload, OverloadSettings
from policies.interactions import Interactions, Waste
from policies.limits.quotas import Quotas
from policies.orders.contract import Policy
from policies.plain_data import fields
from policies.queue.bounds import QueueLimits, WaitingRoom
from policies.replicas.grants import Replica
from policies.replicas.messages import Heard, Told
from policies.replicas.tallies import Tables
from policies.request import CALM, Limit, Pressure, Refusal, Refused, Request, ServiceTokens

__all__ = ["AdmissionEngine", "Decision", "Dispatch", "Explanation", "Failure", "QueueLimits", "Refusal", "Reject"]

LEARNED_VERSION: Final = 1
CHARGING_INTERVAL_S: Final = 0.01
"""Streamed tokens reach the counters in batches this far apart, so that a token costs almost nothing."""


NOTHING: Final[Sequence[Decision]] = ()
NO_SERVICE: Final = ServiceTokens(0, 0)


class AdmissionEngine:
    """One pool's queue, its backends' ledgers, and the policy that orders it.

    `interactions` and `quotas` may be shared with the engines of other pools. A clock that is set back is taken to have
    stood still: nothing waits longer for it.
    """

    def __init__(
        self,
        policy: Policy,
        *,
        limits: QueueLimits | None = None,
        capacity: CapacitySettings | None = None,
        lengths: OutputPredictor | None = None,
        overload: OverloadSettings | None = None,
        interactions: Interactions | None = None,
        quotas: Quotas | None = None,
    ):
        self.policy = policy
        self.limits = limits or QueueLimits()
        self.capacity = capacity or CapacitySettings()
        self.backends: dict[str, BackendLedger] = {}
        self.lengths = lengths if lengths is not None else OutputLengths()
        self.obstacle: Obstacle | None = None
        """What the head of the queue waits for; None when nothing waits."""
        self.interactions = interactions if interactions is not None else Interactions()
        self._quotas = quotas
        self._overload = Overload(overload or OverloadSettings())
        self._recent = Recent()
        self._blocked: Request | None = None
        self._replica: Replica | None = None
        self._tables: Tables | None = None
        self._held: dict[str, Request] = {}
        """Arrived, and decided when other gateways have been heard."""
        self._shares = Shares()
        self._waiting = WaitingRoom(self.limits)
        self._leases: dict[str, Lease] = {}
        self._uncharged: list[Lease] = []
        self._charged_s = float("-inf")
        self._room = 0
        self._now = 0.0
        self._set_back_s = 0.0
        self._dispatch_interval_s = 0.0
        self._dispatched_s = float("-inf")
        self._arrived_s = float("-inf")

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

    @property
    def wasted(self) -> dict[str, Waste]:
        """By tenant: what was spent in interactions that were then cut."""
        return self.interactions.wasted

    def received(self, request_id: str, now: float) -> ServiceTokens:
        """What is a dispatched request believed to have received? Counted if streamed, else estimated from its age."""
        return self._received(self._leases[request_id], self._time(now))

    def pressure(self, now: float) -> Pressure:
        """Is the pool overloaded, why, and how long does what waits take?"""
        return self._pressure(self._time(now))

    def explain(self, request_id: str, now: float) -> Explanation | None:
        """Why is it where it is? None: it is neither here nor among the last decisions. O(queue of its tenant)."""
        now = self._time(now)
        request, decided = self._waiting.get(request_id), self._recent.last(request_id)
        known = request or decided
        if known is None:
            return None
        flow = known.flow
        numbers = self.policy.explain(flow, now)
        limits = self._quotas.standing(flow.tenant, now) if self._quotas is not None else []
        kv = {name: ledger.kv_fraction() for name, ledger in self.backends.items()}
        if request is None:
            assert decided is not None
            return explain_decided(decided, limits=limits, numbers=numbers, kv=kv)
        numbers |= {"place_in_tenant": float(self._waiting.place_of(request)), "queue": float(len(self._waiting))}
        pressure = self._pressure(now)
        return explain_queued(request, decided, self.obstacle, pressure, limits=limits, numbers=numbers, kv=kv)

    def snapshot(self) -> dict[str, object]:
        """What was learned that a restart should not lose, as plain data that JSON can hold."""
        learned = {"interactions": self.interactions.snapshot(), "policy": self.policy.snapshot()}
        return {"version": LEARNED_VERSION, **learned}

    def restore(self, learned: object) -> None:
        """Go on from a snapshot. ValueError, saying why, if it is none; then nothing has changed."""
        version, interactions, policy = fields(learned, "version", "interactions", "policy")
        if version != LEARNED_VERSION:
            raise ValueError(f"version {version!r:.20}; this is version {LEARNED_VERSION}")
        before = self.interactions.snapshot()
        self.interactions.restore(interactions)
        try:
            if policy:
                self.policy.restore(policy)
        except ValueError:
            self.interactions.restore(before)
            raise

    def adopt(self, learned: object) -> None:
        """Take from a snapshot of another gateway what it has seen more of. ValueError, saying why, if it is none."""
        version, interactions, policy = fields(learned, "version", "interactions", "policy")
        if version != LEARNED_VERSION:
            raise ValueError(f"version {version!r:.20}; this is version {LEARNED_VERSION}")
        if policy:
            self.policy.adopt(policy)
        self.interactions.adopt(interactions)

    def next_wakeup(self) -> float | None:
        """When must `woke` be called if nothing else happens? None: not at all."""
        if not self._waiting.requests:
            return None
        times = [self._waiting.earliest_deadline_s()]
        for ledger in self.backends.values():
            opens_s = ledger.opens_s(self._now)
            if opens_s is not None:
                times.append(opens_s)
        eligible = self.policy.next_eligible(self._now)
        if eligible is not None:
            times.append(eligible)
        return min(times) - self._set_back_s

    def place(self, request: Request) -> str | None:
        """The backend that can start it now and is least full (ClusterView)."""
        if request.blocked_at == self._room:
            self._blocked = request
            return None
        best: BackendLedger | None = None
        best_load = 0.0
        for name, ledger in self.backends.items():
            if not self.fits(request, name):
                continue
            load = ledger.kv_fraction()
            if best is None or load < best_load:
                best, best_load = ledger, load
        if best is None:
            request.blocked_at = self._room
            self._blocked = request
            return None
        return best.name

    def fits(self, request: Request, backend: str) -> bool:
        """Can this backend start it now (ClusterView)?"""
        shares = self._shares
        if self._replica is not None and self._replica.is_ahead(request, self._now):
            self.obstacle = "turn"
            return False
        obstacle = self.backends[backend].obstacle(
            request,
            spare=shares.is_below(request),
            absent=shares.someone_is_absent(),
            now=self._now,
            paced=shares.is_flooding(request),
        )
        if obstacle is not None:
            self.obstacle = obstacle
        return obstacle is None

    def loads(self) -> dict[str, int]:
        """Requests dispatched to each backend in service (ClusterView)."""
        return {name: len(ledger.leases) for name, ledger in self.backends.items() if ledger.healthy}

    # --- events ---

    def add_backend(self, name: str, *, max_num_seqs: int | None = None, healthy: bool = True) -> None:
        ledger = BackendLedger(name, self.capacity, max_num_seqs=max_num_seqs)
        ledger.healthy = healthy
        self.backends[name] = ledger

    def arrived(self, request: Request, now: float) -> Sequence[Decision]:
        """A request wants service. It is queued, or refused at once."""
        now = self._arrived_s = self._time(now)
        self.interactions.arrived(request, now)
        pressure = self._pressure(now) if self._waiting.requests or self._overload.active else CALM
        for ledger in self.backends.values():
            if ledger.healthy:
                break
        else:
            return (self._reject(request, Refusal.NO_BACKEND, 5.0, now, pressure),)
        if self._tables is not None and self._tables.must_ask(request, now, is_calm=pressure is CALM):
            if len(self._held) >= self.limits.requests_max:
                return (self._reject(request, Refusal.QUEUE_FULL, pressure.drain_s, now, pressure),)
            self._held[request.id] = request
            self._tables.hold(request)
            return NOTHING
        refused = self._quotas.refusal(request, now) if self._quotas is not None else None
        if refused is None and self._quotas is not None:
            self._quotas.admitted(request, now)
        return self._admit(request, refused, now, pressure)

    def answered(self, now: float) -> Sequence[Decision]:
        """Others have been heard: what of that which was held for them is decided?"""
        if self._tables is None or not self._held:
            return NOTHING
        now = self._time(now)
        decisions: list[Decision] = []
        for request in list(self._held.values()):
            if self._tables.is_decided(request):
                del self._held[request.id]
                self.interactions.arrived(request, now)
                decisions += self._admit(request, self._tables.decision(request), now, self._pressure(now))
        return decisions

    def _admit(self, request: Request, refused: Refused | None, now: float, pressure: Pressure) -> Sequence[Decision]:
        """Queue it, unless it is beyond a limit. It has been counted if `refused` is None."""
        was_counted = refused is None and self._quotas is not None
        refused = refused or self.policy.refusal(request, now, pressure)
        victims = self._waiting.giving_way(request) if refused is None else None
        if victims is None:
            if was_counted and self._quotas is not None:
                self._quotas.withdrawn(request, now)
            if refused is None:
                refused = Refused(Refusal.QUEUE_FULL, pressure.drain_s)
            return (self._reject(request, refused.reason, refused.retry_after_s, now, pressure, refused.limit),)
        decisions: list[Decision] = []
        for victim in victims:
            self._withdraw(victim, now)
            decisions.append(self._reject(victim, Refusal.QUEUE_FULL, pressure.drain_s, now, pressure))
        request.deadline_s = now + (self.limits.wait_s_max_inside if request.inside else self.limits.wait_s_max)
        self._shares.seen(request, now)
        self.interactions.admitted(request, now)
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
        now = self._time(now)
        self.backends[lease.backend].started(lease, now)
        return self._room_changed(now)

    def finished(
        self, request_id: str, service: ServiceTokens, now: float, awaits_more: bool | None = None
    ) -> Sequence[Decision]:
        """A dispatched request is complete, and this is what it took.

        `awaits_more`: the answer asks for a tool, so its interaction goes on; False: it is a final answer; None: it is
        not known.
        """
        now = self._time(now)
        lease = self._leases[request_id]
        request = lease.request
        lease.output_tokens = service.output
        self.lengths.learn(request, service.output)
        self.policy.learn(request, service, now)
        if not request.streamed:
            self.backends[lease.backend].answered(lease, now)
        self._end(lease, service, now)
        self.interactions.served(request, service, now, awaits_more)
        if self._quotas is not None:
            self._quotas.ended(request, service.prompt + service.output, now)
        return self._room_changed(now)

    def failed(
        self, request_id: str, failure: Failure, now: float, service: ServiceTokens | None = None
    ) -> Sequence[Decision]:
        """A dispatched request did not complete. `service`: what it received, where that is known."""
        now = self._time(now)
        lease = self._leases[request_id]
        ledger = self.backends[lease.backend]
        request = lease.request
        if failure is Failure.BROKEN:
            self._broke_off(lease, service or self._received(lease, now), now)
            return self._room_changed(now)
        ledger.refused(now)
        if failure is Failure.REFUSED:
            ledger.full()
        else:
            request.attempts += 1
        if request.attempts >= self.limits.attempts_max:
            self._broke_off(lease, NO_SERVICE, now)
            rejected = self._reject(request, Refusal.BACKEND_FAILED, 1.0, now, CALM)
            return [rejected, *self._room_changed(now)]
        self._end(lease, NO_SERVICE, now)
        self._shares.seen(request, now)
        self._enqueue(request, now, front=True)
        return self._room_changed(now)

    def cancelled(self, request_id: str, now: float, service: ServiceTokens | None = None) -> Sequence[Decision]:
        """Its client is gone: out of the queue uncharged, or ended and charged for what it received."""
        now = self._time(now)
        request = self._waiting.get(request_id)
        if request is not None:
            self._withdraw(request, now)
            return self._room_changed(now)
        held = self._held.pop(request_id, None)
        if held is not None and self._tables is not None:
            self._tables.let_go(held, now)
            return NOTHING
        lease = self._leases[request_id]
        self._broke_off(lease, service or self._received(lease, now), now)
        return self._room_changed(now)

    def backend_changed(self, name: str, change: Gauges | bool, now: float) -> Sequence[Decision]:
        """A backend was scraped (gauges), or has become healthy or unhealthy (a boolean)."""
        now = self._time(now)
        ledger = self.backends[name]
        if isinstance(change, bool):
            ledger.healthy = change
        else:
            if self._set_back_s:
                change = replace(change, taken_s=change.taken_s + self._set_back_s)
            ledger.observe(change, now, arrived_s=self._arrived_s)
        return self._room_changed(now)

    def woke(self, now: float) -> Sequence[Decision]:
        """The time that `next_wakeup` named has come."""
        return self._room_changed(self._time(now))

    # --- with other gateways in front of the same backends ---

    def share(self, epoch_s: float = 0.0) -> None:
        """There may be others: nothing is ours before the first exchange. All backends must have been added.

        `epoch_s`: by how much a clock that all have in common is ahead of that of the events here.
        """
        self._replica = Replica(self.policy, self.backends, self._shares, epoch_s=epoch_s)

    def share_tables(self, tables: Tables) -> None:
        """Its limits and interactions are shared with others by these."""
        self._tables = tables

    def is_busy(self) -> bool:
        """Is there anything that others should hear of soon?"""
        return bool(self._leases or self._waiting.requests)

    def is_urgent(self) -> bool:
        """Should the others be asked at once? The next one has come since they were, and lacks room that is ours."""
        if self._replica is None or not self._waiting.requests or self.obstacle not in ("slots", "kv"):
            return False
        return self._blocked is not None and self._replica.is_news(self._blocked)

    def tell(self, now: float) -> Told:
        """What the others are to know, and what is wanted of them. `hear` or `tell` must follow."""
        assert self._replica is not None
        now = self._time(now)
        self._charge_progress(now)
        head = self._blocked if self._waiting.requests else None
        return self._replica.tell(head, len(self._waiting.requests), now)

    def hear(self, heard: Heard, asked_s: float, now: float) -> Sequence[Decision]:
        """What came of what was told last, asked at this time."""
        assert self._replica is not None
        now = self._time(now)
        self._replica.hear(heard, asked_s + self._set_back_s)
        return self._room_changed(now)

    def cut_off(self, now: float) -> Sequence[Decision]:
        """The others cannot be heard: go on with the share that was ours of late."""
        assert self._replica is not None
        self._replica.cut_off()
        return self._room_changed(self._time(now))

    # --- deciding ---

    def _time(self, now: float) -> float:
        """The time of an event by a clock that is never set back."""
        now += self._set_back_s
        if now < self._now:
            self._set_back_s += self._now - now
            return self._now
        self._now = now
        return now

    def _room_changed(self, now: float) -> Sequence[Decision]:
        self._room += 1
        if not self._waiting.requests:
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
        while self._waiting.requests:
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
        dispatch = Dispatch(request.id, backend)
        self._recent.note(dispatch, request, now, CALM)
        return dispatch

    def _reject(
        self,
        request: Request,
        reason: Refusal,
        retry_after_s: float,
        now: float,
        pressure: Pressure,
        limit: Limit | None = None,
    ) -> Reject:
        """It is not served, or not any more."""
        self.interactions.cut(request)
        rejected = Reject(request.id, reason, retry_after_s, limit)
        self._recent.note(rejected, request, now, pressure)
        return rejected

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
            received = ServiceTokens(request.prompt_tokens, lease.output_tokens)
            self.policy.charge(request, received, now, final=False)
            held = lease.held_tokens
            self.backends[lease.backend].regrown(lease)
            if lease.held_tokens != held:
                self._shares.grew(request, lease.held_tokens - held)

    def _received(self, lease: Lease, now: float) -> ServiceTokens:
        if not lease.request.streamed:
            self.backends[lease.backend].unseen(now)
        return ServiceTokens(lease.request.prompt_tokens, lease.output_tokens)

    def _end(self, lease: Lease, service: ServiceTokens, now: float) -> None:
        request = lease.request
        del self._leases[request.id]
        self.backends[lease.backend].remove(lease, now)
        self._shares.ended(request, lease.held_tokens)
        self.policy.charge(request, service, now, final=True)

    def _broke_off(self, lease: Lease, service: ServiceTokens, now: float) -> None:
        """It ended before its answer did."""
        self._end(lease, service, now)
        self._gone(lease.request, service, now)

    def _gone(self, request: Request, service: ServiceTokens, now: float) -> None:
        """What was admitted is over without a whole answer."""
        self.interactions.broke_off(request, service, now)
        if self._quotas is not None:
            self._quotas.ended(request, service.prompt + service.output, now)

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
        self._gone(request, NO_SERVICE, now)

    def _expire(self, now: float, decisions: list[Decision]) -> None:
        while (request := self._waiting.expired(now)) is not None:
            self._withdraw(request, now)
            pressure = self._pressure(now)
            decisions.append(self._reject(request, Refusal.QUEUE_TIMEOUT, pressure.drain_s, now, pressure))

    def _pressure(self, now: float) -> Pressure:
        head = self._blocked if self._waiting.requests else None
        self._overload.observe(self.backends.values(), head, self.obstacle, now)
        return Pressure(self._overload.active, self._overload.reason, self._drain_estimate_s())

    def _drain_estimate_s(self) -> float:
        """How long what waits takes at the measured rate of dispatch; within a minute, so that clients do come back."""
        return min(60.0, max(1.0, len(self._waiting.requests) * self._dispatch_interval_s))
