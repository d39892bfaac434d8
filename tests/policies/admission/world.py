"""Random events at pools that share tenants, and what always holds."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from random import Random
from typing import Any

import pytest

from policies.admission.decisions import Decision, Dispatch, Failure, Reject
from policies.admission.engine import AdmissionEngine
from policies.capacity.gauges import Gauges
from policies.capacity.obstacle import Blocked, Obstacle
from policies.capacity.pool_load import PoolLoad
from policies.interactions import Interactions
from policies.limits.quotas import MINUTE_S, Quota, Quotas
from policies.limits.throttle import Ceilings, ThrottleSettings
from policies.orders.vtc import CounterOrder
from policies.queue.bounds import KEPT_FREE, QueueLimits
from policies.request import NO_CLAIM, WAIT_S_MAX, Claim, Interaction, RejectReason, Request, ServiceTokens, State
from policies.tree.node import SEQUENCES
from tests.policies.making import make_request, policy_with

LIMITS = QueueLimits(
    queue_requests_max=40, queue_bytes_max=2000, queue_wait_s_max=20.0, attempts_max=3, queue_wait_s_max_inside=40.0
)
MANY = QueueLimits(queue_requests_max=2000, queue_wait_s_max=20.0)
SETTINGS = {
    "requests_per_minute": 400, "throttle": ThrottleSettings(user=Ceilings(starts=20)), "window_tokens": 1000.0,
}  # fmt: skip
WEIGHTS = (1.0, 2.0, 0.5, 1.0)
QUOTA = Quota(requests_per_minute=400, tokens_per_minute=60_000, concurrent=30)
KV_TOKENS = 8000
NOT_FREE = {Obstacle.CLOSED, Obstacle.WORKING_SET}
"""What may keep a request from an engine that runs nothing."""


Lift = tuple[object, float, float]
"""The member of the queue, what its tenant had received before it, and by how much its counter was lifted."""


class World:
    """Random events at pools that share tenants, limits and interactions. What must always hold is checked after each.

    `slots`: of each engine. `jumps`: the clock is set back and forth. `order`: of the engines in the configuration.
    `returns`: engines send requests back. `settings`: of the policy.
    """

    def __init__(
        self,
        policy: str,
        seed: int,
        *,
        pools: int = 1,
        slots: Sequence[int | None] = (None, 4, 8),
        tenants: int = 4,
        jumps: bool = False,
        limits: QueueLimits = LIMITS,
        order: Sequence[int] | None = None,
        returns: bool = True,
        **settings: Any,
    ) -> None:
        self.random = Random(seed)
        self.quotas = Quotas(QUOTA)
        self.interactions = Interactions()
        self.jumps, self.returns = jumps, returns
        self.now = 1000.0
        self.tenants = [f"t{number}" for number in range(tenants)]
        self.serial = 0
        self.waiting: dict[str, tuple[Request, AdmissionEngine]] = {}
        self.running: dict[str, tuple[Request, AdmissionEngine, str]] = {}
        self.taken: Counter[tuple[str, int]] = Counter()
        """Tokens that were taken, by tenant and the minute in which their request came."""
        self.came: dict[str, int] = {}
        """The minute of each request."""
        self.ended: Counter[str] = Counter()
        self.log: list[Decision] = []
        self.were_dispatched: set[str] = set()
        self.known: set[Interaction] = set()
        """All interactions that there ever were."""
        self.limits = limits
        self.settled: Counter[tuple[int, str]] = Counter()
        """What requests that have ended were charged over their weight, by pool and tenant."""
        self.lifts: dict[tuple[int, str], Lift] = {}
        self.pools = [
            AdmissionEngine(
                policy_with(policy, **SETTINGS | settings), limits=limits, quotas=self.quotas,
                interactions=self.interactions,
            )
            for _ in range(pools)
        ]  # fmt: skip
        self.slots = {f"e{number}": slots[number] for number in order or range(len(slots))}
        for pool in self.pools:
            for name, count in self.slots.items():
                pool.add_backend(name, max_num_seqs=count)

    def carry(self, pool: AdmissionEngine, decisions: Sequence[Decision]) -> None:
        self.log += decisions
        for decision in decisions:
            request, its_pool = self.waiting.pop(decision.id)
            assert its_pool is pool
            progress = request.progress
            if isinstance(decision, Dispatch):
                assert pool.backends[decision.backend].healthy
                assert not progress.rests
                engine_s = self.now + pool.set_back_s
                assert (progress.closed or {}).get(decision.backend, 0.0) <= engine_s < progress.deadline_s
                self.running[decision.id] = request, pool, decision.backend
                self.were_dispatched.add(decision.id)
            else:
                assert 1.0 <= decision.retry_after_s <= WAIT_S_MAX
                self.ends(request, pool)
                was_at_engines = progress.unreached >= LIMITS.attempts_max
                assert was_at_engines or progress.charged == 0.0, "a rejected request was charged"

    def ends(self, request: Request, pool: AdmissionEngine) -> None:
        self.ended[request.id] += 1
        self.settled[self.pools.index(pool), request.flow.tenant] += request.progress.charged / request.weight

    # --- events ---

    def event(self) -> None:
        rng = self.random
        self.now += rng.expovariate(50)
        if self.jumps and rng.random() < 0.02:
            self.now += rng.choice([-4000.0, -30.0, -0.5, 100.0, 1e5])
        kind = rng.random()
        if kind < 0.40 or not (self.waiting or self.running):
            self.arrives()
        elif kind < 0.80 and self.running:
            self.goes_on(rng.choice(sorted(self.running)), rng.random())
        elif kind < 0.82 and self.waiting:
            id = rng.choice(sorted(self.waiting))
            request, pool = self.waiting.pop(id)
            decisions = pool.cancelled(id, self.now)
            assert request.progress.charged == 0.0
            self.ends(request, pool)
            self.carry(pool, decisions)
        elif kind < 0.94:
            self.engine_changes(rng.choice(self.pools))
        else:
            self.time_passes(rng.choice([0.01, 0.1, 1.0]))

    def arrives(self) -> None:
        rng, self.serial = self.random, self.serial + 1
        name = f"i{rng.randint(0, 5)}"
        claims = [NO_CLAIM, Claim(name), Claim(name, begins=True), Claim(name, explicit=True, ends=rng.random() < 0.3)]
        text = rng.randint(0, 3)
        tenant = rng.randrange(len(self.tenants))
        request = make_request(
            self.tenants[tenant], id=f"r{self.serial:05}", user=rng.choice("uv"), arrived_s=self.now,
            weight=WEIGHTS[tenant % len(WEIGHTS)], body_bytes=rng.choice([0, 0, 10, 90, 390]),
            prompt=rng.choice([1, 30, 300, 900]), output_max=rng.choice([1, 50, 400]), claim=rng.choice(claims),
            sequences=rng.choice([1, 1, 1, 2, 5]), streamed=rng.random() < 0.7,
            prefix=tuple(hash((text, block)) for block in range(rng.choice([0, 3, 8]))),
        )  # fmt: skip
        pool = rng.choice(self.pools)
        queued, queued_bytes = pool.queued, pool.queued_bytes
        self.waiting[request.id] = request, pool
        decisions = pool.arrived(request, self.now)
        for decision in decisions:
            reason = decision.reason if isinstance(decision, Reject) else None
            if reason in (RejectReason.OVER_USER_LIMIT, RejectReason.OVER_APP_LIMIT):
                assert pool.pressure(self.now).overloaded
                assert not request.progress.inside
                assert decision.limit.remaining == 0
            if reason is RejectReason.QUEUE_FULL and decision.id == request.id:
                has_place = queued < (1.0 - KEPT_FREE) * self.limits.queue_requests_max
                assert not has_place or queued_bytes + request.body_bytes > self.limits.queue_bytes_max
        self.carry(pool, decisions)
        self.came[request.id] = int((self.now + pool.set_back_s) // MINUTE_S)

    def goes_on(self, id: str, what: float) -> None:
        request, pool, _ = self.running[id]
        rng, prompt = self.random, request.prompt_tokens
        if what < 0.4:
            self.carry(pool, pool.progressed(id, rng.choice([0, 1, 5, 40]), self.now))
            return
        del self.running[id]
        if what < 0.5 and self.returns:
            self.waiting[id] = request, pool
            failure = rng.choice([Failure.REFUSED, Failure.UNREACHED, Failure.DROPPED])
            unreached = request.progress.unreached + (failure is Failure.UNREACHED)
            decisions = pool.failed(id, failure, self.now, None, rng.choice([0.0, 0.5, 9.0]))
            assert request.progress.unreached == unreached <= LIMITS.attempts_max
            if request.progress.state is State.QUEUED:
                assert request.progress.charged == 0.0, "what waits again was billed"
            self.carry(pool, decisions)
            return
        service = ServiceTokens(prompt, rng.randint(0, request.output_tokens_max), rng.choice([None, 0, prompt]))
        if what < 0.9:
            decisions = pool.finished(id, service, self.now, rng.choice([None, True, False]))
        else:
            service = rng.choice([ServiceTokens(0, 0), ServiceTokens(5, 6)])
            if rng.random() < 0.5:
                decisions = pool.cancelled(id, self.now, service)
            else:
                decisions = pool.failed(id, Failure.BROKEN, self.now, service)
        if isinstance(pool.policy.order, CounterOrder) and service.output and not (request.prefix or service.cached):
            assert request.progress.charged == service.prompt + 2 * service.output
        self.ends(request, pool)
        self.taken[request.flow.tenant, self.came[id]] += min(prompt, service.prompt + service.output)
        self.carry(pool, decisions)

    def engine_changes(self, pool: AdmissionEngine) -> None:
        rng = self.random
        name = rng.choice(sorted(pool.backends))
        if rng.random() < 0.2 and self.returns:  # it has crashed, and comes back with an empty cache
            for id in [id for id, (_, own, engine) in self.running.items() if own is pool and engine == name]:
                request, _, _ = self.running.pop(id)
                self.waiting[id] = request, pool
                self.carry(pool, pool.failed(id, Failure.UNREACHED, self.now))
            self.carry(pool, pool.backend_changed(name, rng.random() < 0.8, self.now))
            read = Gauges(self.now, 0, 0, 0.0, KV_TOKENS, 16, prompt_tokens_total=0)
        else:
            running = sum(lease.request.sequences for lease in pool.backends[name].leases.values())
            read = Gauges(
                self.now - rng.choice([0.0, 0.05, 3.0]), rng.choice([None, running]), rng.choice([None, 0, 0, 1, 5]),
                rng.choice([None, 0.3, 0.9, 1.0]), rng.choice([None, KV_TOKENS]), 16, 0, self.serial * 100,
            )  # fmt: skip
        self.carry(pool, pool.backend_changed(name, read, self.now))

    def time_passes(self, seconds: float) -> None:
        """Each pool is woken at the times that it names, and at no other."""
        began_s, until_s = self.now, self.now + seconds
        for pool in self.pools:
            self.now = began_s
            for _ in range(10_000):
                wakeup_s = pool.next_wakeup()
                if wakeup_s is None or wakeup_s > until_s:
                    break
                self.now = max(wakeup_s, began_s) + 1e-6
                self.carry(pool, pool.woke(self.now))
            else:
                raise AssertionError("woken without end")
        self.now = until_s

    def ask(self, later_s: float) -> None:
        """Ask everything that can be asked, as of now and of a while later."""
        for pool in self.pools:
            for now in (self.now, self.now + later_s):
                pool.pressure(now)
                for id in [*self.waiting, *self.running]:
                    pool.explain(id, now)
                assert pool.explain("nobody", now) is None
                for request in pool.requests.waiting.requests.values():
                    if request.progress.state is State.QUEUED:
                        pool.requests.expected(request, now, comes=False)
                for id in pool.requests.leases:
                    pool.received(id, now)
                for ledger in pool.backends.values():
                    for obstacle in Obstacle if ledger.has_gauges() else set(Obstacle) - {Obstacle.WAITING}:
                        ledger.opens_s(make_request(), obstacle, now)
                    ledger.kv_fraction()
                    ledger.occupancy(None, None, now)
                    repr(ledger)
            pool.next_wakeup()
            repr(pool)

    # --- what always holds ---

    def check(self) -> None:
        for pool in self.pools:
            waiting = [request for request, its_pool in self.waiting.values() if its_pool is pool]
            assert pool.queued == len(waiting)
            assert (pool.blocked is None) == (not [each for each in waiting if not each.progress.rests])
            for name, ledger in pool.backends.items():
                if pool.blocked is not None and ledger.healthy and not ledger.leases:
                    found = {one.obstacles.get(name) for one in (pool.blocked, *pool.blocked.others)} - {None}
                    assert found <= NOT_FREE, "a request waits beside an engine that runs nothing"
        under_way = Counter(request.flow.tenant for request, *_ in (*self.waiting.values(), *self.running.values()))
        assert self.quotas.under_way == under_way
        assert max(under_way.values(), default=0) <= QUOTA.concurrent

    def check_books(self) -> None:
        """An error of the books stays: they are looked at now and then."""
        for pool in self.pools:
            self.books_are_the_sums_of_their_requests(pool)
            self.parts_are_the_sums_of_their_leases(pool)
            self.counters_are_service_and_lifts(pool)
            self.kept_answers_are_those_of_the_ledgers(pool)
        self.interactions_know_their_calls()

    def fresh(self, pool: AdmissionEngine) -> list[Request]:
        """Return those that wait and were never dispatched: one that comes back is not refused for want of room."""
        return [
            request for request, its_pool in self.waiting.values()
            if its_pool is pool and request.id not in self.were_dispatched
        ]  # fmt: skip

    def books_are_the_sums_of_their_requests(self, pool: AdmissionEngine) -> None:
        waiting = {id: request for id, (request, its_pool) in self.waiting.items() if its_pool is pool}
        assert all(pool.requests.waiting.get(id) is request for id, request in waiting.items())
        assert pool.queued == len(pool.policy) + sum(request.progress.rests for request in waiting.values())
        assert pool.queued_bytes == sum(request.body_bytes for request in waiting.values())
        fresh = self.fresh(pool)
        assert len(fresh) <= self.limits.queue_requests_max
        assert sum(request.body_bytes for request in fresh) <= self.limits.queue_bytes_max
        wakeup_s = pool.next_wakeup()
        assert (wakeup_s is None) == (not waiting)
        if wakeup_s is not None:
            earliest_s = min(request.progress.deadline_s for request in waiting.values())
            assert wakeup_s + pool.set_back_s <= earliest_s + 1e-6
        leases = list(pool.requests.leases.values())
        mine = {(id, engine) for id, (_, its_pool, engine) in self.running.items() if its_pool is pool}
        assert {(lease.request.id, lease.backend) for lease in leases} == mine
        for id, state in (*((id, "queued") for id in waiting), *((id, "dispatched") for id, _ in mine)):
            explanation = pool.explain(id, self.now)
            assert explanation.state == state
        for name, ledger in pool.backends.items():
            own = [lease for lease in leases if lease.backend == name]
            starting = [lease for lease in own if lease.started_s is None]
            assert sorted(ledger.leases) == sorted(lease.request.id for lease in own)
            assert sorted(ledger.starting) == sorted(lease.request.id for lease in starting)
            assert ledger.sequences == sum(lease.request.sequences for lease in own)
            assert ledger.kv.held_tokens == sum(lease.footprint_tokens for lease in own)
            assert ledger.starting_tokens == sum(lease.request.prompt_tokens for lease in starting)

    def kept_answers_are_those_of_the_ledgers(self, pool: AdmissionEngine) -> None:
        fresh = PoolLoad(pool.backends)
        assert pool.room.load.ranks() == fresh.ranks(), "the occupancy of an engine has changed unnoticed"
        assert pool.room.load.sum_sizes() == fresh.sum_sizes()
        for blocked in (pool.blocked, *pool.blocked.others) if pool.blocked is not None else ():
            assert blocked.nearest() == Blocked(blocked.request, blocked.obstacles).nearest()

    def parts_are_the_sums_of_their_leases(self, pool: AdmissionEngine) -> None:
        tree, running, queued = pool.requests.tree, Counter[str](), Counter[str]()
        requests = {lease.request.id: lease.request for lease in pool.requests.leases.values()}
        for request in requests.values():
            running[request.flow.tenant] += request.sequences
        for id, (request, its_pool) in self.waiting.items():
            if its_pool is pool:
                requests[id] = request
                queued[request.flow.tenant] += request.sequences
        assert tree.pool.used[SEQUENCES] == sum(running.values())
        held = pool.requests.working_set
        assert held.tokens == sum(held.tenants().values())
        assert all(tokens > 0 for tokens in held.tenants().values())
        weights = sum({request.flow.tenant: request.weight for request in requests.values()}.values())
        present = len({request.flow.tenant for request in requests.values()})
        assert (tree.pool.interactive.present, tree.pool.interactive.weights) == (present, pytest.approx(weights))
        for request in requests.values():
            is_flooding = queued[request.flow.tenant] * weights > running.total() * request.weight + 1e-9
            assert tree.alone_and_flooding(request)[1] == is_flooding

    def counters_are_service_and_lifts(self, pool: AdmissionEngine) -> None:
        """What a counter has beyond the service of its tenant are lifts, and a lift only raises."""
        backlog, number = pool.policy.order.backlog, self.pools.index(pool)
        if not isinstance(pool.policy.order, CounterOrder) or backlog is None:
            return
        charged = Counter[str]()
        for request, its_pool, _ in self.running.values():
            if its_pool is pool:
                charged[request.flow.tenant] += request.progress.charged / request.weight
        for tenant in self.tenants:
            member = backlog.tenant(tenant)
            if member is None:
                self.lifts.pop((number, tenant), None)
                continue
            settled = self.settled[number, tenant]
            service = settled + charged[tenant]
            known, before, lifted = self.lifts.get((number, tenant), (None, 0.0, 0.0))
            if known is not member:
                before = settled if known is not None or member.counter < service else 0.0
                lifted = member.counter - service + before
            lift = member.counter - (service - before)
            assert lift >= lifted - 1e-6, "a counter holds less than what its tenant received"
            self.lifts[number, tenant] = (member, before, lift)

    def interactions_know_their_calls(self) -> None:
        requests = [request for request, *_ in (*self.waiting.values(), *self.running.values())]
        under_way = Counter(id(request.progress.interaction) for request in requests)
        self.known |= {one for request in requests if (one := request.progress.interaction) is not None}
        assert len(self.interactions) <= len(self.known)
        assert all(interaction.under_way == under_way[id(interaction)] for interaction in self.known)
        assert all((request.progress.interaction is None) == (request.claim == NO_CLAIM) for request in requests)

    def nothing_was_missed(self) -> None:
        """An engine that is asked anew starts nothing more: of what time forgets, nothing is remembered.

        A request may still be one of those that wait inside the engine, to hide the way.
        """
        self.time_passes(0.0)
        for pool in self.pools:
            pool.room.changed()
            decisions = pool.woke(self.now)
            for decision in decisions:
                slots = pool.backends[decision.backend].slots.known()
                running = pool.backends[decision.backend].sequences
                assert slots is None or running > slots, "a request waited for a slot that was free"
            self.carry(pool, decisions)

    def drain(self) -> None:
        for pool in self.pools:
            for name in pool.backends:
                self.carry(pool, pool.backend_changed(name, True, self.now))
        for _ in range(5000):
            if not self.waiting and not self.running:
                break
            for id in list(self.running):
                request, pool, _ = self.running.pop(id)
                service = ServiceTokens(request.prompt_tokens, 1)
                self.taken[request.flow.tenant, self.came[id]] += request.prompt_tokens
                decisions = pool.finished(id, service, self.now, False)
                self.ends(request, pool)
                self.carry(pool, decisions)
            self.time_passes(0.1)
        assert not self.waiting
        assert sorted(self.ended) == [f"r{number + 1:05}" for number in range(self.serial)]
        assert set(self.ended.values()) == {1}
        assert self.quotas.under_way == {}
        for pool in self.pools:
            pool.requests.working_set.expire(self.now + 1e6)
            assert pool.dispatched == pool.queued == pool.requests.working_set.tokens_in_all == 0
            assert (len(pool.requests.working_set), pool.requests.working_set.tenants()) == (0, {})
            assert not pool.requests.working_set.passing
            assert not any(pool.requests.tree.pool.used)
            assert not any(ledger.leases or ledger.kv.held_tokens for ledger in pool.backends.values())
