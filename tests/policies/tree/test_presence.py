"""Who is present in the tree of a pool, for how long, and what part has each?"""

from __future__ import annotations

import pytest

from policies.request import of_batch
from policies.tree.node import BATCH_CONTEXTS, CONTEXTS, PRESENT, SEQUENCES, WEIGHT, NodeUsage
from policies.tree.pool_tree import IDLE_MAX, PoolTree
from policies.tree.terms import ROOT, Tree
from tests.policies.agents import HOLD_S, Pool, call
from tests.policies.making import make_request
from tests.policies.meetings.world import tree as tree_of

GROUPS = tree_of(
    {"g": (ROOT, {}), "h": (ROOT, {"guaranteed_share": 0.6})}, {"a": ("g", {}), "b": ("g", {}), "c": ("h", {})}
)


def test_a_tenant_whose_agents_rest_in_their_tools_keeps_its_part_of_the_cache() -> None:
    pool = Pool()
    for name, tokens in (("a", 3000), ("a", 2000), ("b", 4000)):
        pool.serves(call(name, f"{name}{tokens}", tokens), output=0)
    next_of_a = call("a", "next", 2000, arrived_s=pool.now)
    assert pool.asks(next_of_a) == [], "the half of `b` is not for `a`, though `b` has no request"
    assert pool.engine.requests.tree.part(next_of_a) == 0.5
    assert pool.after(HOLD_S + 0.01) == [next_of_a.id]
    assert pool.engine.requests.tree.part(next_of_a) == 1.0, "no context of `b` counts any more"


def test_contexts_take_no_part_of_the_service() -> None:
    tree = PoolTree(GROUPS)
    tree.arrived(make_request("b"), 1.0)
    tree.arrived(make_request("c"), 1.0)
    tree.hold("a", 1000)
    assert tree.share("b", 1.0) == pytest.approx(0.4), "all of what its group has"
    assert tree.part(make_request("b")) == pytest.approx(0.2), "half of what its group has of the cache"
    assert tree.part(make_request("c")) == pytest.approx(0.6)
    in_tree = make_request("b")
    in_tree.weight = tree.weight("b", 1.0)
    assert tree.part(in_tree) == pytest.approx(0.2), "the weight in the tree holds for the order alone"
    tree.hold("a", -1000)
    assert tree.part(make_request("b")) == pytest.approx(0.4)


def test_before_its_first_request_a_tenant_has_the_floor_of_its_group() -> None:
    tree = PoolTree(GROUPS)
    tree.arrived(make_request("b"), 1.0)
    assert tree.share("c", 1.0) == tree.part(make_request("c")) == pytest.approx(0.6)


def test_floors_that_are_all_of_a_group_leave_its_other_tenants_a_hundredth_of_the_group() -> None:
    inside = {name: ("g", {"guaranteed_share": part}) for name, part in (("t0", 0.3), ("t1", 0.2))}
    tree = PoolTree(tree_of({"g": (ROOT, {"guaranteed_share": 0.5})}, inside | {"c": ("g", {})}))
    for name in ("t0", "t1", "c", "outside"):
        tree.arrived(make_request(name), 1.0)
    assert tree.share("c", 1.0) == pytest.approx(0.005)


def test_a_new_tenant_has_the_part_of_its_weight() -> None:
    tree = PoolTree()
    tree.arrived(make_request("a"), 1.0)
    assert tree.part(make_request("new", weight=3.0)) == 0.75
    assert tree.share("new", 4.0) == 0.8
    tree.arrived(make_request("new"), 2.0)
    assert tree.share("a", 1.0) == pytest.approx(1 / 3)
    tree.reweigh({"new": 9.0})
    assert tree.part(make_request("new")) == tree.share("new", 1.0) == 0.9
    tree.arrived(make_request("new"), 1.0)
    assert tree.share("new", 1.0) == 0.5, "the weight of the last request that came"


def test_whoever_is_present_at_another_gateway_has_a_part_there_and_here() -> None:
    tree, asked = PoolTree(), make_request("a")
    tree.arrived(asked, 1.0)
    rows = [
        NodeUsage("b", SEQUENCES, 6),
        NodeUsage("c", CONTEXTS, 500),
        NodeUsage("b", PRESENT, 2),
        NodeUsage("b", WEIGHT, 6.0),
    ]
    tree.set_elsewhere(rows)
    assert tree.share("a", 1.0) == 0.25, "two gateways say that `b` has a weight of 3"
    assert tree.part(asked) == 0.2, "of what can be held `c` has a part as well"
    assert not tree.alone_and_flooding(asked)[1], "1 of 6, where 1.5 are its part"
    tree.arrived(make_request("a"), 1.0)
    assert tree.alone_and_flooding(asked)[1]
    tree.set_elsewhere([])
    assert tree.share("a", 1.0) == tree.part(asked) == 1.0


def test_a_gateway_reports_who_is_present_and_what_runs_without_any_groups() -> None:
    tree, running = PoolTree(), make_request("a", sequences=3)
    for request in (running, make_request(of_batch("b"))):
        tree.arrived(request, 2.0)
    tree.run(running, 3, 70)
    tree.hold("a", 90)
    rows = {(row.node, row.resource): row.amount for row in tree.report(256)}
    assert (rows["a", SEQUENCES], rows["a", CONTEXTS]) == (3, 90)
    assert (rows["a", PRESENT], rows["a", WEIGHT]) == (rows[of_batch("b"), PRESENT], rows[of_batch("b"), WEIGHT])
    assert not any(resource == BATCH_CONTEXTS for _, resource in rows)


@pytest.mark.parametrize("terms", [Tree(), GROUPS])
def test_idle_tenants_are_kept_up_to_a_bound_and_begin_anew(terms: Tree) -> None:
    tree = PoolTree(terms)
    for n in range(3 * IDLE_MAX):
        request = make_request(f"t{n}")
        tree.arrived(request, 3.0)
        tree.left(request)
    assert len(tree.nodes) < IDLE_MAX + 10
    back, other = make_request(f"t{3 * IDLE_MAX - 1}"), make_request("other")
    tree.arrived(back, 1.0)
    tree.arrived(other, 1.0)
    assert tree.share(back.flow.tenant, 1.0) == tree.share("other", 1.0)
    assert len(tree.nodes) < IDLE_MAX + 10


def test_a_floor_for_which_others_leave_nothing_is_a_hundredth() -> None:
    """The sum of floors may exceed 1 by rounding."""
    tree = PoolTree(
        tree_of(
            {}, {name: (ROOT, {"guaranteed_share": floor}) for name, floor in (("a", 0.5), ("b", 0.5), ("c", 5e-7))}
        )
    )
    for name in "abc":
        tree.arrived(make_request(name), 1.0)
    assert tree.share("c", 1.0) == 0.01
