"""Another configuration while requests wait and run: what changes, what stays, and that nothing is lost."""

from __future__ import annotations

import random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from policies.admission.decisions import Decision, Dispatch, Failure, Reject
from policies.admission.engine import AdmissionEngine
from policies.admission.named import named_policy
from policies.admission.policy import Policy
from policies.admission.takeover import Setup, remove_backend, take_over
from policies.capacity.gauges import CapacitySettings
from policies.capacity.overload import OverloadSettings
from policies.limits.quotas import Quota, Quotas
from policies.orders.policy_entries import POLICIES
from policies.queue.bounds import QueueLimits
from policies.request import Refusal, ServiceTokens
from tests.policies.making import make_request
from tests.policies.meetings.world import tree

ENGINES = ("one", "two")
WEIGHTS = {"a": 1.0, "b": 2.0, "c": 0.5}
NAMES = sorted(POLICIES)
BY_MATCH = ("dlpm", "d2lpm")
"""Inside a round their place is by what is cached, which is looked up anew."""
STRICT: dict[str, dict[str, Any]] = {
    name: {"window_tokens": 0.0, "cached_weight": 0.5} for name in ("vtc", "wsc", "fairserve")
}
"""So that what is cached changes no order."""
SMALL: dict[str, dict[str, Any]] = {
    "rr": {"quantum": 30.0},
    "dlpm": {"quantum": 30.0},
}


def policy_of(name: str) -> Policy:
    return named_policy(name, **SMALL.get(name, {}))


def setup_with(policy: Policy | None = None, **fields: Any) -> Setup:
    slots: dict[str, int | None] = dict.fromkeys(ENGINES, 2)
    return Setup(QueueLimits(), CapacitySettings(), OverloadSettings(), fields.pop("slots", slots), policy, **fields)


def engine_with(policy: Policy) -> AdmissionEngine:
    engine = AdmissionEngine(policy)
    for name in ENGINES:
        engine.add_backend(name, max_num_seqs=2)
    return engine


class Run:
    """Random events for one admission engine, the same for each of one seed."""

    def __init__(self, engine: AdmissionEngine, seed: int, *, refusals: bool = True) -> None:
        """`refusals`: engines send some requests back."""
        self.refusals = refusals
        self.engine = engine
        self.random = random.Random(seed)
        self.now = 0.0
        self.running: dict[str, str] = {}
        self.log: list[Decision] = []
        self.arrived = 0
        self.ended: list[str] = []

    def receive(self, decisions: Any) -> None:
        for decision in decisions:
            self.log.append(decision)
            if isinstance(decision, Dispatch):
                assert decision.id not in self.running
                self.running[decision.id] = decision.backend
            elif isinstance(decision, Reject):
                self.ended.append(decision.id)

    def step(self) -> None:
        engine, chance = self.engine, self.random
        self.now += chance.uniform(0.0, 0.05)
        choice = chance.random()
        if choice < 0.45 or not self.running:
            tenant, user, prefix = chance.choice("abc"), chance.choice(("x", "y")), chance.randrange(4)
            prompt = chance.randrange(1, 40)
            request = make_request(
                tenant, id=f"r{self.arrived}", user=user, weight=WEIGHTS[tenant], prompt=prompt, arrived_s=self.now,
                prefix=(prefix, 10 + prefix, 20 + prefix),
            )  # fmt: skip
            self.arrived += 1
            self.receive(engine.arrived(request, self.now))
            return
        request_id = chance.choice(sorted(self.running))
        if choice < 0.7:
            self.receive(engine.progressed(request_id, chance.randrange(1, 9), self.now))
            return
        del self.running[request_id]
        if choice < 0.78 and self.refusals:
            self.receive(engine.failed(request_id, Failure.REFUSED, self.now))
        else:
            self.ended.append(request_id)
            service = ServiceTokens(chance.randrange(1, 40), chance.randrange(30))
            self.receive(engine.finished(request_id, service, self.now))

    def finish(self) -> None:
        """Serve all that is left."""
        for _ in range(10_000):
            if not self.running and not self.engine.queued:
                return
            self.now += 0.2
            self.receive(self.engine.woke(self.now))
            for request_id in sorted(self.running):
                del self.running[request_id]
                self.ended.append(request_id)
                self.receive(self.engine.finished(request_id, ServiceTokens(5, 5), self.now))
        raise AssertionError(f"{self.engine!r} never empties")


@pytest.mark.parametrize("name", [name for name in NAMES if name not in BY_MATCH])
@given(seed=st.integers(0, 10**6), at=st.lists(st.integers(0, 80), min_size=1, max_size=4))
@settings(max_examples=20)
def test_a_policy_in_place_of_one_that_is_alike_decides_the_same(name: str, seed: int, at: list[int]) -> None:
    own: dict[str, Any] = {**SMALL.get(name, {}), **STRICT.get(name, {})}
    if name in ("wsc", "fairserve"):
        own["window_calls"] = 0.0
    # Several that were sent back go in the order of their arrival afterwards, not of their return.
    runs = [Run(engine_with(named_policy(name, **own)), seed, refusals=False) for _ in range(2)]
    for step in range(80):
        if step in at:
            engine = runs[0].engine
            fresh = named_policy(name, prefixes=engine.policy.prefixes, **own)
            runs[0].receive(take_over(engine, setup_with(fresh), runs[0].now))
            runs[1].engine.catch_up(runs[1].now)
            runs[1].engine.room.changed()  # all engines are asked again
            runs[1].receive(runs[1].engine.woke(runs[1].now))
        for run in runs:
            run.step()
    assert runs[0].log == runs[1].log
    left, right = (run.engine.policy.order.backlog for run in runs)
    if left is not None and right is not None:
        for tenant in WEIGHTS:
            mine, theirs = left.tenant(tenant), right.tenant(tenant)
            assert (mine is None) == (theirs is None)
            if mine is not None and theirs is not None:
                assert mine.counter == theirs.counter


@given(
    names=st.lists(st.sampled_from(NAMES), min_size=2, max_size=6),
    seed=st.integers(0, 10**6),
    every=st.integers(5, 30),
)
@settings(max_examples=60)
def test_from_any_policy_to_any_other_nothing_is_lost(names: list[str], seed: int, every: int) -> None:
    run = Run(engine_with(policy_of(names[0])), seed)
    for name in names[1:]:
        for _ in range(every):
            run.step()
        waiting, running = run.engine.queued, run.engine.dispatched
        run.receive(take_over(run.engine, setup_with(policy_of(name)), run.now))
        assert run.engine.queued + run.engine.dispatched == waiting + running
        assert len(run.engine.policy) == run.engine.queued
    run.finish()
    assert sorted(run.ended) == sorted(f"r{n}" for n in range(run.arrived))
    assert run.engine.queued == run.engine.dispatched == 0
    for order in run.engine.policy.queues().values():
        for tenant in WEIGHTS:
            member = order.backlog.tenant(tenant) if order.backlog is not None else None
            assert member is None or member.queued == member.running == 0


def served(engine: AdmissionEngine, now: float, requests: int) -> dict[str, int]:
    """One at a time, each of equal service: how many of each tenant."""
    counts: dict[str, int] = {}
    running = [lease.request for lease in engine.requests.leases.values()]
    for _ in range(requests):
        now += 0.2
        request = running.pop(0)
        counts[request.flow.tenant] = counts.get(request.flow.tenant, 0) + 1
        decisions = engine.finished(request.id, ServiceTokens(10, 10), now)
        running += [engine.requests.leases[one.id].request for one in decisions if isinstance(one, Dispatch)]
    return counts


@pytest.mark.parametrize("name", ["vtc", "fairserve", "wsc", "rr", "dlpm"])
def test_a_new_weight_holds_for_what_waits(name: str) -> None:
    engine = AdmissionEngine(policy_of(name))
    engine.add_backend("one", max_num_seqs=1)
    for n in range(400):
        engine.arrived(make_request("ab"[n % 2], prompt=10), 0.0)
    before = served(engine, 1.0, 80)
    assert before["a"] == pytest.approx(before["b"], abs=6)
    take_over(engine, setup_with(slots={"one": 1}, weights={"b": (1.0, 3.0)}), 17.0)
    after = served(engine, 20.0, 160)
    assert after["b"] / after["a"] == pytest.approx(3.0, rel=0.15)


def test_a_new_weight_wakes_who_goes_next_by_it() -> None:
    terms = tree({"g": ("", {"max_running": 5})}, {name: ("g", {}) for name in "abc"})
    engine = AdmissionEngine(policy_of("vtc"), tree=terms)
    engine.add_backend("one", max_num_seqs=16)
    first = [make_request(name) for name in "bac"]
    for request in first:
        engine.arrived(request, 0.0)
    for request, output in zip(first, (200, 50), strict=False):
        engine.finished(request.id, ServiceTokens(10, output), 0.1)
    filler, wide, narrow = make_request("c", sequences=4), make_request("a", sequences=5), make_request("b")
    for request in (filler, wide, narrow):
        engine.arrived(request, 0.2)
    assert engine.finished(filler.id, ServiceTokens(10, 0), 0.3) == [], "a is next, and too wide"
    decisions = take_over(engine, setup_with(slots={"one": 16}, weights={"b": (1.0, 1000.0)}), 0.4)
    assert [one.id for one in decisions] == [narrow.id]


def test_a_request_that_its_engine_returns_goes_by_the_new_weight() -> None:
    engine = engine_with(policy_of("vtc"))
    request = make_request("a", weight=1.0)
    engine.arrived(request, 0.0)
    take_over(engine, setup_with(weights={"a": (1.0, 4.0)}), 0.0)
    assert request.weight == 1.0, "what runs is charged by the weight that it was dispatched with"
    engine.backend_changed("one", False, 0.1)
    engine.backend_changed("two", False, 0.1)
    engine.failed(request.id, Failure.REFUSED, 0.2)
    assert request.weight == 4.0
    backlog = engine.policy.order.backlog
    assert backlog is not None
    tenant = backlog.tenant("a")
    assert tenant is not None
    assert (tenant.counter, tenant.weight) == (0.0, 4.0)


def leads(engine: AdmissionEngine) -> tuple[float, float]:
    """How far a is ahead of b, which waits: per weight, and in service."""
    backlog = engine.policy.order.backlog
    assert backlog is not None
    ahead, next_one = backlog.tenant("a"), backlog.tenant("b")
    assert ahead is not None
    assert next_one is not None
    lead = ahead.counter - next_one.counter
    return lead, lead * ahead.weight


def behind_a_light_tenant(*, groups: bool = False) -> AdmissionEngine:
    """b waits, and a, of weight 0.01, was given one request of 1,000 tokens just before."""
    terms = tree({"g": ("", {"weight": 0.01})}, {"a": ("g", {})}) if groups else None
    engine = AdmissionEngine(policy_of("vtc"), tree=terms)
    engine.add_backend("one", max_num_seqs=1)
    engine.arrived(make_request("b", prompt=10), 0.0)
    for tenant in ("a", "b"):
        engine.arrived(make_request(tenant, prompt=1000, weight=1.0 if groups or tenant == "b" else 0.01), 0.1)
    engine.finished(next(iter(engine.requests.leases)), ServiceTokens(10, 0), 0.2)
    for tenant in ("a", "b"):
        engine.arrived(make_request(tenant, prompt=1000, weight=1.0 if groups or tenant == "b" else 0.01), 0.3)
    return engine


def test_a_lead_is_the_same_service_under_another_weight() -> None:
    engine = behind_a_light_tenant()
    if leads(engine)[0] < 50_000:  # b's first thousand tokens went before
        engine.finished(next(iter(engine.requests.leases)), ServiceTokens(1000, 0), 0.4)
    before = leads(engine)
    assert before[0] > 50_000
    take_over(engine, setup_with(slots={"one": 1}, weights={"a": (0.01, 1.0)}), 0.5)
    assert leads(engine) == pytest.approx((before[1], before[1]))


def test_a_lead_is_the_same_service_in_another_group() -> None:
    engine = behind_a_light_tenant(groups=True)
    if leads(engine)[0] < 50_000:
        engine.finished(next(iter(engine.requests.leases)), ServiceTokens(1000, 0), 0.4)
    before = leads(engine)
    assert before[0] > 50_000
    take_over(engine, setup_with(slots={"one": 1}, tree=tree({}, {})), 0.5)
    assert leads(engine) == pytest.approx((before[1], before[1]))


def test_all_that_sleep_at_a_node_wake_when_a_reload_removes_it() -> None:
    terms = tree({"g": ("", {"max_running": 1})}, {name: ("g", {}) for name in "abc"})
    engine = AdmissionEngine(policy_of("vtc"), tree=terms)
    engine.add_backend("one", max_num_seqs=1)
    for name in "aabbcc":
        engine.arrived(make_request(name), 0.0)
    backlog = engine.policy.order.backlog
    assert backlog is not None
    assert len(backlog.full[" g"]) == 3
    take_over(engine, setup_with(slots={"one": 1}, tree=tree({}, {})), 0.1)
    assert backlog.full == {}


def test_a_weight_inside_a_group_converts_what_it_changes_of_the_pool_and_no_more() -> None:
    engine = behind_a_light_tenant(groups=True)
    if leads(engine)[0] < 50_000:
        engine.finished(next(iter(engine.requests.leases)), ServiceTokens(1000, 0), 0.4)
    before, request = leads(engine), make_request("a")
    engine.arrived(request, 0.4)
    take_over(engine, setup_with(slots={"one": 1}, weights={"a": (1.0, 5.0)}), 0.4)
    assert leads(engine) == pytest.approx(before), "alone in its group, it has all of that as before"
    assert request.weight == pytest.approx(before[1] / before[0]), "of the pool, not inside its group"
    engine.arrived(make_request("c"), 0.5)  # in no group
    take_over(engine, setup_with(slots={"one": 1}, tree=tree({"g": ("", {"weight": 0.01})}, {"c": ("g", {})})), 0.5)
    before = leads(engine)
    take_over(engine, setup_with(slots={"one": 1}, weights={"a": (5.0, 0.5)}), 0.5)
    assert leads(engine) == pytest.approx((before[0] * 10.0, before[1]), rel=1e-6)


def test_a_request_of_a_key_with_a_weight_of_its_own_keeps_it() -> None:
    engine = engine_with(policy_of("vtc"))
    for _ in range(4):
        engine.arrived(make_request("a"), 0.0)
    own, usual = make_request("a", weight=5.0), make_request("a", weight=1.0)
    for request in (own, usual):
        engine.arrived(request, 0.0)
    take_over(engine, setup_with(weights={"a": (1.0, 2.0)}), 0.0)
    assert (own.weight, usual.weight) == (5.0, 2.0)
    take_over(engine, setup_with(tree=tree({"g": ("", {})}, {})), 0.1)
    take_over(engine, setup_with(tree=tree({}, {})), 0.2)
    assert (own.weight, usual.weight) == (5.0, 2.0), "a reload of groups counts everybody anew"


def test_a_request_of_such_a_key_that_its_engine_returns_keeps_its_weight() -> None:
    engine, own = engine_with(policy_of("vtc")), make_request("a", weight=5.0)
    engine.arrived(own, 0.0)
    engine.arrived(make_request("a", weight=1.0), 0.0)
    engine.backend_changed("one", False, 0.1)
    engine.backend_changed("two", False, 0.1)
    engine.failed(own.id, Failure.REFUSED, 0.2)
    assert own.weight == 5.0


def test_other_settings_of_the_same_cost_keep_the_counters_and_another_cost_does_not() -> None:
    for more, keeps in (({"window_tokens": 5.0}, True), ({"output_weight": 7.0}, False)):
        engine = engine_with(named_policy("fairserve"))
        engine.arrived(make_request("a", id="x", prompt=30), 0.0)
        engine.finished("x", ServiceTokens(30, 10), 0.5)
        take_over(engine, setup_with(named_policy("fairserve", **more)), 1.0)
        backlog = engine.policy.order.backlog
        assert backlog is not None
        tenant = backlog.tenant("a")
        assert (tenant is not None and tenant.counter == 50.0) is keeps


def test_a_limit_that_is_new_counts_what_waits_and_runs() -> None:
    engine = engine_with(policy_of("fcfs"))
    requests = [make_request("a") for _ in range(6)]
    for request in requests:
        engine.arrived(request, 0.0)
    quotas = Quotas(Quota(concurrent=6))
    take_over(engine, setup_with(quotas=quotas), 0.1)
    assert quotas.under_way == {"a": 6}
    (refused,) = engine.arrived(make_request("a"), 0.2)
    assert isinstance(refused, Reject)
    assert refused.reason is Refusal.RATE_LIMITED
    quotas.set(Quotas(Quota(concurrent=7)))
    take_over(engine, setup_with(quotas=quotas), 0.3)
    assert quotas.under_way == {"a": 6}, "counted once"
    assert not any(isinstance(one, Reject) for one in engine.arrived(make_request("a"), 0.4))
    for lease in list(engine.requests.leases.values()):
        engine.finished(lease.request.id, ServiceTokens(1, 1), 0.5)


def test_what_waits_is_not_judged_again_and_new_bounds_hold_for_what_comes() -> None:
    engine = engine_with(policy_of("vtc"))
    for _ in range(10):
        engine.arrived(make_request("a"), 0.0)
    waiting = engine.queued
    decisions = take_over(
        engine,
        Setup(QueueLimits(queue_requests_max=1), CapacitySettings(), OverloadSettings(), dict.fromkeys(ENGINES, 2)),
        0.1,
    )
    assert not any(isinstance(one, Reject) for one in decisions)
    assert engine.queued == waiting
    assert any(isinstance(one, Reject) for one in engine.arrived(make_request("a"), 0.2))


def test_more_slots_are_used_at_once_and_fewer_are_kept_to() -> None:
    engine = engine_with(policy_of("vtc"))
    for _ in range(30):
        engine.arrived(make_request("a"), 0.0)
    few = engine.dispatched
    more: dict[str, int | None] = dict.fromkeys(ENGINES, 8)
    decisions = take_over(engine, setup_with(slots=more), 0.1)
    assert engine.dispatched == few + len(decisions) > few
    take_over(engine, setup_with(slots=dict.fromkeys(ENGINES, 1)), 0.2)
    assert engine.dispatched == few + len(decisions), "what runs goes on"


@pytest.mark.parametrize("name", NAMES)
def test_a_backend_that_is_removed_gets_nothing_and_what_waits_goes_elsewhere(name: str) -> None:
    run = Run(engine_with(policy_of(name)), 7)
    for _ in range(60):
        run.step()
    engine = run.engine
    run.receive(engine.backend_changed("one", False, run.now))
    seen = len(run.log)
    while engine.backends["one"].leases:
        request_id = next(iter(engine.backends["one"].leases))
        del run.running[request_id]
        run.ended.append(request_id)
        run.receive(engine.finished(request_id, ServiceTokens(5, 5), run.now))
    run.receive(remove_backend(engine, "one", run.now))
    engine.add_backend("three", max_num_seqs=2)
    run.finish()
    later = [one.backend for one in run.log[seen:] if isinstance(one, Dispatch)]
    assert "one" not in later
    assert "two" in later
    assert sorted(run.ended) == sorted(f"r{n}" for n in range(run.arrived))


def test_a_tenant_with_nothing_queued_or_running_keeps_its_weight() -> None:
    engine = engine_with(policy_of("vtc"))
    request = make_request("b", weight=2.0)
    engine.arrived(request, 0.0)
    engine.finished(request.id, ServiceTokens(10, 5), 1.0)
    take_over(engine, setup_with(policy_of("vtc")), 2.0)
    assert engine.policy.explain(request.flow, 2.0)["weight"] == 2.0
