"""AdmissionEngine: which request is dispatched, when and where? The only place where this is decided.

Events go in with the time, and decisions come out as values. Nothing here waits, reads a clock or does I/O. The gateway
maps decisions to connections and timers, the simulation maps them to a heap, and both see the same decisions.

Only events change what is decided. A question may be asked at any time, any number of times. What may happen to a
request in which state is a table (`admission.lifecycle`). What is noted then is in `admission.request_ledger`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from math import inf
from typing import Final, NamedTuple

from policies.admission.decisions import RECENT_MAX, Decision, Dispatch, Failure, Recent, Reject
from policies.admission.explanation import Explanation, explain
from policies.admission.policy import Policy
from policies.admission.request_ledger import NO_SERVICE, RequestLedger
from policies.admission.room import Elsewhere, PoolRoom
from policies.admission.waits import NEVER_WAITED
from policies.capacity.fair_shares import FairShares
from policies.capacity.gauges import CapacitySettings, EngineFacts, Gauges, Grant
from policies.capacity.ledger import LOOK_AGAIN_S, BackendLedger
from policies.capacity.obstacle import Blocked, Obstacle
from policies.capacity.output_lengths import APPS_MAX, OutputLengths, OutputPredictor
from policies.capacity.overload import Overload, OverloadSettings
from policies.interactions import Interactions
from policies.limits.entitlements import Entitlements, Tree
from policies.limits.quotas import Quotas
from policies.orders.order import Selection
from policies.queue.bounds import QueueLimits
from policies.queue.expected_wait import interval_s
from policies.queue.places import place_of
from policies.request import CALM, Pressure, Refusal, Refused, Request, ServiceTokens, State

NOTHING: Final[Sequence[Decision]] = ()


class Remembered(NamedTuple):
    """How much is remembered of what is over?"""

    decisions_max: int = RECENT_MAX
    lengths_max: int = APPS_MAX
    """Apps whose lengths of answers are remembered."""
    tenants_max: int = 10_000
    """Tenants that may be active with nothing here."""


REMEMBERED: Final = Remembered()


class AdmissionEngine:
    """One pool's queue, its engines' ledgers, and the policy that orders it.

    `interactions` and `quotas` may be common to the admission engines of several pools. If a clock is set back, time is
    taken to stand still, so nothing waits longer because of it.
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
        tree: Tree | None = None,
        remembered: Remembered = REMEMBERED,
    ):
        self.policy = policy
        self.limits = limits or QueueLimits()
        self.capacity = capacity or CapacitySettings()
        self.interactions = interactions if interactions is not None else Interactions()
        lengths = lengths if lengths is not None else OutputLengths(populations_max=remembered.lengths_max)
        tenants = FairShares(tenants_max=remembered.tenants_max)
        entitlements = Entitlements(tree)
        self.requests = RequestLedger(policy, self.limits, lengths, self.interactions, quotas, tenants, entitlements)
        self.backends = self.requests.backends
        self.working_set = self.requests.working_set
        self.room = PoolRoom(self.backends, tenants, self.working_set, entitlements, self.requests.giving_back)
        self.room.follow(policy)
        self.elsewhere: Elsewhere | None = None
        """None: this gateway is the only one that counts."""
        self.is_stood_in_for = False
        """While no engine is in service, another pool takes what waits here."""
        self.blocked: Blocked | None = None
        """The next request in order and its obstacles, as of the last event; None: nothing waits for room."""
        self.set_back_s = 0.0
        """How far the clock of the events was set back in all."""
        self._waiting = self.requests.waiting
        self._waits = self.requests.waits
        self._leases = self.requests.leases
        self.quotas = quotas
        self.overload = Overload(overload or OverloadSettings())
        self.recent = Recent(remembered.decisions_max)
        self._now = 0.0
        self._arrived_s = -inf

    def __repr__(self) -> str:
        counts = f"{self.queued} queued, {self.dispatched} dispatched, {len(self.backends)} backends"
        return f"<AdmissionEngine {counts}>"

    # --- questions: they change nothing ---

    @property
    def queued(self) -> int:
        """Requests that wait, including requests that wait for the answer of other gateways."""
        return len(self._waiting)

    @property
    def queued_bytes(self) -> int:
        return self._waiting.bytes

    @property
    def is_served(self) -> bool:
        """Is an engine in service?"""
        for ledger in self.backends.values():  # noqa: SIM110 (each request asks, and a generator is two objects)
            if ledger.healthy:
                return True
        return False

    @property
    def dispatched(self) -> int:
        return len(self._leases)

    def received(self, request_id: str, now: float) -> ServiceTokens:
        """What is a dispatched request believed to have received? Counted if streamed, else estimated from its age."""
        return self.requests.received(self.requests.lease(request_id), now + self.set_back_s)

    def pressure(self, now: float) -> Pressure:
        """Would a request that arrives now find the pool overloaded, and why?"""
        now = max(self._now, now + self.set_back_s)
        blocked = self.blocked if self.queued else None
        seen = self.overload.seen(self.backends.values(), blocked, now)
        return Pressure(seen.active, seen.reason)

    def explain(self, request_id: str, now: float) -> Explanation | None:
        """Why is a request where it is? None: it is neither here nor among the last decisions. O(queue of its
        tenant).
        """
        request, last = self._waiting.get(request_id), self.recent.last(request_id)
        if (known := request or last) is None:
            return None
        pressure = self.pressure(now)
        now = max(self._now, now + self.set_back_s)
        return explain(
            request_id,
            request,
            last,
            blocked=self.blocked,
            waited_s=self._waits.so_far(request, now) if request is not None else NEVER_WAITED,
            pressure=pressure,
            limits=self.quotas.standing(known.flow.tenant, now) if self.quotas is not None else [],
            numbers=self.policy.explain(known.flow, now) | self.requests.numbers(request, now),
            kv={name: ledger.kv_fraction() for name, ledger in self.backends.items()},
        )

    def next_wakeup(self) -> float | None:
        """When must `woke` be called if nothing else happens? None: not at all."""
        if not self.queued:
            return None
        return min(self._waiting.earliest_deadline_s(), self.room.opens_s(), self.requests.rests_s()) - self.set_back_s

    # --- events ---

    def add_backend(self, name: str, *, max_num_seqs: int | None = None, healthy: bool = True) -> None:
        """Add an engine."""
        ledger = BackendLedger(name, self.capacity, max_num_seqs=max_num_seqs)
        ledger.healthy = healthy
        if self.room.rivals is not None:
            ledger.allowance = Grant(0, 0)  # other gateways are asked first
        self.backends[name] = ledger
        self.room.changed()

    def arrived(self, request: Request, now: float) -> Sequence[Decision]:
        """A request wants service. It is queued, refused at once, or waits for what other gateways say."""
        now = self._arrived_s = self._time(now)
        self.interactions.arrived(request, now)
        pressure = self._observe(now) if self._waiting.requests or self.overload.active else CALM
        if not self.is_served and not self.requests.engine_start.wanted(now):
            return self._let_in(request, Refused(Refusal.NO_BACKEND, self.capacity.retry_backoff_s_max), now, pressure)
        if self.elsewhere is not None and self.elsewhere.must_ask(request, now, is_calm=pressure is CALM):
            decisions = self._let_in(request, None, now, pressure, asks=True)
            if request.progress.state is State.UNDECIDED:
                self.elsewhere.ask(self, request)
            return decisions
        refused = self.quotas.refusal(request, now) if self.quotas is not None else None
        refused = refused or self.requests.refusal(request, self.limits.wait_s(request), pressure, now)
        return self._let_in(request, refused, now, pressure)

    def peers_asked(self, request_id: str, now: float) -> None:
        """Other gateways are being asked about a request: from now on it counts."""
        request = self._waiting.get(request_id)
        if request is not None:
            self.requests.asked(request, self._time(now))

    def decided(self, request_id: str, refused: Refused | None, now: float) -> Sequence[Decision]:
        """Other gateways have answered: the request is beyond a limit (`refused`), or may be queued."""
        now = self._time(now)
        request = self._waiting.get(request_id)
        if request is None:
            return NOTHING
        # By now it may be known to be inside an interaction. Then it is queued as such, and may wait longer.
        self._waiting.remove(request)
        since_s = request.progress.deadline_s - self.limits.wait_s(request)
        self.interactions.arrived(request, now)
        request.progress.deadline_s = since_s + self.limits.wait_s(request)
        self._waiting.add(request)
        pressure = self._observe(now)
        refused = refused or self.requests.refusal(request, self.limits.wait_s(request), pressure, now)
        if refused is not None:
            self.requests.refused(request, now)
            return (self._reject(request, refused, now, pressure),)
        self._waits.answered(request, now)
        self.requests.admitted(request, now)
        decisions: list[Decision] = []
        self._decide(now, decisions)
        if request.progress.state is not State.DISPATCHED:
            self._waits_on(request, now, pressure, decisions)
        return decisions

    def progressed(self, request_id: str, output_tokens: int, now: float) -> Sequence[Decision]:
        """This many more output tokens of a dispatched request were seen; 0 with the first sign of its start."""
        lease = self._leases.get(request_id)
        if lease is None:
            return NOTHING
        if output_tokens:
            self.requests.streamed(lease, output_tokens)
        if lease.started_s is not None:
            return NOTHING
        now = self._time(now)
        self.backends[lease.backend].started(lease, now)
        return self._room_changed(now, lease.backend)

    def finished(
        self, request_id: str, service: ServiceTokens, now: float, awaits_more: bool | None = None
    ) -> Sequence[Decision]:
        """A dispatched request is complete, and took this much service.

        `awaits_more`: the answer asks for a tool, so its interaction continues; False: it is a final answer; None: not
        known.
        """
        now = self._time(now)
        lease = self.requests.lease(request_id)
        request = lease.request
        lease.output_tokens = service.output
        self.requests.lengths.learn(request, service.output)
        self.policy.order.learn(request, service, now)
        ledger = self.backends[lease.backend]
        ledger.prefill_rate.answered(lease, service, now)
        if not request.streamed:
            ledger.came_whole(lease, now)
        self.requests.finished(request, service, now, awaits_more)
        return self._room_changed(now, lease.backend)

    def failed(
        self, request_id: str, failure: Failure, now: float, service: ServiceTokens | None = None, again_s: float = 0.0
    ) -> Sequence[Decision]:
        """A dispatched request did not complete. `service`: what it received; `again_s`: it is wanted no sooner."""
        lease = self.requests.lease(request_id)
        request = lease.request
        if failure is Failure.BROKEN:
            return self.cancelled(request_id, now, service)
        now = self._time(now)
        if failure is Failure.GIVEN_BACK:
            received = service or self.requests.received(lease, now)
            self._waits.returned(request, lease.dispatched_s, now)
            self.requests.returned(request, now, received)
            return self._room_changed(now, lease.backend)
        progress, is_full = request.progress, failure is Failure.REFUSED
        if failure is not Failure.DROPPED:
            self.backends[lease.backend].refused(now, full_for=lease if is_full else None)
        if again_s := inf if failure is Failure.DROPPED else again_s:
            progress.closed = {**(progress.closed or {}), lease.backend: now + again_s}
        self._waits.returned(request, lease.dispatched_s, now)
        progress.attempts += failure is Failure.UNREACHED
        if max(progress.attempts, progress.refusals) >= self.limits.attempts_max and self.is_served:
            self._waits.ended(request, now)
            self.requests.broken(request, NO_SERVICE, now)
            lost = Refusal.BACKEND_FAILED if inf in (progress.closed or {}).values() else Refusal.NO_BACKEND
            why = Refused(Refusal.SERVER_BUSY, max(1.0, again_s)) if is_full else Refused(lost, 1.0)
            return [self._reject(request, why, now, CALM), *self._room_changed(now, lease.backend)]
        self.requests.returned(request, now)
        return self._room_changed(now, lease.backend)

    def cancelled(self, request_id: str, now: float, service: ServiceTokens | None = None) -> Sequence[Decision]:
        """Its client is gone, or its answer broke off.

        A queued request leaves uncharged. A dispatched one ends, and is charged for what it received.
        """
        request = self._waiting.get(request_id)
        if request is None:
            request = self.requests.lease(request_id).request
            service = service or self.received(request_id, now)
            now, engine = self._time(now), self.requests.lease(request_id).backend
            self.requests.broken(request, service, now)
            return self._room_changed(now, engine)
        now = self._time(now)
        self._withdraw(request, now)
        return self._room_changed(now)

    def backend_changed(self, name: str, change: Gauges | EngineFacts | bool, now: float) -> Sequence[Decision]:
        """An engine was scraped (gauges), was recognised (facts), or has become healthy or unhealthy (a boolean)."""
        now = self._time(now)
        ledger = self.backends[name]
        if isinstance(change, bool):
            ledger.healthy = change
            self.requests.wake(inf)
        elif isinstance(change, EngineFacts):
            ledger.recognised(change)
        else:
            if self.set_back_s:
                change = replace(change, taken_s=change.taken_s + self.set_back_s)
            ledger.observe(change, now, arrived_s=self._arrived_s)
            self.policy.observe(name, change)
        self.room.measure()
        self.working_set.measure(self.backends.values(), now, parks=self.limits.spares_calls_inside)
        return self._room_changed(now, name)

    def woke(self, now: float) -> Sequence[Decision]:
        """The time that `next_wakeup` named has come."""
        return self._room_changed(self._time(now))

    def catch_up(self, now: float) -> float:
        """Bring counters and ledgers up to the streamed tokens. Returns the time by the admission engine's clock."""
        now = self._time(now)
        self.requests.charge_progress(now)
        self.room.at(now)
        return now

    # --- deciding ---

    def _time(self, now: float) -> float:
        """The time of an event by a clock that is never set back."""
        now += self.set_back_s
        if now < self._now:
            self.set_back_s += self._now - now
            return self._now
        self._now = now
        return now

    def _observe(self, now: float) -> Pressure:
        """How is the pool at this event? Updates the state of overload."""
        blocked = self.blocked if self.queued else None
        found = self.overload.observe(self.backends.values(), blocked, now)
        return Pressure(found.active, found.reason)

    def _let_in(
        self, request: Request, refused: Refused | None, now: float, pressure: Pressure, *, asks: bool = False
    ) -> Sequence[Decision]:
        """Let it wait, unless it is beyond a limit or has no right to room. `asks`: other gateways are asked first."""
        victims = self._waiting.giving_way(request, now) if refused is None else None
        if victims is None:
            refused = refused or Refused(Refusal.QUEUE_FULL, 0.0)
            self.requests.refused(request, now)
            return (self._reject(request, refused, now, pressure),)
        decisions: list[Decision] = []
        if self._waiting.places.due_s:
            request.progress.was_let_in = self._waiting.places.due_s.pop(place_of(request), None) is not None
        for victim in victims:
            self._withdraw(victim, now)
            decisions.append(self._reject(victim, Refused(Refusal.QUEUE_FULL, 0.0), now, pressure))
        start_s = self.requests.engine_start.allowance_s()
        request.progress.deadline_s = now + min(self.limits.wait_s(request) + start_s, request.wait_s_max)
        if asks:
            self.requests.undecided(request)
        else:
            self.requests.admitted(request, now)
        self._decide(now, decisions)
        state = request.progress.state
        if state is not State.DISPATCHED:
            self._waits.began(request, now, asked=state is not State.QUEUED)
            self._waits_on(request, now, pressure, decisions)
        return decisions

    def _waits_on(self, request: Request, now: float, pressure: Pressure, decisions: list[Decision]) -> None:
        """Tell a queued request its wait, and refuse the request if its client is not willing to wait for so long."""
        least_s, _ = interval_s(self.requests.waits_on(request, now).wait_s)
        if least_s > request.wait_s_max:
            self._withdraw(request, now)
            decisions.append(self._reject(request, Refused(Refusal.WAIT_TOO_LONG, 0.0), now, pressure))

    def _room_changed(self, now: float, engine: str | None = None) -> Sequence[Decision]:
        """Something ended, started or became known at this engine, or time has passed: expire what is due, and dispatch
        what can start.
        """
        if engine is not None:
            self.room.changed(engine)
            self.requests.touched[engine] = None
        if self.requests.engine_start.s_max:
            self.requests.follow_start(now, is_served=self.is_served)
        if not self._waiting.requests:
            if self.blocked is not None:
                self.blocked = None
                self._waits.blocked(None, now)
            return NOTHING
        decisions: list[Decision] = []
        while (request := self._waiting.expired(now)) is not None:
            is_held = not self.working_set.has_room(request)
            self._withdraw(request, now)
            pressure = self._observe(now)
            again_s = self.requests.starts.comes_back_in(request, 0.0, now) if is_held else 0.0
            why = Refusal.QUEUE_TIMEOUT if self.is_served else Refusal.NO_BACKEND
            decisions.append(self._reject(request, Refused(why, again_s), now, pressure))
        self.requests.wake(now)
        self._decide(now, decisions)
        return decisions

    def _decide(self, now: float, decisions: list[Decision]) -> None:
        """Dispatch in the policy's order for as long as the next in order fits."""
        if now - self.requests.charged_s >= LOOK_AGAIN_S:  # in batches, so that a single token costs almost nothing
            self.requests.charge_progress(now)
        self.room.at(now)
        self.requests.starts.expire(now)
        if self._waiting.places.due_s:
            self._waiting.places.expired(now)
        while True:
            popped = self.policy.pop(now, self.room) if self._waiting.requests else None
            if not isinstance(popped, Selection):
                if popped is not None and (aside := self.requests.set_aside(popped, now, stays=self.is_stood_in_for)):
                    decisions += [self._reject(one, why, now, CALM) for one, why in aside if why is not None]
                    continue
                if popped is not None and self.room.is_lost(popped.request):
                    self._withdraw(popped.request, now)
                    lost = Refused(Refusal.NO_BACKEND, self.capacity.retry_backoff_s_max)
                    decisions.append(self._reject(popped.request, lost, now, CALM))
                    continue
                self.blocked = popped
                self._waits.blocked(popped, now)
                if popped is not None:
                    decisions += self.requests.give_back(popped.request, popped.obstacles, now)
                return
            decisions.append(self._dispatch(popped.request, popped.backend, now))
            if self.room.waits_inside(popped.backend):
                decisions += self.requests.give_back(popped.request, {popped.backend: Obstacle.SLOTS}, now)

    def _dispatch(self, request: Request, backend: str, now: float) -> Dispatch:
        self.requests.dispatched(request, backend, now)
        self.room.changed(backend)
        self.recent.note(dispatch := Dispatch(request.id, backend), request, now, CALM)
        return dispatch

    def _withdraw(self, request: Request, now: float) -> None:
        """It leaves the queue without service."""
        if self.elsewhere is not None and request.progress.state is not State.QUEUED:
            self.elsewhere.let_go(request)
        self.requests.withdrawn(request, now)

    def _reject(self, request: Request, refused: Refused, now: float, pressure: Pressure) -> Reject:
        """It is not served, or no longer. It may come back when its limit has room and it would be served."""
        self.interactions.cut(request)
        again_s = max(1.0, refused.retry_after_s)
        if self._waiting.requests and (refused.limit is not None or not refused.retry_after_s):
            again_s = max(again_s, self.requests.expected(request, now, comes=True).wait_s)
        if refused.reason is Refusal.QUEUE_FULL:
            again_s = self._waiting.comes_back_in(request, again_s, now)
        rejected = Reject(request.id, refused.reason, again_s, refused.limit)
        self.recent.note(rejected, request, now, pressure)
        return rejected
