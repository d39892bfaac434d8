"""Another configuration while requests wait and run: what changes, what stays, and that nothing is lost."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from policies.admission.decisions import Failure
from policies.admission.engine import AdmissionEngine
from policies.admission.named import named_policy
from policies.admission.policy import Policy
from policies.admission.takeover import PoolSettings, remove_backend, take_over
from policies.capacity.gauges import CapacitySettings
from policies.capacity.overload import OverloadSettings
from policies.limits.quotas import Quota, Quotas
from policies.orders.policy_entries import POLICIES
from policies.queue.bounds import QueueLimits
from policies.request import RejectReason, ServiceTokens
from tests.policies.admission.world import MANY, SETTINGS, World
from tests.policies.making import make_request, policy_with, pool_of, rejected
from tests.policies.meetings.world import tree

NAMES = sorted(POLICIES)
BY_MATCH = ("dlpm", "d2lpm")
"""Inside a round their place is by what is cached, which is looked up anew."""
STRICT = {"window_tokens": 0.0, "window_calls": 0.0, "cached_weight": 0.5, "quantum": 30.0}
"""So that what is cached changes no order."""
SMALL = {"quantum": 30.0}


def setup_with(policy: Policy | None = None, **fields: Any) -> PoolSettings:
    limits, slots = fields.pop("limits", QueueLimits()), fields.pop("slots", {"one": 2, "two": 2})
    return PoolSettings(limits, CapacitySettings(), OverloadSettings(), slots, policy, **fields)


def engine_with(name: str = "vtc", **settings: Any) -> AdmissionEngine:
    return pool_of("one", "two", policy=policy_with(name, **SMALL | settings))


def of_world(world: World, policy: Policy) -> PoolSettings:
    """The configuration of the pool of a world, but for its policy."""
    [pool] = world.pools
    return PoolSettings(world.limits, pool.capacity, pool.overload.settings, world.slots, policy)


@pytest.mark.parametrize("name", [name for name in NAMES if name not in BY_MATCH])
@given(seed=st.integers(0, 10**6), at=st.lists(st.integers(0, 90), min_size=1, max_size=4))
@settings(max_examples=10)
def test_a_policy_in_place_of_one_that_is_alike_decides_the_same(name: str, seed: int, at: list[int]) -> None:
    # Several that were sent back go in the order of their arrival afterwards, not of their return.
    replaced, kept = (World(name, seed, tenants=2, limits=MANY, returns=False, **STRICT) for _ in range(2))
    for step in range(100):
        if step in at:
            [pool] = replaced.pools
            fresh = policy_with(name, prefixes=pool.policy.prefixes, **SETTINGS | STRICT)
            replaced.carry(pool, take_over(pool, of_world(replaced, fresh), replaced.now))
            [pool] = kept.pools
            pool.catch_up(kept.now)
            pool.room.changed()  # all engines are asked again
            kept.carry(pool, pool.woke(kept.now))
        for world in (replaced, kept):
            world.event()
    assert replaced.log == kept.log
    left, right = (world.pools[0].policy.order.backlog for world in (replaced, kept))
    if left is not None and right is not None:
        counters = [
            {name: member.counter for name in kept.tenants if (member := one.tenant(name))} for one in (left, right)
        ]
        assert counters[0] == counters[1]


@given(
    names=st.lists(st.sampled_from(NAMES), min_size=2, max_size=6),
    seed=st.integers(0, 10**6),
    every=st.integers(5, 30),
)
@settings(max_examples=40)
def test_from_any_policy_to_any_other_nothing_is_lost(names: list[str], seed: int, every: int) -> None:
    world = World(names[0], seed)
    [pool] = world.pools
    for name in names[1:]:
        for _ in range(every):
            world.event()
        present = pool.queued + pool.dispatched
        world.carry(pool, take_over(pool, of_world(world, policy_with(name, **SETTINGS | SMALL)), world.now))
        assert pool.queued + pool.dispatched == present
        world.books_are_the_sums_of_their_requests(pool)
    world.drain()
    for order in pool.policy.queues().values():
        members = [order.backlog.tenant(name) for name in world.tenants] if order.backlog is not None else []
        assert not any(member.queued or member.running for member in members if member is not None)


@pytest.mark.parametrize("name", NAMES)
def test_a_backend_that_is_removed_gets_nothing_and_what_waits_goes_elsewhere(name: str) -> None:
    world = World(name, 7)
    [pool] = world.pools
    for _ in range(120):
        world.event()
    world.carry(pool, pool.backend_changed("e1", False, world.now))
    for id in list(pool.backends["e1"].leases):
        world.goes_on(id, 0.6)
    world.carry(pool, remove_backend(pool, "e1", world.now))
    pool.add_backend("three", max_num_seqs=2)
    world.drain()


def served(engine: AdmissionEngine, now: float, requests: int) -> Counter[str]:
    """One at a time, each of equal service: how many of each tenant."""
    counts = Counter[str]()
    for number in range(requests):
        request = next(iter(engine.requests.leases.values())).request
        counts[request.flow.tenant] += 1
        engine.finished(request.id, ServiceTokens(10, 10), now + 0.2 * number)
    return counts


@pytest.mark.parametrize("name", ["vtc", "fairserve", "wsc", "rr", "dlpm"])
def test_a_new_weight_holds_for_what_waits(name: str) -> None:
    engine = pool_of("one", policy=policy_with(name, **SMALL), slots=1)
    for n in range(400):
        engine.arrived(make_request("ab"[n % 2], prompt=10), 0.0)
    before = served(engine, 1.0, 80)
    assert before["a"] == pytest.approx(before["b"], abs=6)
    take_over(engine, setup_with(slots={"one": 1}, weights={"b": (1.0, 3.0)}), 17.0)
    after = served(engine, 20.0, 160)
    assert after["b"] / after["a"] == pytest.approx(3.0, rel=0.15)


def test_a_new_weight_wakes_who_goes_next_by_it() -> None:
    terms = tree({"g": ("", {"max_running": 5})}, {name: ("g", {}) for name in "abc"})
    engine = pool_of("one", policy=policy_with("vtc"), slots=16, tree=terms)
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


def test_a_request_that_its_engine_returns_goes_by_the_new_weight_but_for_a_key_with_one_of_its_own() -> None:
    engine = engine_with()
    request, own = make_request("a", weight=1.0), make_request("a", weight=5.0)
    engine.arrived(request, 0.0)
    engine.arrived(own, 0.0)
    take_over(engine, setup_with(weights={"a": (1.0, 4.0)}), 0.0)
    assert request.weight == 1.0, "what runs is charged by the weight that it was dispatched with"
    engine.backend_changed("one", False, 0.1)
    engine.backend_changed("two", False, 0.1)
    engine.failed(request.id, Failure.REFUSED, 0.2)
    assert request.weight == 4.0
    backlog = engine.policy.order.backlog
    assert backlog.tenant("a").weight == 4.0
    engine.failed(own.id, Failure.REFUSED, 0.2)
    assert own.weight == 5.0
    assert backlog.tenant("a").counter == 0.0


def leads(engine: AdmissionEngine) -> tuple[float, float]:
    """How far a is ahead of b, which waits: per weight, and in service."""
    backlog = engine.policy.order.backlog
    ahead, next_one = backlog.tenant("a"), backlog.tenant("b")
    lead = ahead.counter - next_one.counter
    return lead, lead * ahead.weight


def behind_a_light_tenant(*, groups: bool = False) -> AdmissionEngine:
    """b waits, and a, of weight 0.01, was given one request of 1,000 tokens just before."""
    terms = tree({"g": ("", {"weight": 0.01})}, {"a": ("g", {})}) if groups else None
    engine = pool_of("one", policy=policy_with("vtc"), slots=1, tree=terms)
    engine.arrived(make_request("b", prompt=10), 0.0)
    for now in (0.1, 0.3):
        for tenant in "ab":
            engine.arrived(make_request(tenant, prompt=1000, weight=1.0 if groups or tenant == "b" else 0.01), now)
        if now == 0.1:
            engine.finished(next(iter(engine.requests.leases)), ServiceTokens(10, 0), 0.2)
    if leads(engine)[0] < 50_000:  # b's first thousand tokens went before
        engine.finished(next(iter(engine.requests.leases)), ServiceTokens(1000, 0), 0.4)
    assert leads(engine)[0] > 50_000
    return engine


@pytest.mark.parametrize("groups", [False, True], ids=["under another weight", "in another group"])
def test_a_lead_is_the_same_service(groups: bool) -> None:
    engine = behind_a_light_tenant(groups=groups)
    _, service = leads(engine)
    if groups:
        take_over(engine, setup_with(slots={"one": 1}, tree=tree({}, {})), 0.5)
    else:
        take_over(engine, setup_with(slots={"one": 1}, weights={"a": (0.01, 1.0)}), 0.5)
    assert leads(engine) == pytest.approx((service, service))


def test_a_weight_inside_a_group_converts_what_it_changes_of_the_pool_and_no_more() -> None:
    engine = behind_a_light_tenant(groups=True)
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


def test_all_that_sleep_at_a_node_wake_when_a_reload_removes_it() -> None:
    terms = tree({"g": ("", {"max_running": 1})}, {name: ("g", {}) for name in "abc"})
    engine = pool_of("one", policy=policy_with("vtc"), slots=1, tree=terms)
    for name in "aabbcc":
        engine.arrived(make_request(name), 0.0)
    backlog = engine.policy.order.backlog
    assert len(backlog.full[" g"]) == 3
    take_over(engine, setup_with(slots={"one": 1}, tree=tree({}, {})), 0.1)
    assert backlog.full == {}
    assert engine.requests.tree.share("a", 1.0) == pytest.approx(1 / 3), "those that wait are present in the new tree"


def test_a_request_of_a_key_with_a_weight_of_its_own_keeps_it() -> None:
    engine, own, usual = engine_with(), make_request("a", weight=5.0), make_request("a", weight=1.0)
    for request in (*[make_request("a") for _ in range(4)], own, usual):
        engine.arrived(request, 0.0)
    take_over(engine, setup_with(weights={"a": (1.0, 2.0)}), 0.0)
    assert (own.weight, usual.weight) == (5.0, 2.0)
    take_over(engine, setup_with(tree=tree({"g": ("", {})}, {})), 0.1)
    take_over(engine, setup_with(tree=tree({}, {})), 0.2)
    assert (own.weight, usual.weight) == (5.0, 2.0), "a reload of groups counts everybody anew"


def test_other_settings_of_the_same_cost_keep_the_counters_and_another_cost_does_not() -> None:
    for more, keeps in (({"window_tokens": 5.0}, True), ({"output_weight": 7.0}, False)):
        engine = engine_with("fairserve")
        engine.arrived(make_request("a", id="x", prompt=30), 0.0)
        engine.finished("x", ServiceTokens(30, 10), 0.5)
        take_over(engine, setup_with(named_policy("fairserve", **more)), 1.0)
        tenant = engine.policy.order.backlog.tenant("a")
        assert (tenant is not None and tenant.counter == 50.0) is keeps


def test_a_limit_that_is_new_counts_what_waits_and_runs() -> None:
    engine = engine_with("fcfs")
    requests = [make_request("a") for _ in range(6)]
    for request in requests:
        engine.arrived(request, 0.0)
    quotas = Quotas(Quota(concurrent=6))
    take_over(engine, setup_with(quotas=quotas), 0.1)
    assert quotas.under_way == {"a": 6}
    assert rejected(engine.arrived(make_request("a", id="x"), 0.2)) == [("x", RejectReason.RATE_LIMITED)]
    quotas.set(Quotas(Quota(concurrent=7)))
    take_over(engine, setup_with(quotas=quotas), 0.3)
    assert quotas.under_way == {"a": 6}, "counted once"
    assert not rejected(engine.arrived(make_request("a"), 0.4))


def test_what_waits_is_not_judged_again_and_new_bounds_hold_for_what_comes() -> None:
    engine = engine_with()
    for _ in range(10):
        engine.arrived(make_request("a"), 0.0)
    waiting = engine.queued
    assert not rejected(take_over(engine, setup_with(limits=QueueLimits(queue_requests_max=1)), 0.1))
    assert engine.queued == waiting
    assert rejected(engine.arrived(make_request("a"), 0.2))


def test_more_slots_are_used_at_once_and_fewer_are_kept_to() -> None:
    engine = engine_with()
    for _ in range(30):
        engine.arrived(make_request("a"), 0.0)
    few = engine.dispatched
    decisions = take_over(engine, setup_with(slots={"one": 8, "two": 8}), 0.1)
    assert engine.dispatched == few + len(decisions) > few
    take_over(engine, setup_with(slots={"one": 1, "two": 1}), 0.2)
    assert engine.dispatched == few + len(decisions), "what runs goes on"


def test_a_tenant_with_nothing_queued_or_running_keeps_its_weight() -> None:
    engine = engine_with()
    request = make_request("b", weight=2.0)
    engine.arrived(request, 0.0)
    engine.finished(request.id, ServiceTokens(10, 5), 1.0)
    take_over(engine, setup_with(policy_with("vtc")), 2.0)
    assert engine.policy.explain(request.flow, 2.0)["weight"] == 2.0
