"""A tree of groups before several gateways: each tenant and group has its part in every round, wherever it comes in."""

from __future__ import annotations

from dataclasses import replace
from random import Random

import pytest

from backends.simulated.engine_model import EngineModel
from lab.service import service
from lab.several_gateways import simulate_together
from policies.admission.engine import AdmissionEngine
from policies.admission.named import named_policy
from policies.queue.bounds import QueueLimits
from policies.request import BATCH, Flow, of_batch, payer
from policies.tree.terms import Tree
from simulation.run import Arrival, SimulationResult
from tests.policies.trees import parts as parts_of
from tests.policies.trees import random_tree
from tests.simulation.replicas import BACKEND, ENGINE, RAMP_S, SLOTS, Rounds, TwinStore, refused

GATEWAYS = 3
LENGTH_S = 30.0
KNOWN_S = 10.0
"""A gateway that has just started knows of nobody elsewhere: whom it serves then gets more, and pays it back."""


def play_tree(tree: Tree, rounds: Rounds, policy: str) -> SimulationResult:
    engines = [AdmissionEngine(named_policy(policy, batch_guaranteed_share=0.2), tree=tree) for _ in range(GATEWAYS)]
    for engine in engines:
        engine.add_backend(BACKEND, max_num_seqs=SLOTS)
    found = simulate_together(
        rounds.first(), engines=engines, backends={BACKEND: EngineModel(ENGINE)}, next_arrival=rounds.next,
        arrives_at=rounds.at, store=TwinStore(),
    )  # fmt: skip
    assert refused(found) == set()
    return found


def received(found: SimulationResult, tree: Tree, from_s: float, until_s: float) -> dict[str, float]:
    """The part of the service of each leaf and group in this time."""
    of_leaves = service(found.records.values(), from_s, until_s)
    whole = sum(of_leaves.values())
    parts = {leaf: got / whole for leaf, got in of_leaves.items()}
    for leaf, got in of_leaves.items():
        place = tree.tenants.get(payer(leaf))
        while place is not None and place.group:
            parts[place.group] = parts.get(place.group, 0.0) + got / whole
            place = tree.groups[place.group]
    return parts


def rounds_of(leaves: list[str], weights: dict[str, float], rng: Random) -> Rounds:
    return Rounds(
        2, 8.0, {leaf: rng.randint(20, 30) for leaf in leaves}, length_s=LENGTH_S,
        flows={leaf: Flow(leaf, "app", "user") for leaf in leaves}, weights=weights,
        home={leaf: rng.randrange(GATEWAYS) for leaf in leaves},
    )  # fmt: skip


@pytest.mark.parametrize(("policy", "seed"), [("vtc", 59), ("fairserve", 62)])  # floors decide in both
def test_random_trees_with_floors_in_every_round(policy: str, seed: int) -> None:
    rng = Random(seed)
    tree = random_tree(rng)
    leaves = [*tree.tenants]
    rounds = rounds_of(leaves, {leaf: tree.tenants[leaf].settings.weight for leaf in leaves}, rng)
    found = play_tree(tree, rounds, policy)
    expected = parts_of(tree, set(leaves))
    for begins_s in rounds.begins_s:
        got = received(found, tree, begins_s + (RAMP_S if begins_s else KNOWN_S), begins_s + LENGTH_S)
        for name, part in got.items():
            assert part == pytest.approx(expected[name], rel=0.09), name


def test_work_that_can_wait_has_its_floor_beside_others_at_other_gateways() -> None:
    leaves = ["a" + BATCH, "b" + BATCH, "c"]
    rounds = rounds_of(leaves, dict.fromkeys(leaves, 1.0), Random(3))
    rounds.home = {"a" + BATCH: 0, "b" + BATCH: 1, "c": 2}
    tree = Tree()
    found = play_tree(tree, rounds, "vtc")
    for begins_s in rounds.begins_s:
        got = received(found, tree, begins_s + RAMP_S, begins_s + LENGTH_S)
        assert got["c"] == pytest.approx(0.8, rel=0.05)
        assert got["a" + BATCH] == pytest.approx(0.1, rel=0.1)


@pytest.mark.slow
def test_batch_makes_room_for_what_waits_at_another_gateway() -> None:
    """Answers of batch take eleven seconds, and fill the engine: who waits for one to end waits for half of that."""
    batch = [Arrival(f"b{n}", Flow(of_batch("night")), 0.5 + 0.01 * n, 300, 500, streamed=False) for n in range(200)]
    chat = [Arrival(f"a{n}", Flow("chat"), 10.0 + 2.0 * n, 100, 20) for n in range(25)]
    limits = QueueLimits(queue_wait_s_max=1e5, queue_wait_s_max_inside=1e5)
    engines = [AdmissionEngine(named_policy("fairserve"), limits=limits) for _ in range(2)]
    for engine in engines:
        engine.add_backend(BACKEND, max_num_seqs=8)
    found = simulate_together(
        sorted([*batch, *chat], key=lambda one: one.arrived_s),
        engines=engines,
        backends={BACKEND: EngineModel(replace(ENGINE, max_num_seqs=8))},
        arrives_at=lambda one, now: int(one.flow.tenant == "chat"),
        store=TwinStore(),
        until_s=65.0,
    )
    waits = sorted([found.records[one.id].ttft_s for one in chat])
    assert waits[len(waits) // 2] < 2.0
    assert waits[int(0.95 * len(waits))] < 5.5
    assert sum(engine.requests.preemption.preempted for engine in engines) >= 5
