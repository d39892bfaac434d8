"""Another configuration while requests wait and run: what changes, what stays, and that nothing is lost."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from policies.admission.decisions import Dispatch, Failure, Reject
from policies.admission.engine import AdmissionEngine
from policies.admission.named import named_policy
from policies.admission.policy import Policy
from policies.admission.takeover import Setup, remove_backend, reweigh, take_over
from policies.capacity.gauges import CapacitySettings
from policies.capacity.overload import OverloadSettings
from policies.limits.quotas import Quota, Quotas
from policies.orders.policy_entries import POLICIES
from policies.queue.bounds import QueueLimits
from policies.request import Refusal, ServiceTokens
from tests.policies.admission.world import LIMITS, World
from tests.policies.making import make_request

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
    "rpm": {"requests_per_minute": 40},
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


SLOTS: dict[str, int | None] = {"e0": None, "e1": 4, "e2": 8}
"""Of the engines of a world."""


@pytest.mark.parametrize("name", [name for name in NAMES if name not in BY_MATCH])
@given(seed=st.integers(0, 10**6), at=st.lists(st.integers(0, 150), min_size=1, max_size=4))
@settings(max_examples=10)
def test_a_policy_in_place_of_one_that_is_alike_decides_the_same(name: str, seed: int, at: list[int]) -> None:
    own: dict[str, Any] = {**SMALL.get(name, {}), **STRICT.get(name, {})}
    if name in ("wsc", "fairserve"):
        own["window_calls"] = 0.0
    # Several that were sent back go in the order of their arrival afterwards, not of their return.
    worlds = [World(lambda: named_policy(name, **own), seed, fails=False) for _ in range(2)]
    for step in range(200):
        if step in at:
            (one,), (other,) = worlds[0].pools, worlds[1].pools
            fresh = named_policy(name, prefixes=one.policy.prefixes, **own)
            taken = take_over(one, Setup(LIMITS, CapacitySettings(), OverloadSettings(), SLOTS, fresh), worlds[0].now)
            worlds[0].carry(one, taken)
            other.catch_up(worlds[1].now)
            other.room.changed()  # all engines are asked again
            worlds[1].carry(other, other.woke(worlds[1].now))
        for world in worlds:
            world.event()
    assert worlds[0].log == worlds[1].log
    left, right = (world.pools[0].policy.order.backlog for world in worlds)
    if left is not None and right is not None:
        for tenant in worlds[0].tenants:
            mine, theirs = left.tenant(tenant), right.tenant(tenant)
            assert (mine is None) == (theirs is None)
            if mine is not None and theirs is not None:
                assert mine.counter == theirs.counter


@given(
    names=st.lists(st.sampled_from(NAMES), min_size=2, max_size=6),
    seed=st.integers(0, 10**6),
    every=st.integers(5, 30),
)
@settings(max_examples=20)
def test_from_any_policy_to_any_other_nothing_is_lost(names: list[str], seed: int, every: int) -> None:
    world = World(lambda: policy_of(names[0]), seed)
    [pool] = world.pools
    for name in names[1:]:
        for _ in range(every):
            world.event()
        waiting, running = pool.queued, pool.dispatched
        setup = Setup(LIMITS, CapacitySettings(), OverloadSettings(), SLOTS, policy_of(name))
        world.carry(pool, take_over(pool, setup, world.now))
        assert pool.queued + pool.dispatched == waiting + running
        world.check()
    world.drain()
    for order in pool.policy.queues().values():
        for tenant in world.tenants:
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
    reweigh(engine, {"b": 3.0})
    after = served(engine, 20.0, 160)
    assert after["b"] / after["a"] == pytest.approx(3.0, rel=0.15)


def test_a_request_that_its_engine_returns_goes_by_the_new_weight() -> None:
    engine = engine_with(policy_of("vtc"))
    request = make_request("a", weight=1.0)
    engine.arrived(request, 0.0)
    reweigh(engine, {"a": 4.0})
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
    world = World(lambda: policy_of(name), 7, slots=(2, 2))
    [pool] = world.pools
    for _ in range(60):
        world.event()
    world.carry(pool, pool.backend_changed("e0", False, world.now))
    seen = len(world.log)
    for id in [*pool.backends["e0"].leases]:
        world.finish(id)
    world.carry(pool, remove_backend(pool, "e0", world.now))
    pool.add_backend("e2", max_num_seqs=2)
    world.drain()
    later = {one.backend for one in world.log[seen:] if isinstance(one, Dispatch)}
    assert "e0" not in later
    assert "e1" in later


def test_a_tenant_with_nothing_queued_or_running_keeps_its_weight() -> None:
    engine = engine_with(policy_of("vtc"))
    request = make_request("b", weight=2.0)
    engine.arrived(request, 0.0)
    engine.finished(request.id, ServiceTokens(10, 5), 1.0)
    take_over(engine, setup_with(policy_of("vtc")), 2.0)
    assert engine.policy.explain(request.flow, 2.0)["weight"] == 2.0
