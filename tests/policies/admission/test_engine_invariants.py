"""Every invariant of the admission engine holds after any sequence of events."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from policies.admission.decisions import Decision, Dispatch, Failure, Reject
from policies.admission.engine import AdmissionEngine
from policies.capacity.gauges import Gauges
from policies.limits.throttle import Ceilings, ThrottleSettings
from policies.orders.policy_entries import POLICIES
from policies.orders.vtc import CounterOrder
from policies.request import NO_CLAIM, WAIT_S_MAX, Claim, Refusal, Request, ServiceTokens, State
from policies.tree.node import SEQUENCES
from tests.policies.making import LIMITS, dispatched, make_request, policy_with

WEIGHTS = {"a": 1.0, "b": 2.0, "c": 0.5}


class Admission(RuleBasedStateMachine):
    """Any events in any order; the ledger is right after each."""

    def __init__(self) -> None:
        super().__init__()
        self.now = 0.0
        self.serial = 0
        self.queued: dict[str, Request] = {}
        self.dispatched: dict[str, tuple[Request, str]] = {}
        self.ended: dict[str, Request] = {}
        self.was_dispatched: set[str] = set()
        self.lifts: dict[str, tuple[object, float, float]] = {}
        self.settled: dict[str, float] = dict.fromkeys(WEIGHTS, 0.0)

    @initialize(policy=st.sampled_from(sorted(POLICIES)), slots=st.sampled_from([None, 1, 3]))
    def begin(self, policy: str, slots: int | None) -> None:
        throttled = policy_with(policy, throttle=ThrottleSettings(user=Ceilings(starts=2)), window_tokens=1000.0)
        self.engine = AdmissionEngine(throttled, limits=LIMITS)
        self.engine.add_backend("one", max_num_seqs=slots)
        self.engine.add_backend("two")

    def apply(self, decisions: Sequence[Decision]) -> None:
        for decision in decisions:
            request = self.queued.pop(decision.id)  # nothing else can be dispatched or rejected
            if isinstance(decision, Dispatch):
                assert request.arrived_s <= self.now < request.progress.deadline_s
                assert not request.progress.rests
                assert (request.progress.closed or {}).get(decision.backend, 0.0) <= self.now
                assert self.engine.backends[decision.backend].healthy
                self.dispatched[request.id] = (request, decision.backend)
                self.was_dispatched.add(request.id)
            else:
                if request.progress.unreached >= LIMITS.attempts_max:  # it was dispatched, and that has cost its prompt
                    self.settled[request.flow.tenant] += request.progress.charged / request.weight
                else:
                    assert request.progress.charged == 0.0, "a rejected request was charged"
                assert 1.0 <= decision.retry_after_s <= WAIT_S_MAX
                self.ended[request.id] = request

    def end(self, request_id: str, service: ServiceTokens | None) -> None:
        request, _ = self.dispatched.pop(request_id)
        self.ended[request_id] = request
        if service is not None and isinstance(self.engine.policy.order, CounterOrder):
            assert request.progress.charged == service.prompt + 2 * service.output
        self.settled[request.flow.tenant] += request.progress.charged / request.weight

    def pick(self, number: int) -> str:
        ids = sorted(self.dispatched)
        return ids[number % len(ids)]

    # --- events ---

    @rule(
        tenant=st.sampled_from(sorted(WEIGHTS)),
        user=st.sampled_from(["", "x"]),
        prompt=st.sampled_from([1, 30, 700, 3000]),
        body_bytes=st.sampled_from([0, 10, 90, 390, 500]),
        sequences=st.sampled_from([1, 1, 1, 2, 5]),
        streamed=st.booleans(),
        claim=st.sampled_from([NO_CLAIM, NO_CLAIM, Claim("i"), Claim("i", begins=True), Claim("j", 9, ends=True)]),
    )
    def arrives(
        self, tenant: str, user: str, prompt: int, body_bytes: int, sequences: int, streamed: bool, claim: Claim
    ) -> None:
        self.serial += 1
        request = make_request(
            tenant, id=f"r{self.serial:03}", user=user, weight=WEIGHTS[tenant], prompt=prompt, body_bytes=body_bytes,
            sequences=sequences, streamed=streamed, arrived_s=self.now, claim=claim,
        )  # fmt: skip
        fresh, queued, queued_bytes = self.fresh(), len(self.queued), self.engine.queued_bytes
        self.queued[request.id] = request
        decisions = self.engine.arrived(request, self.now)
        for decision in decisions:
            if isinstance(decision, Reject) and decision.reason in (Refusal.OVER_USER_LIMIT, Refusal.OVER_APP_LIMIT):
                assert self.engine.pressure(self.now).overloaded
                assert not request.progress.inside
                assert decision.limit is not None
                assert decision.limit.remaining == 0
        self.apply(decisions)
        if not any(isinstance(decision, Reject) for decision in decisions):
            assert len(fresh) < LIMITS.queue_requests_max
        if Reject(request.id, Refusal.QUEUE_FULL, 1.0) in decisions:
            # What the same event dispatches or rejects besides had a place until then.
            assert queued >= LIMITS.queue_requests_max or body_bytes + queued_bytes > LIMITS.queue_bytes_max

    def fresh(self) -> list[Request]:
        """Those queued that were never dispatched: one that comes back is not refused for want of room."""
        return [request for request in self.queued.values() if request.id not in self.was_dispatched]

    @precondition(lambda self: self.dispatched)
    @rule(number=st.integers(0, 20), tokens=st.sampled_from([0, 1, 1, 40, 300]))
    def progresses(self, number: int, tokens: int) -> None:
        self.apply(self.engine.progressed(self.pick(number), tokens, self.now))

    @precondition(lambda self: self.dispatched)
    @rule(
        number=st.integers(0, 20),
        output=st.integers(0, 100),
        wrong=st.sampled_from([0, 0, -1, 12]),
        awaits_more=st.sampled_from([None, True, False]),
    )
    def finishes(self, number: int, output: int, wrong: int, awaits_more: bool | None) -> None:
        request_id = self.pick(number)
        request, _ = self.dispatched[request_id]
        service = ServiceTokens(max(0, request.prompt_tokens + wrong), output)
        decisions = self.engine.finished(request_id, service, self.now, awaits_more)
        self.end(request_id, service)
        self.apply(decisions)

    @precondition(lambda self: self.dispatched)
    @rule(
        number=st.integers(0, 20),
        failure=st.sampled_from([Failure.REFUSED, Failure.UNREACHED, Failure.DROPPED]),
        again_s=st.sampled_from([0.0, 0.0, 0.5, 3.0]),
    )
    def comes_back(self, number: int, failure: Failure, again_s: float) -> None:
        request_id = self.pick(number)
        request, _ = self.dispatched.pop(request_id)
        self.queued[request_id] = request
        attempts = request.progress.unreached
        decisions = self.engine.failed(request_id, failure, self.now, None, again_s)
        assert request.progress.unreached == attempts + (failure is Failure.UNREACHED) <= LIMITS.attempts_max
        if request_id not in dispatched(decisions):
            waits_again = request.progress.state is State.QUEUED
            assert (request.progress.charged == 0.0) or not waits_again, "what waits again was billed"
        self.apply(decisions)

    @precondition(lambda self: self.dispatched)
    @rule(number=st.integers(0, 20), known=st.booleans())
    def breaks(self, number: int, known: bool) -> None:
        request_id = self.pick(number)
        service = ServiceTokens(5, 6) if known else None
        decisions = self.engine.failed(request_id, Failure.BROKEN, self.now, service)
        self.end(request_id, service)
        self.apply(decisions)

    @precondition(lambda self: self.dispatched)
    @rule(number=st.integers(0, 20), known=st.booleans())
    def is_cancelled_running(self, number: int, known: bool) -> None:
        request_id = self.pick(number)
        service = ServiceTokens(5, 6) if known else None
        decisions = self.engine.cancelled(request_id, self.now, service)
        self.end(request_id, service)
        self.apply(decisions)

    @precondition(lambda self: self.queued)
    @rule(number=st.integers(0, 20))
    def is_cancelled_queued(self, number: int) -> None:
        request_id = sorted(self.queued)[number % len(self.queued)]
        decisions = self.engine.cancelled(request_id, self.now)
        request = self.ended[request_id] = self.queued.pop(request_id)
        assert request.progress.charged == 0.0
        self.apply(decisions)

    @rule(name=st.sampled_from(["one", "two"]), healthy=st.sampled_from([True, True, False]))
    def changes_health(self, name: str, healthy: bool) -> None:
        self.apply(self.engine.backend_changed(name, healthy, self.now))

    @rule(
        name=st.sampled_from(["one", "two"]),
        waiting=st.sampled_from([None, 0, 1, 9]),
        running=st.sampled_from([None, 0, 3]),
        usage=st.sampled_from([None, 0.0, 0.5, 0.99]),
        capacity=st.sampled_from([None, 4000]),
    )
    def is_scraped(
        self, name: str, waiting: int | None, running: int | None, usage: float | None, capacity: int | None
    ) -> None:
        gauges = Gauges(self.now, running, waiting, usage, capacity, 16)
        self.apply(self.engine.backend_changed(name, gauges, self.now))

    @rule(seconds=st.sampled_from([0.001, 0.02, 0.3, 1.5]))
    def time_passes(self, seconds: float) -> None:
        """Timers fire on the way, a little late."""
        until_s = self.now + seconds
        for _ in range(1000):
            wakeup_s = self.engine.next_wakeup()
            if wakeup_s is None or wakeup_s + 1e-6 > until_s:
                break
            self.now = max(self.now, wakeup_s) + 1e-6
            self.apply(self.engine.woke(self.now))
        else:
            raise AssertionError("more than a thousand timers in a moment")
        self.now = max(self.now, until_s)

    @rule()
    def nothing_was_missed(self) -> None:
        """Whatever could be dispatched has been: waking without a reason adds nothing."""
        assert dispatched(self.engine.woke(self.now)) == []

    # --- what always holds ---

    @invariant()
    def every_request_is_in_one_state(self) -> None:
        engine = self.engine
        resting = sum(request.progress.rests for request in self.queued.values())
        assert engine.queued == len(engine.policy) + resting == len(self.queued)
        assert all(engine.requests.waiting.get(request_id) is request for request_id, request in self.queued.items())
        assert {(lease.request.id, lease.backend) for lease in engine.requests.leases.values()} == {
            (request_id, backend) for request_id, (_, backend) in self.dispatched.items()
        }
        assert len(self.queued) + len(self.dispatched) + len(self.ended) == self.serial

    @invariant()
    def interactions_know_their_calls(self) -> None:
        requests = [*self.queued.values(), *(request for request, _ in self.dispatched.values())]
        known = {request.progress.interaction for request in (*requests, *self.ended.values())} - {None}
        assert len(self.engine.interactions) <= len(known)
        for interaction in known:
            assert interaction is not None
            assert interaction.under_way == sum(request.progress.interaction is interaction for request in requests)
        for request in requests:
            assert (request.progress.interaction is None) == (request.claim == NO_CLAIM)

    @invariant()
    def every_request_can_be_explained(self) -> None:
        for request_id in [*self.queued, *self.dispatched]:
            explanation = self.engine.explain(request_id, self.now)
            assert explanation is not None
            assert explanation.state == ("queued" if request_id in self.queued else "dispatched")

    @invariant()
    def queue_bounds_hold(self) -> None:
        assert len(self.fresh()) <= LIMITS.queue_requests_max
        assert sum(request.body_bytes for request in self.fresh()) <= LIMITS.queue_bytes_max
        assert self.engine.queued_bytes == sum(request.body_bytes for request in self.queued.values())

    @invariant()
    def ledgers_are_the_sums_of_their_leases(self) -> None:
        for name, ledger in self.engine.backends.items():
            leases = [lease for lease in self.engine.requests.leases.values() if lease.backend == name]
            assert sorted(ledger.leases) == sorted(lease.request.id for lease in leases)
            starting = [lease for lease in leases if lease.started_s is None]
            assert sorted(ledger.starting) == sorted(lease.request.id for lease in starting)
            assert ledger.sequences == sum(lease.request.sequences for lease in leases)
            assert ledger.kv.held_tokens == sum(lease.held_tokens for lease in leases)
            assert ledger.starting_tokens == sum(lease.request.prompt_tokens for lease in starting)

    @invariant()
    def shares_are_the_sums_of_their_leases(self) -> None:
        tree = self.engine.requests.tree
        leases = list(self.engine.requests.leases.values())
        requests = [*self.queued.values(), *(lease.request for lease in leases)]
        running = sum(lease.request.sequences for lease in leases)
        assert tree.pool.used[SEQUENCES] == running
        busy = {request.flow.tenant for request in requests}
        weights = sum(WEIGHTS[tenant] for tenant in busy)
        assert (tree.pool.others.present, tree.pool.others.weights) == (len(busy), pytest.approx(weights))
        for request in requests:
            tenant, weight = request.flow.tenant, request.weight
            queued = sum(other.sequences for other in self.queued.values() if other.flow.tenant == tenant)
            assert tree.is_flooding(request) == (queued * weights > running * weight + 1e-9)

    @invariant()
    def counters_are_service_and_lifts(self) -> None:
        """What a counter has beyond the service of its tenant are lifts, and a lift only raises."""
        if not isinstance(self.engine.policy.order, CounterOrder):
            return
        backlog = self.engine.policy.order.backlog
        assert backlog is not None
        for tenant, weight in WEIGHTS.items():
            member = backlog.tenant(tenant)
            if member is None:
                self.lifts.pop(tenant, None)
                continue
            running = [
                request.progress.charged for request, _ in self.dispatched.values() if request.flow.tenant == tenant
            ]
            service = self.settled[tenant] + sum(running) / weight
            known, before, lifted = self.lifts.get(tenant, (None, 0.0, 0.0))
            if known is not member:
                before = self.settled[tenant] if known is not None or member.counter < service else 0.0
                lifted = member.counter - service + before
            lift = member.counter - (service - before)
            assert lift >= lifted - 1e-6, "a counter holds less than what its tenant received"
            self.lifts[tenant] = (member, before, lift)

    @invariant()
    def something_will_happen_while_anybody_waits(self) -> None:
        wakeup_s = self.engine.next_wakeup()
        assert (wakeup_s is None) == (not self.queued)
        if wakeup_s is not None:
            assert wakeup_s <= min(request.progress.deadline_s for request in self.queued.values())

    def teardown(self) -> None:
        if not hasattr(self, "engine"):
            return
        for request_id in sorted(self.dispatched):
            self.apply(self.engine.progressed(request_id, 1, self.now))
        for _ in range(3000):
            wakeup_s = self.engine.next_wakeup()
            if wakeup_s is None:
                break
            self.now = max(self.now, wakeup_s) + 1e-6
            self.apply(self.engine.woke(self.now))
        assert not self.queued, "waking at the named times neither served nor expired everything"
        for request_id in sorted(self.dispatched):
            self.apply(self.engine.finished(request_id, ServiceTokens(1, 1), self.now))
            self.end(request_id, ServiceTokens(1, 1))
        self.ledgers_are_the_sums_of_their_leases()
        self.shares_are_the_sums_of_their_leases()
        assert self.engine.dispatched == 0


TestAdmission = Admission.TestCase


TestAdmission.settings = settings(max_examples=60, stateful_step_count=40)
