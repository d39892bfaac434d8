"""What part of a pool is each tenant entitled to? Against a plain reference, and by what an admission engine serves."""

from __future__ import annotations

from collections import defaultdict
from random import Random

import pytest

from policies.capacity.obstacle import Obstacle
from policies.request import Request, of_batch
from policies.settings import SettingError
from policies.tree.pool_tree import PoolTree
from policies.tree.terms import ROOT, GroupSettings, Tree, TreePlace
from tests.policies.making import make_request
from tests.policies.meetings.world import World, tree
from tests.policies.trees import parts, random_tree

ORDERS = ("fairserve", "wsc", "vtc", "rr", "dlpm", "d2lpm")


@pytest.mark.parametrize("seed", range(60))
def test_parts_are_those_of_the_definition_whoever_is_present(seed: int) -> None:
    rng = Random(seed)
    tree = random_tree(rng)
    entitlements, running = PoolTree(tree), defaultdict[str, list[Request]](list)
    for _ in range(60):
        name = rng.choice([*tree.tenants])
        if running[name] and rng.random() < 0.5:
            entitlements.left(running[name].pop())
        else:
            running[name].append(make_request(name))
            entitlements.arrived(running[name][-1], tree.tenants[name].settings.weight)
        present = {name for name, requests in running.items() if requests}
        expected = parts(tree, present)
        for one in present:
            assert entitlements.share(one, 1.0) == pytest.approx(expected[one])
        if present:
            assert sum([entitlements.share(one, 1.0) for one in present]) == pytest.approx(1.0)


def test_work_that_can_wait_is_divided_by_the_same_groups_and_leaves_others_what_they_have() -> None:
    tree = Tree(
        {"g": TreePlace(ROOT, GroupSettings(weight=3.0, guaranteed_share=0.9))}, {"a": TreePlace("g", GroupSettings())}
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
    with pytest.raises(SettingError) as refused:
        GroupSettings(**settings)
    assert refused.value.field == field


def any_length(rng: Random) -> int:
    return rng.randint(20, 100)


def busy(world: World, *tenants: str, clients: int = 16) -> None:
    """Clients of these tenants always have requests, here of some length."""
    for tenant in tenants:
        world.closed(tenant, clients, 100, any_length, streamed=False)


def sends(world: World, tenant: str, requests: int, prompt: int = 10, output: int = 10) -> None:
    """As many requests at once."""
    for _ in range(requests):
        world.send(tenant, prompt, output)
    world.run(world.now)


def running_of(world: World, *tenants: str) -> int:
    return sum(one.tenant in tenants for one in world.asked.values() if one.went_s is not None and not one.outcome)


def ceiling(world: World) -> str:
    """What holds up the first request that waits."""
    waiting = next(one.request for one in world.asked.values() if one.went_s is None)
    return world.engine.requests.tree.ceiling_in_words(waiting)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("policy", "seed", "until_s"),
    [("wsc", 59, 300), ("rr", 64, 300), ("dlpm", 59, 450)],  # seeds of trees in which floors decide
)
def test_every_node_of_a_random_tree_receives_its_part(policy: str, seed: int, until_s: int) -> None:
    """In quanta it takes longer until their size counts for little. Other orders: tests/simulation."""
    terms = random_tree(Random(seed))
    world = World(policy, tree=terms)
    busy(world, *terms.tenants, clients=20)
    world.run(until_s)
    received = {tenant: world.part(tenant) for tenant in terms.tenants}
    for name in reversed(terms.groups):
        children = [child for child, place in (terms.tenants | terms.groups).items() if place.group == name]
        received[name] = sum(received[child] for child in children)
    expected = parts(terms, set(terms.tenants))
    for name in received:
        assert received[name] == pytest.approx(expected.get(name, 0.0), rel=0.05, abs=0.002), name


@pytest.mark.slow
def test_silence_under_a_floor_banks_nothing_and_costs_nothing() -> None:
    others = [f"t{number}" for number in range(50)]
    world = World("vtc", tree=tree({"owner": (ROOT, {"guaranteed_share": 0.3})}, {"alice": ("owner", {})}))
    busy(world, *others, clients=2)
    world.run(60)
    world.served.clear()
    world.closed("alice", 16, 100, any_length, streamed=False, start_s=60.0)
    world.run(300)
    assert min(world.waits("alice")) < 0.2, "the first request goes next"
    assert world.part("alice") == pytest.approx(0.3, rel=0.05)


@pytest.mark.parametrize("policy", ORDERS)
def test_no_more_runs_than_max_running_allows_and_others_go_on(policy: str) -> None:
    terms = tree({"g": (ROOT, {"max_running": 5})}, {"a": ("g", {"max_running": 3}), "b": ("g", {})})
    world = World(policy, tree=terms)
    busy(world, *"abc")
    below = 0
    for look in range(1, 61):
        world.run(0.5 * look)
        assert running_of(world, "a") <= 3
        assert running_of(world, "a", "b") <= 5
        assert running_of(world, *"abc") >= 16
        below += 5 - running_of(world, "a", "b")
    assert below < 6


def test_what_is_at_its_ceiling_says_so() -> None:
    world = World("vtc", tree=tree({}, {"a": (ROOT, {"max_running": 1})}))
    sends(world, "a", 2)
    assert world.engine.blocked.nearest() is Obstacle.CEILING
    assert ceiling(world) == "tenant a has 1 of 1 sequences running (max_running)"
    world.run(0.3)
    assert running_of(world, "a") == 1
    assert world.engine.blocked is None


@pytest.mark.parametrize(
    ("terms", "most"),
    [
        ({"max_share": 0.25}, 4),
        ({"guaranteed_share": 0.125, "borrowing_limit": 0.125}, 4),
        ({"max_share": 0.01}, 1),
    ],
    ids=str,
)
def test_a_share_that_is_not_exceeded_even_alone(terms: dict[str, float], most: int) -> None:
    world = World("vtc", tree=tree({}, {"a": (ROOT, terms)}))
    sends(world, "a", 20)
    assert running_of(world, "a") == most
    term = "max_share" if "max_share" in terms else "borrowing_limit"
    may = f"{sum(terms.values()):.0%} of the sequence slots"
    assert ceiling(world) == f"tenant a may run {may} ({term}) and runs {most / 16:.0%}"


def test_a_share_counts_the_kv_cache_too_and_only_what_runs_below_a_full_node_makes_room_there() -> None:
    world = World("vtc", {"e": (16, 10_000)}, tree=tree({}, {"a": (ROOT, {"max_share": 0.6})}))
    sends(world, "b", 1, 100, 1000)
    sends(world, "a", 8, 2000, 200)
    world.run(1.0)
    assert running_of(world, "a") == 2
    assert ceiling(world) == "tenant a may hold 60% of the KV cache (max_share) and holds 44%; this request needs 20%"
    waiting, requests = world.of("a")[-1].request, world.engine.requests
    makes_room = requests.tree.makes_room
    makes = {each.request.flow.tenant: makes_room(each.request, waiting) for each in requests.leases.values()}
    assert makes == {"a": True, "b": False}


def test_what_is_not_lent_is_kept_free() -> None:
    terms = tree({"owner": (ROOT, {"guaranteed_share": 0.5, "lending_limit": 0.25})}, {"alice": ("owner", {})})
    world = World("vtc", tree=terms)
    sends(world, "b", 40)
    assert running_of(world, "b") == 12
    assert ceiling(world).startswith("what is free is kept for tenants and groups with a lending_limit")
    sends(world, "alice", 10, output=100)
    assert 4 <= running_of(world, "alice") <= 5  # one may wait inside the engine
    world.run(0.5)
    assert running_of(world, "alice") >= 8


def test_a_floor_that_one_sleeping_request_keeps_costs_nobody_anything() -> None:
    world = World("vtc", tree=tree({}, {"sleeper": (ROOT, {"guaranteed_share": 0.5})}))
    world.send("sleeper", 100, 100_000)
    busy(world, "a", "b")
    world.run(120)
    assert world.part("a") == pytest.approx(0.5, rel=0.05)
    assert running_of(world, "sleeper", "a", "b") >= 16
