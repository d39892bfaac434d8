"""What do the nodes of a tree use, here and at other gateways, and what is left when that ends?"""

from __future__ import annotations

from collections.abc import Sequence
from random import Random

import pytest

from policies.request import of_batch
from policies.tree.node import BATCH_CONTEXTS, CONTEXTS, PRESENT, SEQUENCES, WEIGHT, NodeUsage
from policies.tree.pool_tree import IDLE_MAX, PoolTree
from policies.tree.terms import ROOT, GroupSettings, Placing, Tree
from tests.policies.making import make_request

GROUP = Tree({"g": Placing(ROOT, GroupSettings(max_running=4))}, {"a": Placing("g", GroupSettings())})


def counted(tree: PoolTree) -> tuple[float, float]:
    used = tree.pool.used
    return used[CONTEXTS], used[BATCH_CONTEXTS]


def test_contexts_count_without_groups_too_and_nothing_is_left_of_a_tenant_when_they_end() -> None:
    tree = PoolTree()
    for leaf, tokens in (("a", 100), (of_batch("a"), 30), ("b", 5)):
        tree.hold(leaf, tokens)
    assert counted(tree) == (105, 30)
    assert tree.contexts_here() == {"a": 100, of_batch("a"): 30, "b": 5}
    assert (tree.contexts("a"), tree.contexts(of_batch("a")), tree.contexts("c")) == (100, 30, 0)
    for leaf, tokens in (("a", 100), (of_batch("a"), 30), ("b", 5)):
        tree.hold(leaf, -tokens)
    assert counted(tree) == (0, 0)
    assert tree.report(256) == []
    assert tree.remembered() == 0, "a tenant that is gone takes no memory"


@pytest.mark.parametrize("terms", [Tree(), GROUP], ids=["to none", "to a group"])
def test_contexts_stay_when_a_reload_moves_their_tenants(terms: Tree) -> None:
    tree = PoolTree(Tree() if terms is GROUP else GROUP)
    tree.hold("a", 100)
    tree.set_elsewhere([NodeUsage(ROOT, CONTEXTS, 10), NodeUsage("a", CONTEXTS, 40)])
    tree.regroup(terms, [], [])
    assert (counted(tree), tree.contexts("a"), tree.contexts_here()) == ((150, 0), 140, {"a": 100})
    tree.set_elsewhere([])
    tree.hold("a", -100)
    assert (counted(tree), tree.contexts("a")) == ((0, 0), 0)


def test_a_tenant_whose_agents_rest_in_their_tools_keeps_its_weight_at_a_reload() -> None:
    tree, call, other = PoolTree(GROUP), make_request("a", weight=4.0), make_request("b")
    tree.arrived(call, 4.0)
    tree.hold("a", 100)
    tree.left(call)
    tree.arrived(other, 1.0)
    tree.regroup(Tree(), [other], [])
    assert tree.part(other) == 0.2


def test_a_tenant_that_only_has_contexts_elsewhere_any_more_keeps_its_node() -> None:
    tree = PoolTree(GROUP)
    rows = [NodeUsage("a", PRESENT, 1), NodeUsage("a", WEIGHT, 2.0), NodeUsage("a", CONTEXTS, 7)]
    tree.set_elsewhere(rows[:2])
    tree.set_elsewhere(rows)
    tree.set_elsewhere(rows[2:])
    tree.hold("a", 1)
    assert (tree.contexts("a"), counted(tree)) == (8, (8, 0))


@pytest.mark.parametrize("group_first", [True, False], ids=["before those of a tenant", "after those of a tenant"])
def test_contexts_that_are_reported_of_a_group_leave_its_presence_to_its_tenants(group_first: bool) -> None:
    """Whichever of them come and go first: the group has a part as long as a tenant of it has contexts."""
    tree = PoolTree(Tree({"g": Placing(ROOT, GroupSettings())}, {"a": Placing("g", GroupSettings())}))
    of_group, asked = [NodeUsage(" g", CONTEXTS, 10)], make_request("b")
    tree.arrived(asked, 1.0)
    if group_first:
        tree.set_elsewhere(of_group)
        tree.hold("a", 100)
        tree.set_elsewhere([])
        assert tree.part(asked) == 0.5
        tree.hold("a", -100)
    else:
        tree.hold("a", 100)
        tree.set_elsewhere(of_group)
        tree.hold("a", -100)
        tree.set_elsewhere([])
    assert tree.part(asked) == 1.0, "nothing of the group is left"
    tree.hold("a", 100)
    assert tree.part(asked) == 0.5


def test_a_tenant_that_is_present_at_several_gateways_is_present_once_with_its_weight() -> None:
    tree = PoolTree(Tree({"g": Placing(ROOT, GroupSettings())}, {}))
    tree.arrived(make_request("b"), 1.0)
    tree.set_elsewhere([NodeUsage("a", PRESENT, 3), NodeUsage("a", WEIGHT, 9.0)])
    assert tree.share("a", 1.0) == pytest.approx(0.75)
    tree.set_elsewhere([])
    assert tree.share("b", 1.0) == 1.0


@pytest.mark.parametrize("seed", range(20))
def test_what_others_report_counts_once_at_each_node_and_goes_again(seed: int) -> None:
    """Three gateways with one tree, which run requests, hold contexts and report to each other in any order."""
    random = Random(seed)
    tenants = {
        name: Placing(group, GroupSettings(max_running=9)) for name, group in (("a", "i"), ("b", "i"), ("c", "o"))
    }
    terms = Tree(
        {"o": Placing(ROOT, GroupSettings(max_running=20)), "i": Placing("o", GroupSettings(max_running=9))}, tenants
    )
    trees, running = [PoolTree(terms) for _ in range(3)], [[], [], []]  # type: ignore[var-annotated]
    held: list[list[tuple[str, int]]] = [[], [], []]
    for _ in range(200):
        at = random.randrange(3)
        tree = trees[at]
        match random.randrange(5):
            case 0:
                request = make_request(random.choice("abcd"))
                running[at].append(request)
                tree.arrived(request, 1.0)
                tree.dispatched(request, 10)
            case 1 if running[at]:
                request = running[at].pop()
                tree.ended(request, 10)
                tree.left(request)
            case 2:
                held[at].append((random.choice(["a", "d", of_batch("b")]), random.randrange(1, 9)))
                tree.hold(*held[at][-1])
            case 3 if held[at]:
                leaf, tokens = held[at].pop()
                tree.hold(leaf, -tokens)
            case _:
                tree.set_elsewhere(summed([one.report(256) for one in trees if one is not tree]))
    for tree in trees * 2:
        tree.set_elsewhere(summed([one.report(256) for one in trees if one is not tree]))
    requests = [request.flow.tenant for each in running for request in each]
    contexts = [one for each in held for one in each]
    for tree in trees:
        for node, inside in (("a", "a"), (" i", "ab"), (" o", "abc")):
            assert tree.running(node) == len([name for name in requests if name in inside])
        for leaf in ("a", "d", of_batch("b")):
            assert tree.contexts(leaf) == sum(tokens for name, tokens in contexts if name == leaf)
        assert sum(counted(tree)) == sum(tokens for _, tokens in contexts)
        assert tree.pool.used[SEQUENCES] >= len([name for name in requests if name in "abc"])
    for at, tree in enumerate(trees):
        for leaf, tokens in held[at]:
            tree.hold(leaf, -tokens)
        for request in running[at]:
            tree.ended(request, 10)
            tree.left(request)
        tree.set_elsewhere([])
        assert (tree.pool.used, tree.report(256)) == ([0.0] * 4, [])


@pytest.mark.parametrize("terms", [Tree(), Tree({"g": Placing(ROOT, GroupSettings())}, {})], ids=["none", "a group"])
def test_rows_of_groups_and_of_many_tenants_come_and_go(terms: Tree) -> None:
    tree = PoolTree(terms)
    names = [ROOT, *[f" {name}" for name in terms.groups], *[f"t{number}" for number in range(IDLE_MAX + 2)]]
    for _ in range(2):
        tree.set_elsewhere([NodeUsage(name, resource, 1) for name in names for resource in (SEQUENCES, CONTEXTS)])
        assert tree.remembered() == IDLE_MAX + 2
        tree.set_elsewhere([])
        assert (tree.remembered(), tree.pool.used) == (0, [0.0] * 4)


def summed(reports: list[list[NodeUsage]]) -> Sequence[NodeUsage]:
    sums: dict[tuple[str, int], float] = {}
    for node, resource, amount in (row for report in reports for row in report):
        sums[node, resource] = sums.get((node, resource), 0.0) + amount
    return [NodeUsage(node, resource, amount) for (node, resource), amount in sums.items()]
