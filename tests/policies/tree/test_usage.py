"""What do the nodes of a tree use, here and at other gateways, and what is left when that ends?"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from random import Random

import pytest

from policies.request import Request, of_batch, payer
from policies.tree.node import BATCH_CONTEXTS, CONTEXTS, SEQUENCES, NodeUsage
from policies.tree.pool_tree import IDLE_MAX, PoolTree
from policies.tree.terms import ROOT, Tree
from tests.policies.making import make_request
from tests.policies.meetings.world import tree as tree_of

GROUP = tree_of({"g": (ROOT, {"max_running": 4})}, {"a": ("g", {})})


def counted(tree: PoolTree) -> tuple[float, float]:
    used = tree.pool.used
    return used[CONTEXTS], used[BATCH_CONTEXTS]


@pytest.mark.parametrize("terms", [Tree(), GROUP], ids=["to none", "to a group"])
def test_contexts_stay_when_a_reload_moves_their_tenants(terms: Tree) -> None:
    tree = PoolTree(Tree() if terms is GROUP else GROUP)
    tree.hold("a", 100)
    tree.set_elsewhere([NodeUsage(ROOT, CONTEXTS, 10), NodeUsage("a", CONTEXTS, 40)])
    tree.regroup(terms, [], [])
    assert (counted(tree), tree.context_tokens("a"), tree.context_tokens_here()) == ((150, 0), 140, {"a": 100})
    tree.set_elsewhere([])
    tree.hold("a", -100)
    assert (counted(tree), tree.context_tokens("a")) == ((0, 0), 0)


def test_a_tenant_whose_agents_rest_in_their_tools_keeps_its_weight_at_a_reload() -> None:
    tree, call, other = PoolTree(GROUP), make_request("a", weight=4.0), make_request("b")
    tree.arrived(call, 4.0)
    tree.hold("a", 100)
    tree.left(call)
    tree.arrived(other, 1.0)
    tree.regroup(Tree(), [other], [])
    assert tree.part(other) == 0.2


def test_what_runs_is_counted_anew_when_a_reload_groups_its_tenants() -> None:
    tree, running = PoolTree(), make_request("a", sequences=3)
    tree.arrived(running, 1.0)
    tree.run(running, 3, 70)
    tree.regroup(GROUP, [], [(running, 70)])
    assert tree.running(" g") == 3
    tree.run(running, -3, -70)
    tree.left(running)
    assert tree.pool.used == [0.0] * 4


def test_all_sequences_of_a_request_count_at_a_ceiling() -> None:
    tree, running = PoolTree(GROUP), make_request("a", sequences=2)
    tree.arrived(running, 1.0)
    tree.run(running, 2, 10)
    assert tree.full_node_for(make_request("a", sequences=2)) is None
    assert tree.full_node_for(make_request("a", sequences=3)) is tree.nodes[" g"], "four may run"


class Gateway:
    """Random requests and contexts of some tenants and of their batch work, at one tree."""

    def __init__(self, terms: Tree, random: Random) -> None:
        self.tree, self.random = PoolTree(terms), random
        self.queued, self.running = list[Request](), list[Request]()
        self.contexts = Counter[str]()

    def step(self) -> None:
        random, tree = self.random, self.tree
        leaf = random.choice([*"abcd", of_batch("a"), of_batch("d")])
        what = random.randrange(6)
        if what == 0:
            self.queued.append(make_request(leaf))
            tree.arrived(self.queued[-1], 1.0)
        elif what == 1 and self.queued:
            request = self.queued.pop(random.randrange(len(self.queued)))
            self.running.append(request)
            tree.run(request, request.sequences, 10)
        elif what == 2 and self.running:
            self.ends(self.running.pop(random.randrange(len(self.running))))
        elif what == 3 and self.queued:
            tree.left(self.queued.pop(random.randrange(len(self.queued))))
        elif what == 4:
            self.hold(leaf, random.randrange(1, 9))
        elif self.contexts[leaf]:
            self.hold(leaf, -self.contexts[leaf])

    def ends(self, request: Request) -> None:
        self.tree.run(request, -request.sequences, -10)
        self.tree.left(request)

    def hold(self, leaf: str, tokens: int) -> None:
        self.tree.hold(leaf, tokens)
        self.contexts[leaf] += tokens

    def busy(self) -> set[str]:
        return {request.flow.tenant for request in (*self.queued, *self.running)}

    def goes(self) -> None:
        """Everything here ends."""
        for request in self.queued:
            self.tree.left(request)
        for request in self.running:
            self.ends(request)
        for leaf, tokens in (+self.contexts).items():
            self.hold(leaf, -tokens)


NESTED = tree_of(
    {"o": (ROOT, {"max_running": 20}), "i": ("o", {"max_running": 9})},
    {name: (group, {"max_running": 9}) for name, group in (("a", "i"), ("b", "i"), ("c", "o"))},
)


@pytest.mark.parametrize("terms", [Tree(), NESTED], ids=["no groups", "groups"])
@pytest.mark.parametrize(("count", "steps"), [(1, 1), (3, 10)])
@pytest.mark.parametrize("seed", range(10))
def test_what_is_used_and_reported_counts_once_at_each_node_and_goes_again(
    seed: int, count: int, steps: int, terms: Tree
) -> None:
    """Gateways with one tree report to each other after some steps. Who has no request and no context is forgotten."""
    random = Random(seed)
    gateways = [Gateway(terms, random) for _ in range(count)]
    for number in range(400):
        random.choice(gateways).step()
        if number % steps == 0:
            report_to_each_other(gateways)
            check(gateways)
    for gateway in gateways:
        gateway.goes()
        gateway.tree.set_elsewhere([])
        pool = gateway.tree.pool
        assert (pool.used, gateway.tree.report(256)) == ([0.0] * 4, [])
        assert in_use(gateway.tree) == len(terms.tenants), "only tenants with limits"
        assert pool.contexts.present == pool.interactive.present == pool.batch.present == 0


def report_to_each_other(gateways: list[Gateway]) -> None:
    for one in gateways * 2:
        one.tree.set_elsewhere(summed([other.tree.report(256) for other in gateways if other is not one]))


def check(gateways: list[Gateway]) -> None:
    """What each tree says is what there is at all gateways."""
    running = [payer(request.flow.tenant) for gateway in gateways for request in gateway.running]
    contexts = sum([gateway.contexts for gateway in gateways], Counter[str]())
    busy = {leaf for gateway in gateways for leaf in gateway.busy()}
    for gateway in gateways:
        tree = gateway.tree
        for node, inside in (("a", "a"), *([(" i", "ab"), (" o", "abc")] if tree.terms.groups else [])):
            assert tree.running(node) == len([name for name in running if name in inside])
        assert tree.pool.used[SEQUENCES] == len(running)
        assert {leaf: tree.context_tokens(leaf) for leaf in contexts} == contexts
        assert sum(counted(tree)) == contexts.total()
        assert tree.context_tokens_here() == +gateway.contexts
        assert {leaf for leaf in {*busy, *contexts, *"abcd"} if tree.numbers(leaf).get("weight")} == busy
        if not tree.terms.groups:
            holders = [leaf for leaf in {*busy, *contexts} if payer(leaf) == leaf]
            assert tree.pool.contexts.present == tree.pool.contexts.weights == len(holders)


@pytest.mark.parametrize("terms", [Tree(), tree_of({"g": (ROOT, {})}, {})], ids=["none", "a group"])
def test_rows_of_groups_and_of_many_tenants_come_and_go(terms: Tree) -> None:
    tree = PoolTree(terms)
    names = [ROOT, *[f" {name}" for name in terms.groups], *[f"t{number}" for number in range(IDLE_MAX + 2)]]
    for _ in range(2):
        tree.set_elsewhere([NodeUsage(name, resource, 1) for name in names for resource in (SEQUENCES, CONTEXTS)])
        assert in_use(tree) == IDLE_MAX + 2
        tree.set_elsewhere([])
        assert (in_use(tree), tree.pool.used) == (0, [0.0] * 4)


def in_use(tree: PoolTree) -> int:
    return sum(node.is_tenant and node.is_in_use for node in tree.nodes.values())


def summed(reports: list[list[NodeUsage]]) -> Sequence[NodeUsage]:
    sums: dict[tuple[str, int], float] = {}
    for node, resource, amount in (row for report in reports for row in report):
        sums[node, resource] = sums.get((node, resource), 0.0) + amount
    return [NodeUsage(node, resource, amount) for (node, resource), amount in sums.items()]


@pytest.mark.parametrize(
    ("kept", "arrivals", "full"),
    [(0.9, "bb", [False, True]), (0.5, ["keeper", "keeper", "b", "b"], [False] * 4)],
    ids=["an idle pool takes any request", "what is kept counts once when it is used"],
)
def test_what_is_kept_for_one_tenant_leaves_the_rest_to_others(
    kept: float, arrivals: Sequence[str], full: list[bool]
) -> None:
    tree, was_full = PoolTree(tree_of({}, {"keeper": (ROOT, {"guaranteed_share": kept, "lending_limit": 0.0})})), []
    tree.sized(4, 1000)
    for name in arrivals:
        tree.arrived(request := make_request(name), 1.0)
        was_full.append(tree.full_node_for(request) is not None)
        tree.run(request, 1, 10)
    assert was_full == full
