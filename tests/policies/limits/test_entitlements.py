"""What part of a pool is each tenant entitled to? Against a plain reference, and by what an admission engine serves."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator
from random import Random

import pytest

from policies.admission.decisions import Dispatch
from policies.admission.engine import AdmissionEngine
from policies.admission.takeover import Setup, take_over
from policies.capacity.gauges import Gauges
from policies.capacity.obstacle import Obstacle
from policies.request import Request, ServiceTokens, of_batch
from policies.settings import Contradiction
from policies.tree.pool_tree import PoolTree
from policies.tree.terms import ROOT, GroupSettings, Placing, Tree
from tests.policies.making import make_request, policy_with
from tests.policies.trees import parts, random_tree

FLOORED = 59, 64
"""Seeds of trees in which floors decide: by weight alone some nodes would receive a third of their part."""
ORDERS = ("fairserve", "wsc", "vtc", "rr", "dlpm", "d2lpm")


@pytest.mark.parametrize("seed", range(60))
def test_parts_are_those_of_the_definition_whoever_is_present(seed: int) -> None:
    rng = Random(seed)
    tree = random_tree(rng)
    entitlements, running = PoolTree(tree), Counter[str]()
    for _ in range(60):
        name = rng.choice([*tree.tenants])
        if running[name] and rng.random() < 0.5:
            running[name] -= 1
            entitlements.left(make_request(name))
        else:
            running[name] += 1
            entitlements.arrived(make_request(name), tree.tenants[name].settings.weight)
        present = {name for name, requests in running.items() if requests}
        expected = parts(tree, present)
        for one in present:
            assert entitlements.share(one, 1.0) == pytest.approx(expected[one])
        if present:
            assert sum([entitlements.share(one, 1.0) for one in present]) == pytest.approx(1.0)


def test_without_groups_a_weight_is_the_configured_one() -> None:
    entitlements = PoolTree()
    for name, weight in (("a", 0.3), ("b", 7.0)):
        entitlements.arrived(make_request(name), weight)
        assert entitlements.weight(name, weight) == weight


def test_work_that_can_wait_is_divided_by_the_same_groups_and_leaves_others_what_they_have() -> None:
    tree = Tree(
        {"g": Placing(ROOT, GroupSettings(weight=3.0, guaranteed_share=0.9))}, {"a": Placing("g", GroupSettings())}
    )
    entitlements = PoolTree(tree)
    for name in ("a", "b", of_batch("a"), of_batch("b")):
        entitlements.arrived(make_request(name), 1.0)
    assert entitlements.share("a", 1.0) == pytest.approx(0.9)
    assert entitlements.share(of_batch("a"), 1.0) == pytest.approx(0.75)
    assert entitlements.share(of_batch("b"), 1.0) == pytest.approx(0.25)


@pytest.mark.parametrize(
    ("field", "settings"),
    [
        ("lending_limit", {"lending_limit": 0.1}),
        ("borrowing_limit", {"borrowing_limit": 0.1}),
        ("lending_limit", {"guaranteed_share": 0.1, "lending_limit": 0.2}),
        ("max_share", {"guaranteed_share": 0.3, "max_share": 0.2}),
    ],
)
def test_terms_that_contradict_each_other(field: str, settings: dict[str, float]) -> None:
    with pytest.raises(Contradiction) as refused:
        GroupSettings(**settings)  # type: ignore[arg-type]
    assert refused.value.field == field


class Pool:
    """An admission engine before one engine of `slots`, which takes a turn for each answer."""

    def __init__(self, tree: Tree, policy: str = "vtc", slots: int = 16) -> None:
        self.weights = {name: place.settings.weight for name, place in tree.tenants.items()}
        self.engine = AdmissionEngine(policy_with(policy), tree=tree)
        self.engine.add_backend("e", max_num_seqs=slots)
        self.now = 0.0
        self.rng = Random(1)
        self.requests: dict[str, Request] = {}
        """Those that wait."""
        self.running: dict[str, Request] = {}
        self.waiting: Counter[str] = Counter()
        self.received: defaultdict[str, float] = defaultdict(float)
        self.log: list[str] = []
        self.observe()

    def observe(self, kv_tokens: int | None = 200_000) -> None:
        gauges = Gauges(
            taken_s=self.now, running=len(self.running), waiting=0, kv_usage=0.0, kv_capacity_tokens=kv_tokens
        )
        self.carry(self.engine.backend_changed("e", gauges, self.now))

    def progress(self) -> None:
        """A token of each request that runs."""
        for id in [*self.running]:
            self.carry(self.engine.progressed(id, 1, self.now))

    def ceiling(self) -> str:
        """What holds up the first request that waits."""
        return self.engine.requests.tree.ceiling_in_words(next(iter(self.requests.values())))

    def carry(self, decisions: object) -> None:
        assert isinstance(decisions, list | tuple)
        for decision in decisions:
            assert isinstance(decision, Dispatch)
            request = self.requests.pop(decision.id)
            self.waiting[request.flow.tenant] -= 1
            self.running[decision.id] = request
            self.log.append(request.flow.tenant)

    def send(self, tenant: str, requests: int = 1, **what: int) -> None:
        what = {"prompt": 100, "output_max": 100} | what
        for _ in range(requests):
            weight = self.weights.get(tenant, 1.0)
            request = make_request(tenant, weight=weight, arrived_s=self.now, **what)  # type: ignore[arg-type]
            self.requests[request.id] = request
            self.waiting[tenant] += 1
            self.carry(self.engine.arrived(request, self.now))

    def end_one(self) -> None:
        """The oldest request that runs is answered."""
        self.now += 0.01
        request = self.running.pop(next(iter(self.running)))
        service = ServiceTokens(request.prompt_tokens, self.rng.randint(20, 100))
        self.received[request.flow.tenant] += service.prompt + 2 * service.output
        self.carry(self.engine.finished(request.id, service, self.now))
        if self.rng.random() < 0.05:
            self.observe()

    def keep_busy(self, tenants: Iterator[str] | list[str], ends: int, deep: int = 4) -> None:
        for _ in range(ends):
            for tenant in tenants:
                if self.waiting[tenant] < deep:
                    self.send(tenant, deep - self.waiting[tenant])
            self.end_one()


def shares(pool: Pool, tree: Tree) -> dict[str, float]:
    """What each tenant and group has received, as a part of all."""
    whole = sum(pool.received.values())
    found: defaultdict[str, float] = defaultdict(float)
    for tenant, received in pool.received.items():
        found[tenant] += received / whole
        group = tree.tenants[tenant].group if tenant in tree.tenants else ROOT
        while group:
            found[group] += received / whole
            group = tree.groups[group].group
    return found


@pytest.mark.slow
@pytest.mark.parametrize(
    ("policy", "seed", "ends"),
    [
        *[(policy, seed, 5_000) for policy in ORDERS[:4] for seed in FLOORED],
        ("dlpm", FLOORED[0], 12_000),
    ],
)
def test_every_node_of_a_random_tree_receives_its_part(policy: str, seed: int, ends: int) -> None:
    """In quanta it takes longer until their size counts for little. With one engine `d2lpm` decides as `dlpm` does."""
    tree = random_tree(Random(seed))
    pool = Pool(tree, policy)
    pool.keep_busy([*tree.tenants], ends)
    expected = parts(tree, set(tree.tenants))
    received = shares(pool, tree)
    for name in (*tree.tenants, *[group for group in tree.groups if group in received]):
        assert received[name] == pytest.approx(expected[name], rel=0.05, abs=0.002), name


@pytest.mark.slow
def test_a_floor_beside_fifty_that_flood() -> None:
    tree = Tree(
        {"owner": Placing(ROOT, GroupSettings(guaranteed_share=0.3))}, {"alice": Placing("owner", GroupSettings())}
    )
    pool = Pool(tree)
    others = [f"t{number}" for number in range(50)]
    pool.keep_busy(["alice", *others], 4000)
    assert shares(pool, tree)["alice"] == pytest.approx(0.3, rel=0.05)
    # Silence banks nothing, and costs nothing: the first request after it goes next.
    while pool.waiting["alice"] or any(request.flow.tenant == "alice" for request in pool.running.values()):
        pool.keep_busy(others, 1)
    pool.now += 100.0
    pool.keep_busy(others, 1000)
    pool.log.clear()
    pool.send("alice")
    pool.keep_busy(others, 2)
    assert "alice" in pool.log[:2]
    pool.received.clear()
    pool.keep_busy(["alice", *others], 4000)
    assert shares(pool, tree)["alice"] == pytest.approx(0.3, rel=0.05)


@pytest.mark.slow
def test_a_tenant_that_moves_to_another_group_while_it_waits() -> None:
    apart = Tree({"g": Placing(ROOT, GroupSettings()), "h": Placing(ROOT, GroupSettings())}, {
        "a": Placing("g", GroupSettings()), "b": Placing("g", GroupSettings()), "c": Placing("h", GroupSettings()),
    })  # fmt: skip
    moved = Tree(apart.groups, {**apart.tenants, "b": Placing("h", GroupSettings())})
    pool = Pool(apart)
    for tree, expected in ((apart, (0.25, 0.25, 0.5)), (moved, (0.5, 0.25, 0.25)), (Tree(), (1 / 3, 1 / 3, 1 / 3))):
        engine = pool.engine
        pool.carry(
            take_over(
                engine, Setup(engine.limits, engine.capacity, engine.overload.settings, {"e": 16}, tree=tree), pool.now
            )
        )
        pool.keep_busy(["a", "b", "c"], 200)
        pool.received.clear()
        pool.keep_busy(["a", "b", "c"], 1500)
        received = shares(pool, tree)
        assert [received[name] for name in "abc"] == pytest.approx(expected, rel=0.05)


def running_of(pool: Pool, *tenants: str) -> int:
    return sum(request.flow.tenant in tenants for request in pool.running.values())


@pytest.mark.parametrize("policy", ORDERS)
def test_no_more_runs_than_max_running_allows_and_others_go_on(policy: str) -> None:
    tree = Tree({"g": Placing(ROOT, GroupSettings(max_running=5))}, {
        "a": Placing("g", GroupSettings(max_running=3)), "b": Placing("g", GroupSettings()),
    })  # fmt: skip
    pool = Pool(tree, policy)
    pool.send("a", 10)
    pool.send("b", 10)
    assert running_of(pool, "a") <= 3
    assert running_of(pool, "a", "b") == 5
    below = 0
    for _ in range(300):
        pool.send("c", max(0, 11 - pool.waiting["c"]))
        pool.send("a", int(pool.waiting["a"] < 3))
        pool.send("b", int(pool.waiting["b"] < 3))
        pool.end_one()
        assert running_of(pool, "a") <= 3
        assert running_of(pool, "a", "b") <= 5
        below += 5 - running_of(pool, "a", "b")
        assert len(pool.running) >= 16
    assert below < 30


def test_what_is_at_its_ceiling_says_so() -> None:
    tree = Tree(tenants={"a": Placing(ROOT, GroupSettings(max_running=1))})
    pool = Pool(tree)
    pool.send("a", 2)
    blocked = pool.engine.blocked
    assert blocked is not None
    assert blocked.nearest() is Obstacle.CEILING
    assert pool.ceiling() == "tenant a has 1 of 1 sequences running (max_running)"
    pool.end_one()
    assert running_of(pool, "a") == 1
    assert pool.engine.blocked is None


@pytest.mark.parametrize(("settings", "most"), [
    (GroupSettings(max_share=0.25), 4), (GroupSettings(guaranteed_share=0.125, borrowing_limit=0.125), 4),
    (GroupSettings(max_share=0.01), 1),
])  # fmt: skip
def test_a_share_that_is_not_exceeded_even_alone(settings: GroupSettings, most: int) -> None:
    pool = Pool(Tree(tenants={"a": Placing(ROOT, settings)}))
    pool.send("a", 20, prompt=10, output_max=10)
    assert running_of(pool, "a") == most
    term = "max_share" if settings.max_share else "borrowing_limit"
    may = f"{settings.share_max:.0%} of the sequence slots"
    assert pool.ceiling() == f"tenant a may run {may} ({term}) and runs {most / 16:.0%}"


def test_a_share_counts_the_kv_cache_too() -> None:
    pool = Pool(Tree(tenants={"a": Placing(ROOT, GroupSettings(max_share=0.6))}))
    pool.observe(10_000)
    for _ in range(8):
        pool.send("a", prompt=2000, output_max=10)
        pool.progress()
    assert running_of(pool, "a") == 2
    assert pool.ceiling() == ("tenant a may hold 60% of the KV cache (max_share) and holds 40%; this request needs 20%")


def test_only_what_runs_below_a_full_node_makes_room_there_whatever_the_node_is_full_of() -> None:
    pool = Pool(Tree(tenants={"a": Placing(ROOT, GroupSettings(max_share=0.6))}))
    pool.observe(10_000)
    pool.send("b", prompt=100, output_max=10)
    for _ in range(8):
        pool.send("a", prompt=2000, output_max=10)
        pool.progress()
    waiting = next(iter(pool.requests.values()))
    assert waiting.flow.tenant == "a", "it waits for KV tokens below its ceiling, with sequences left"
    makes = {each.flow.tenant: pool.engine.requests.tree.makes_room(each, waiting) for each in pool.running.values()}
    assert makes == {"a": True, "b": False}


def test_what_is_not_lent_is_kept_free() -> None:
    tree = Tree({"owner": Placing(ROOT, GroupSettings(guaranteed_share=0.5, lending_limit=0.25))}, {
        "alice": Placing("owner", GroupSettings()),
    })  # fmt: skip
    pool = Pool(tree)
    pool.send("b", 40, prompt=10, output_max=10)
    assert running_of(pool, "b") == 12
    assert pool.ceiling().startswith("what is free is kept for tenants and groups with a lending_limit")
    pool.send("alice", 10, prompt=10, output_max=10)
    assert 4 <= running_of(pool, "alice") <= 5  # one may wait inside the engine
    for _ in range(12):
        pool.end_one()
    assert running_of(pool, "alice") >= 8


def test_a_ceiling_is_left_open_by_requests_that_are_cancelled() -> None:
    pool = Pool(Tree(tenants={"a": Placing(ROOT, GroupSettings(max_running=1))}))
    pool.send("a", 3)
    waiting = [*pool.requests]
    for id in waiting:
        pool.carry(pool.engine.cancelled(id, pool.now))
        pool.waiting["a"] -= 1
        del pool.requests[id]
    pool.end_one()
    pool.send("a", 2)
    assert running_of(pool, "a") == 1


def test_a_tenant_that_splits_into_many_gains_nothing() -> None:
    parts = [f"part{number}" for number in range(40)]
    tree = Tree(
        {"g": Placing(ROOT, GroupSettings()), "h": Placing(ROOT, GroupSettings())},
        {name: Placing("g", GroupSettings()) for name in parts} | {"whole": Placing("h", GroupSettings())},
    )
    pool = Pool(tree)
    pool.keep_busy(["whole", *parts], 1500, deep=2)
    assert shares(pool, tree)["whole"] == pytest.approx(0.5, rel=0.05)


def test_a_floor_that_one_sleeping_request_keeps_costs_nobody_anything() -> None:
    tree = Tree({}, {"sleeper": Placing(ROOT, GroupSettings(guaranteed_share=0.5))})
    pool = Pool(tree)
    pool.send("sleeper")
    asleep = pool.running.pop(next(iter(pool.running)))  # it runs, and does not end
    pool.keep_busy(["a", "b"], 2000)
    pool.running[asleep.id] = asleep
    received = shares(pool, tree)
    assert received["a"] == pytest.approx(0.5, rel=0.05)
    assert len(pool.running) >= 16
