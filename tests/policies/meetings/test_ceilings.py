"""Ceilings and lending limits meet class batch, the working set, other orders, and engines of which little is known."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import pytest

from policies.admission.decisions import Dispatch
from policies.admission.engine import AdmissionEngine
from policies.admission.named import named_policy
from policies.capacity.gauges import Gauges
from policies.capacity.ledger import BackendLedger
from policies.capacity.obstacle import Blocked, Obstacle
from policies.request import Claim, Request, ServiceTokens, of_batch
from policies.tree.terms import ROOT, Tree
from tests.policies.making import Room, ledger_of, make_request, pool_of
from tests.policies.meetings.world import World, tree

TOGETHER = {"a": ("g", {}), "b": ("g", {})}


@pytest.mark.parametrize(
    ("policy", "terms", "others"),
    [
        *[
            pytest.param(policy, tree({"g": (ROOT, limit)}, TOGETHER), "a", id=f"{policy}, in a group with {limit}")
            for policy in ("vtc", "dlpm")
            for limit in ({}, {"max_running": 8}, {"max_share": 0.5})
        ],
        pytest.param("vtc", tree({"g": (ROOT, {"max_running": 8})}, TOGETHER), "ax", id="beside another group"),
        *[
            pytest.param(
                "vtc", tree({}, {name: (ROOT, {"weight": weight}) for name in "ab"}), "a", id=f"weights {weight}"
            )
            for weight in (0.01, 1.0, 1000.0)
        ],
    ],
)
def test_batch_gets_its_part_and_no_more(policy: str, terms: Tree, others: str) -> None:
    world = World(policy, tree=terms)
    for tenant in others:
        world.closed(tenant, 40, 300, 100)
    world.closed("b", 40, 300, 100, batch=True)
    world.run(100)
    assert world.part("b", batch=True) == pytest.approx(0.05, abs=0.01)
    went = sorted(one.went_s for one in world.of("b", batch=True) if one.went_s is not None)
    assert max(after - before for before, after in pairwise(went)) < 10.0


@pytest.mark.parametrize("policy", ["vtc", "rr", "dlpm", "d2lpm"])
def test_tenants_at_a_ceiling_leave_the_pool_to_others(policy: str) -> None:
    members = {f"g{number}": ("g", {}) for number in range(10)}
    world = World(policy, tree=tree({"g": (ROOT, {"max_running": 1})}, members))
    for member in members:
        world.closed(member, 4, 300, 200)
    for flood in ("x", "y"):
        world.closed(flood, 20, 300, 100)
    world.run(100)
    assert sum(world.busy_s.values()) / 100 > 15.0


def test_a_start_of_a_group_at_its_ceiling_holds_up_no_other_group() -> None:
    terms = tree({"g": (ROOT, {"max_running": 2})}, {"g1": ("g", {}), "g2": ("g", {})})
    world = World("fairserve", {"e": (64, 100_000)}, tree=terms, prefill_per_s=5000.0)
    world.closed("x", 6, 600, 100, think_s=0.2)
    world.at(10.0, lambda: world.agents("h", 16, context=9_000, calls=14, output=20, until_s=30.0))
    world.send("g1", 40_000, 50, 14.9, app="agent", claim=Claim("s", explicit=True))
    for number in range(2):
        world.send("g2", 500, 12_000, 15.0 + number)
    world.run(150)
    waits = world.waits("x", 70.0)
    assert len(waits) > 190
    assert max(waits) < 1.0


@pytest.mark.parametrize(
    ("outer", "left"), [({}, 5), ({"lending_limit": 0.4}, 5), ({"lending_limit": 0.0}, 8)], ids=str
)
def test_what_an_inner_group_does_not_lend_is_kept_whatever_the_outer_one_lends(
    outer: dict[str, float], left: int
) -> None:
    groups = {
        "o": (ROOT, {"guaranteed_share": 0.5, **outer}),
        "i": ("o", {"guaranteed_share": 0.3, "lending_limit": 0.0}),
    }
    world = World("vtc", tree=tree(groups, {"a": ("i", {}), "x": (ROOT, {})}))
    world.closed("x", 40, 300, 1000)
    world.run(10)
    assert 16 - world.engine.backends["e"].sequences == left
    world.closed("a", 10, 300, 1000, start_s=10.0)
    world.run(11)
    assert world.engine.backends["e"].sequences >= 16, "its owner has it at once"


def test_a_share_of_engines_of_which_one_is_not_known_is_no_share_of_the_others() -> None:
    world = World(
        "vtc",
        {"e0": (4, 600_000), "e1": (None, 600_000)},
        tree=tree({"g": (ROOT, {"max_share": 0.5})}, {"a": ("g", {})}),
    )
    world.closed("a", 60, 300, 300)
    world.run(30)
    assert sum(ledger.sequences for ledger in world.engine.backends.values()) > 30


def test_a_tenant_at_its_ceiling_sleeps_until_it_has_room() -> None:
    engine = pool_of("e", slots=8, tree=tree({}, {"a": (ROOT, {"max_running": 1})}))
    runs, waits = make_request("a"), make_request("a")
    for request in (runs, waits):
        engine.arrived(request, 0.0)
    assert not engine.room.may_wake(waits, None)
    assert engine.finished(runs.id, ServiceTokens(10, 1), 1.0, None) == [Dispatch(waits.id, "e")]


def test_a_share_is_of_the_engines_in_service() -> None:
    engine = pool_of("e0", "e1", slots=8, tree=tree({}, {"a": (ROOT, {"max_share": 0.5})}))
    engine.backend_changed("e1", False, 0.0)
    for _ in range(8):
        engine.arrived(make_request("a"), 0.0)
    assert engine.dispatched == 4


def test_a_prompt_larger_than_the_cache_of_one_engine_goes_to_one_that_can_hold_it() -> None:
    world = World("vtc", {"small": (4, 8_000), "large": (16, 24_000)})
    world.closed("a", 60, 900, 200)
    world.send("big", 16_000, 50, 10.0)
    world.run(30)
    [big] = world.of("big")
    assert big.engine == "large"
    assert big.waited_s(world.now) < 8.0


@pytest.mark.parametrize("policy", ["dlpm", "d2lpm"])
def test_the_request_that_goes_next_by_its_prefix_is_the_one_that_wakes_its_tenant(policy: str) -> None:
    engine = pool_of("e", policy=policy, slots=8, tree=tree({}, {"a": (ROOT, {"max_running": 2})}))
    document = tuple(range(1, 9))
    first, second = make_request("a", prefix=document, prompt=128), make_request("a")
    older = make_request("a", sequences=2)
    same = make_request("a", prefix=document, prompt=128)
    went = [decision.id for one in (first, second, older, same) for decision in engine.arrived(one, 0.0)]
    assert went == [first.id, second.id]
    decisions = engine.finished(second.id, ServiceTokens(10, 1), 1.0, None)
    assert [one.id for one in decisions] == [same.id], "it has room, though the older one has none"


@pytest.mark.parametrize("policy", ["dlpm", "d2lpm"])
def test_a_request_that_goes_next_since_its_prefix_was_sent_starts_in_the_same_event(policy: str) -> None:
    engine = pool_of("e", policy=policy, slots=8, tree=tree({}, {"a": (ROOT, {"max_running": 2})}))
    document = tuple(range(1, 9))
    for one in (make_request("a"), make_request("a", sequences=2), make_request("c", prompt=100_000)):
        engine.arrived(one, 0.0)
    same, other = (make_request(tenant, prefix=document, prompt=128) for tenant in "ab")
    went = [decision.id for one in (same, other) for decision in engine.arrived(one, 0.0)]
    assert went == [other.id, same.id]


def test_a_large_prompt_goes_to_the_engine_that_is_left_as_soon_as_the_larger_one_is_gone() -> None:
    engine = AdmissionEngine(named_policy("fairserve"))
    for name, tokens in (("large", 10_000), ("small", 1_000)):
        engine.add_backend(name, max_num_seqs=1)
        engine.backend_changed(name, Gauges(0.0, 0, 0, 0.0, tokens, 16), 0.0)
    first, second = make_request(prompt=5_000), make_request(prompt=5_000)
    assert [one.id for request in (first, second) for one in engine.arrived(request, 0.0)] == [first.id]
    assert engine.backend_changed("large", False, 1.0) == [Dispatch(second.id, "small")]


class FullNode(Room):
    """A pool whose node g is full at first, and whose working set has no room for starts of a."""

    is_full = True

    def find_room(self, request: Request, but: str | None = None) -> Sequence[BackendLedger] | Blocked:
        if not self.is_full and request.flow.tenant != "a":
            return (ledger_of(),)
        blocked = Blocked(request, {"b": Obstacle.CEILING if self.is_full else Obstacle.WORKING_SET})
        blocked.ceiling = "g" if self.is_full else ""
        return blocked

    def may_wake(self, request: Request, engine: str | None) -> bool:
        return not self.is_full

    def may_begin(self, request: Request) -> bool:
        return False


def test_the_next_tenant_at_a_node_goes_if_the_first_one_has_no_room_for_its_start() -> None:
    policy, room = named_policy("vtc"), FullNode()
    first, second = make_request("a"), make_request("b")
    for request in (first, second):
        policy.push(request, 0.0)
    assert policy.pop(0.0, room).request is first
    room.is_full = False
    assert policy.pop(0.0, room).request is second


def pool_of_queues(tree: Tree) -> AdmissionEngine:
    """A pool with a queue for each of two engines, of 1,000 tokens each: a request of 500 runs at the second."""
    engine = pool_of("e0", "e1", policy=named_policy("vtc", placement="deficits"), slots=4, tree=tree)
    for name in ("e0", "e1"):
        engine.backend_changed(name, Gauges(0.0, 0, 0, 0.0, 1_000, 16), 0.0)
    assert len(engine.arrived(make_request("busy", engine="e1", prompt=500), 0.0)) == 1
    return engine


def batch_of(sequences: int, engine: str, tenant: str = "d") -> Request:
    return make_request(of_batch(tenant), engine=engine, sequences=sequences)


def test_batch_leaves_no_room_for_a_request_that_waits_behind_a_larger_one_at_its_engine() -> None:
    engine = pool_of_queues(tree({}, {"a": (ROOT, {"max_running": 1})}))
    runs, large = make_request("a", engine="e1"), make_request("b", engine="e1", prompt=800)
    small, batch = make_request("a", engine="e1"), batch_of(1, "e0", "a")
    decisions = [each for one in (batch_of(1, "e0"), runs, small, large, batch) for each in engine.arrived(one, 0.0)]
    assert len(decisions) == 2
    assert engine.finished(runs.id, ServiceTokens(10, 50), 1.0, None) == [Dispatch(batch.id, "e0")]


def test_batch_is_not_preempted_for_a_request_that_waits_behind_a_larger_one_at_its_engine() -> None:
    kept = tree({"g": (ROOT, {"guaranteed_share": 0.25, "lending_limit": 0.0})}, {"kept": ("g", {})})
    engine = pool_of_queues(kept)
    batch = [batch_of(2, "e0"), batch_of(2, "e0"), batch_of(1, "e1")]  # with the busy one, all that is not kept
    large, small = make_request("b", engine="e1", prompt=800), make_request("a", engine="e1")
    decisions = [each for one in (*batch, large, small) for each in engine.arrived(one, 0.0)]
    assert [type(one) for one in decisions] == [Dispatch] * 3
