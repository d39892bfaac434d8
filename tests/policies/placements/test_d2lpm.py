"""D2LPM sends a request where its prefix is, lets nobody stick there, and leaves no engine idle."""

from __future__ import annotations

from dataclasses import replace
from math import inf

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from policies.admission.named import named_policy
from policies.admission.policy import Policy
from policies.capacity.obstacle import Blocked
from policies.orders.order import Selection
from policies.placements.deficits import ByDeficits, DeficitParams
from policies.request import Flow, PlacementReason, ServiceTokens
from tests.policies.caching import CachingServers, Questions, ask, document
from tests.policies.making import Engines, make_request


class Cluster(Engines):
    """Engines by name, with what they run and how much they can."""

    def __init__(self, slots: int, *names: str) -> None:
        self.slots = slots
        self.running = dict.fromkeys(names, 0)

    @property
    def full(self) -> list[str]:
        return [name for name, running in self.running.items() if running >= self.slots]


def pop(policy: Policy, cluster: Cluster) -> Selection | Blocked | None:
    selection = policy.pop(0.0, cluster)
    if isinstance(selection, Selection):
        cluster.running[selection.backend] += 1
        policy.charge(selection.request, ServiceTokens(selection.request.prompt_tokens, 0), 0.0, final=False)
    return selection


def pop_all(policy: Policy, cluster: Cluster) -> list[str]:
    backends = []
    while isinstance(selection := pop(policy, cluster), Selection):
        backends.append(selection.backend)
    return backends


def test_requests_that_begin_alike_go_to_one_backend_and_others_elsewhere() -> None:
    policy, cluster = named_policy("d2lpm"), Cluster(100, "x", "y")
    wanted = {}
    for number in range(4):
        for text in (1, 1, 2, 2):
            wanted[ask(policy, document(text, 10)).id] = text
        if number == 1:  # half of them find the first ones still waiting, half find them cached
            served = [pop(policy, cluster) for _ in range(8)]
    served += [pop(policy, cluster) for _ in range(8)]
    where: dict[int, set[str]] = {1: set(), 2: set()}
    for selection in served:
        where[wanted[selection.request.id]].add(selection.backend)
    assert sorted(map(sorted, where.values())) == [["x"], ["y"]]


def test_what_is_not_cached_anywhere_goes_to_the_shortest_queue() -> None:
    policy, cluster = named_policy("d2lpm"), Cluster(100, "x", "y", "z")
    cluster.running.update(x=5, y=2, z=4)
    for number in range(7):
        ask(policy, document(number, 3))
    assert sorted(pop_all(policy, cluster)) == ["x", "y", "y", "y", "y", "z", "z"]


@pytest.mark.parametrize(("backend_quantum", "backends_used"), [(200.0, {"x", "y"}), (inf, {"x"})])
def test_a_quantum_limits_how_long_a_tenant_sticks_to_one_backend(
    backend_quantum: float, backends_used: set[str]
) -> None:
    policy, cluster = named_policy("d2lpm", backend_quantum=backend_quantum), Cluster(100, "x", "y")
    policy.prefixes.insert(document(1, 4), "x")
    for _ in range(20):
        ask(policy, document(1, 4))
    assert set(pop_all(policy, cluster)) == backends_used


def test_an_idle_engine_takes_what_waits_for_another_the_next_of_the_longest_queue() -> None:
    policy, cluster = named_policy("d2lpm", backend_quantum=inf), Cluster(1, "x", "y")
    policy.prefixes.insert(document(1, 4), "x")
    asked = [ask(policy, document(1, 4)) for _ in range(3)]
    assert pop_all(policy, cluster) == ["x", "y"]
    assert [request.progress.placed for request in asked] == [PlacementReason.ASSIGNED, PlacementReason.TAKEN, None]
    deficits = policy.explain(make_request("a").flow, 0.0)
    assert deficits["queued"] == 1
    assert deficits["running"] == 2
    policy, cluster = named_policy("d2lpm", backend_quantum=inf), Cluster(1, "x", "y", "z")
    cluster.running.update(x=1, y=1, z=1)
    for number, name in ((1, "x"), (2, "y")):
        policy.prefixes.insert(document(number, 4), name)
    _, first_at_y, _ = (ask(policy, document(number, 4)) for number in (1, 2, 2))
    assert pop_all(policy, cluster) == []
    cluster.running["z"] = 0
    selection = pop(policy, cluster)
    assert (selection.request, selection.backend) == (first_at_y, "z")


def test_what_waits_for_a_backend_that_fails_or_is_removed_is_placed_again() -> None:
    policy, cluster = named_policy("d2lpm", backend_quantum=inf), Cluster(1, "x", "y")
    policy.prefixes.insert(document(1, 4), "x")
    asked = [ask(policy, document(1, 4)) for _ in range(4)]
    cluster.running.update(x=1, y=1)
    assert pop_all(policy, cluster) == []
    del cluster.running["x"]
    cluster.slots = 10
    assert pop_all(policy, cluster) == ["y"] * 4
    for request in asked:
        policy.charge(request, ServiceTokens(request.prompt_tokens, 2, 0), 0.0, final=True)
    assert len(policy) == 0
    assert policy.explain(asked[0].flow, 0.0)["deficit_at_x"] == inf, "what was to go there is given back"
    policy, cluster = named_policy("d2lpm", backend_quantum=inf), Cluster(1, "x", "y")
    cluster.running.update(x=1, y=1)
    policy.prefixes.insert(document(1, 4), "x")
    ask(policy, document(1, 4))
    assert pop_all(policy, cluster) == []
    policy.forget_engine("x", 0.0)
    del cluster.running["x"]
    cluster.running["y"] = 0
    assert pop_all(policy, cluster) == ["y"]


def test_nothing_is_placed_where_nothing_is_in_service() -> None:
    policy = named_policy("d2lpm")
    request = ask(policy, document(1, 4))
    blocked = policy.pop(0.0, Cluster(1))
    assert blocked.nearest() == "closed"
    assert len(policy) == 1
    policy.remove(request, 0.0)
    assert len(policy) == 0


def test_deficits_are_trued_up_and_given_back() -> None:
    policy, cluster = named_policy("d2lpm", backend_quantum=1000.0), Cluster(1, "x")
    removed, kept = ask(policy, document(1, 9)), ask(policy, document(2, 9))
    flow = kept.flow
    assert pop_all(policy, cluster) == ["x"]
    assert policy.explain(flow, 0.0)["deficit_at_x"] == 800.0
    policy.remove(kept, 0.0)
    assert policy.explain(flow, 0.0)["deficit_at_x"] == 900.0
    policy.charge(removed, ServiceTokens(110, 30, 90), 0.0, final=True)
    assert policy.explain(flow, 0.0)["deficit_at_x"] == 1000.0 - 110 - 60, "input in full, cached or not"


# --- the bound ---

QUANTUM = 100.0


@settings(max_examples=20)
@given(seed=st.integers(0, 10**6))
def test_backlogged_tenants_stay_within_the_bound_over_all_engines(seed: int) -> None:
    """2 W (U + Q), per weight."""
    traffic = Questions.of(seed)
    policy = named_policy("d2lpm", quantum=QUANTUM, backend_quantum=QUANTUM)
    spread = CachingServers(policy, traffic).spread(120, "a", "c", both_wait=lambda: wait_everywhere(policy, "a", "c"))
    assert spread <= traffic.engines * replace(traffic, engines=1).bound(QUANTUM)


def wait_everywhere(policy: Policy, *tenants: str) -> bool:
    """What the theorem asks for: has each of them something waiting at every engine?"""
    explained = [order.explain(Flow(tenant), 0.0) for order in policy.queues().values() for tenant in tenants]
    return all(numbers.get("tenant_queued", 0.0) > 0 for numbers in explained)


@pytest.mark.parametrize(("weight", "here", "there"), [(1.0, 50.0, 40.0), (4.0, 150.0, 140.0)])
def test_after_a_refill_a_request_goes_to_any_engine_where_its_tenant_has_deficit_left(
    weight: float, here: float, there: float
) -> None:
    """It owes 250 here and 260 there: three quanta of 100, or one of 400, leave these."""
    placement = ByDeficits(DeficitParams(backend_quantum=100.0))
    for engine, tokens in (("here", 250), ("there", 260)):
        placement.moved(make_request(prompt=tokens), None, engine)
    cached = make_request(prompt=10, prefix=document(1, 5), weight=weight)
    assert placement.assign(cached, {"here": 0, "there": 0}, {"here": 0, "there": 5}) == "there"
    assert placement.explain("a") == {"deficit_at_here": here, "deficit_at_there": there}


def test_without_room_the_next_of_each_queue_is_named() -> None:
    policy, cluster = named_policy("d2lpm", backend_quantum=inf), Cluster(1, "x", "y")
    cluster.running.update(x=1, y=1)
    for number, name in ((1, "x"), (2, "y")):
        policy.prefixes.insert(document(number, 4), name)
    waiting = [ask(policy, document(number, 4)) for number in (1, 2)]
    blocked = pop(policy, cluster)
    assert [each.request for each in (blocked, *blocked.others)] == waiting
