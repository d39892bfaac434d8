"""Several gateways give the shares that one gives: production engines and their store's script, in virtual time."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache
from random import Random
from statistics import mean

import pytest

from backends.simulated.engine_model import EngineModel
from lab.service import service
from lab.several_gateways import Stall, simulate_together
from policies.admission.engine import AdmissionEngine
from policies.admission.named import named_policy
from policies.queue.bounds import QueueLimits
from policies.replicas.messages import ReplicaReport, ReplicaView
from policies.request import BATCH, Flow, of_batch, payer
from policies.tree.terms import Tree
from simulation.run import LOST, Arrival, Record, SimulationResult
from tests.policies.trees import parts as parts_of
from tests.policies.trees import random_tree
from tests.simulation.replicas import (
    BACKEND,
    ENGINE,
    LIGHT_DRAINS_LAST,
    MEMBER_S,
    RAMP_S,
    SLOTS,
    WEIGHTS,
    Floods,
    Rounds,
    SimulatedStore,
    make_engine,
    off,
    random_of,
    refused,
    run,
    skewed,
    waiting_bound,
)


@pytest.fixture(scope="module")
def one_gateway() -> float:
    """Service in a second, of one gateway."""
    until_s = 20.0
    found, _ = run(Floods(until_s, lambda *_: 0), 1, None)
    return sum(service(found.records.values(), RAMP_S, until_s).values()) / (until_s - RAMP_S)


@pytest.mark.parametrize(
    ("gateways", "where", "policy", "kept"),
    [
        pytest.param(2, skewed(2, moves_s=7.0), "vtc", 0.96, id="2-moving"),
        pytest.param(4, skewed(4), "vtc", 0.98, id="4-all"),
        pytest.param(4, random_of(4), "fairserve", 0.98, id="4-random"),
    ],
)
def test_shares_are_those_of_one_gateway_wherever_traffic_comes(
    gateways: int, where: Callable[..., int], policy: str, kept: float, one_gateway: float
) -> None:
    """`kept`: throughput, of that of one gateway."""
    until_s = 14.0
    store = SimulatedStore()
    found, _ = run(Floods(RAMP_S + until_s, where), gateways, store, policy=policy)
    assert refused(found) == set()
    assert off(found, RAMP_S, RAMP_S + until_s) <= 0.05
    assert found.waiting_max <= waiting_bound(gateways)
    assert sum(service(found.records.values(), RAMP_S, RAMP_S + until_s).values()) / until_s >= kept * one_gateway


def test_many_engines_are_kept_busy_however_many_requests_begin_between_two_exchanges() -> None:
    """They begin some ten in 25 ms. Whoever has to hear of every few of them leaves half of the engines idle."""
    two = flooded(2, skewed(2), SimulatedStore())
    assert sum(service(two.records.values(), RAMP_S, BUSY_S).values()) >= 0.97 * rate_of_one()
    assert off(two, RAMP_S, BUSY_S) <= 0.05


BUSY_S, ENGINES = RAMP_S + 3.0, 24


def flooded(of: int, where: Callable[..., int], store: SimulatedStore | None) -> SimulationResult:
    """Before many engines."""
    return run(Floods(BUSY_S, where, clients=ENGINES * SLOTS), of, store, engines=ENGINES)[0]


@cache
def rate_of_one() -> float:
    """Of one gateway before them."""
    return sum(service(flooded(1, lambda *_: 0, None).records.values(), RAMP_S, BUSY_S).values())


@pytest.mark.parametrize("policy", ["fairserve", "vtc", "fcfs"])
def test_a_gateway_that_comes_to_full_engines_serves_those_of_its_clients_that_came_first(policy: str) -> None:
    """All tenants are at both, so the counters are as high there: what is owed to whom cannot tell who has no place."""
    begins_s, until_s = 5.0, 25.0

    @dataclass
    class Later(Floods):
        """A client stays at its gateway; those of the second one begin when the first has filled the engine."""

        def first(self) -> list[Arrival]:
            return [self.of(home, tenant, home * begins_s)
                    for home in (0, 1) for tenant in WEIGHTS for _ in range(self.clients)]  # fmt: skip

        def next(self, record: Record, now: float) -> Arrival | None:
            return self.of(record.gateway, record.arrival.flow.tenant, now) if now < until_s else None

        def at(self, arrival: Arrival, now: float) -> int:
            return int(arrival.id.partition("-")[0])

        def of(self, home: int, tenant: str, now: float) -> Arrival:
            arrival = self.arrival(tenant, now)
            return replace(arrival, id=f"{home}-{arrival.id}")

    found, _ = run(Later(until_s, lambda *_: 0, clients=20), 2, SimulatedStore(), policy=policy)
    assert refused(found) == set()
    waits: dict[str, list[list[float]]] = {tenant: [[], []] for tenant in WEIGHTS}
    for record in found.records.values():
        if record.dispatched_s is not None and record.arrival.arrived_s >= begins_s:
            waited = record.dispatched_s - record.arrival.arrived_s
            waits[record.arrival.flow.tenant][record.gateway].append(waited)
    for first, second in waits.values():
        assert max(second) <= 1.3 * max(first)
        assert mean(second) <= 1.25 * mean(first)


def test_exchanges_that_get_lost_are_made_good() -> None:
    until_s = 30.0
    missed = []
    for seed in range(5):
        found, _ = run(Floods(until_s, skewed(2)), 2, SimulatedStore(lost=0.05, seed=seed))
        assert refused(found) == set()
        assert found.waiting_max < SLOTS
        missed.append(off(found, RAMP_S, until_s))
    # A gateway hears nothing for 0.35 s of every exchange that is lost, one in ten: it is late to use what it is owed.
    # By seed 0.01 to 0.30.
    assert sum(missed) / len(missed) <= 0.15


def test_while_the_store_is_gone_each_goes_on_with_its_share() -> None:
    gone_s, back_s, until_s = 10.0, 20.0, 50.0
    store = SimulatedStore(gone=lambda now: gone_s <= now < back_s)
    found, _ = run(Floods(until_s, skewed(2)), 2, store)
    assert refused(found) == set()
    assert off(found, gone_s, back_s) <= 0.15
    assert off(found, back_s + 10.0, until_s) <= 0.05


def test_what_a_gateway_had_that_died_comes_back() -> None:
    died_s, until_s = 8.0, 30.0
    at: list[tuple[float, int]] = []

    class Watched(SimulatedStore):
        def exchange(self, gateway: int, number: int, report: ReplicaReport, now: float) -> ReplicaView | None:
            view = super().exchange(gateway, number, report, now)
            if gateway == 0:
                at.append((now, self.granted[0]))
            return view

    floods = Floods(until_s, lambda tenant, now, rng: rng.randrange(2) if now < died_s else 0)
    found, _ = run(floods, 2, Watched(), stalls=[Stall(1, died_s)])
    assert refused(found) == {LOST}
    assert max(granted for now, granted in at if RAMP_S < now < died_s) < SLOTS
    assert max(granted for now, granted in at if now < died_s + MEMBER_S + 0.1) >= SLOTS
    assert off(found, died_s + MEMBER_S, until_s) <= 0.05
    # Until then the other one finds slots empty that it takes to be used, and dispatches more to fill them.
    assert found.waiting_max <= waiting_bound(2) + SLOTS // 2


def test_a_gateway_that_stood_still_spends_nothing_that_is_no_longer_its_own() -> None:
    stands_s, goes_on_s, until_s = 8.0, 13.0, 30.0
    floods = Floods(until_s, lambda tenant, now, rng: 0 if stands_s <= now < goes_on_s else rng.randrange(2))
    found, _ = run(floods, 2, SimulatedStore(), stalls=[Stall(1, stands_s, goes_on_s)])
    assert refused(found) == set()
    theirs = [record.dispatched_s for record in found.records.values() if record.gateway == 1 and record.dispatched_s]
    assert min(one for one in theirs if one >= stands_s) > goes_on_s, "it asked before it dispatched anything"
    # As after a death, the other one has dispatched more than there are slots; who goes on adds nothing to that.
    assert found.waiting_max <= waiting_bound(2) + SLOTS // 4
    assert off(found, goes_on_s, until_s) <= 0.05


# --- what was idle for a while comes back: every round of traffic is served by weight ---


def ratios(found: SimulationResult, rounds: Rounds) -> list[float]:
    """In each round, what the first received over what the second did."""
    ratios = []
    for begins_s in rounds.begins_s:
        received = [
            sum(service(records_of(found, name), begins_s + RAMP_S, begins_s + rounds.length_s).values())
            for name in rounds.clients
        ]
        ratios.append(received[0] / received[1])
    return ratios


def records_of(found: SimulationResult, name: str) -> list[Record]:
    return [record for record in found.records.values() if record.arrival.id.startswith(f"{name}-")]


HEAVY_DRAINS_LAST = {"heavy": 200, "light": 24}


@pytest.mark.parametrize(
    ("policy", "clients", "pause_s"),
    [
        ("vtc", LIGHT_DRAINS_LAST, 0.0),
        ("fairserve", HEAVY_DRAINS_LAST, 12.0),
    ],
)
def test_every_round_is_served_by_weight_whoever_was_idle(policy: str, clients: dict[str, int], pause_s: float) -> None:
    rounds = Rounds(3, pause_s, clients, length_s=20.0)
    found = run(rounds, 2, SimulatedStore(), policy=policy)[0]
    assert refused(found) == set()
    assert len(rounds.begins_s) == 3
    assert ratios(found, rounds) == pytest.approx([4.0] * len(rounds.begins_s), rel=0.05)


def test_every_round_is_equal_between_the_flows_of_a_tenant() -> None:
    rounds = Rounds(
        3,
        12.0,
        {"one": 20, "other": 60},
        flows={"one": Flow("tenant", "app", "one"), "other": Flow("tenant", "app", "other")},
        weights={"one": 1.0, "other": 1.0},
        home={"one": 0, "other": 1},
    )
    found = run(rounds, 2, SimulatedStore(), policy="vtc")[0]
    assert ratios(found, rounds) == pytest.approx([1.0] * 3, rel=0.05)


def test_rounds_after_the_store_has_lost_all() -> None:
    rounds = Rounds(2, 5.0, LIGHT_DRAINS_LAST, length_s=20.0)

    class Flushed(SimulatedStore):
        is_flushed = False

        def exchange(self, gateway: int, number: int, told: ReplicaReport, now: float) -> ReplicaView | None:
            if len(rounds.begins_s) == 2 and not self.is_flushed and now > rounds.begins_s[1] - 2.0:
                self.is_flushed = True
                self.flush()
            return super().exchange(gateway, number, told, now)

    store = Flushed()
    found = run(rounds, 2, store, policy="vtc")[0]
    assert store.is_flushed
    assert ratios(found, rounds) == pytest.approx([4.0] * len(rounds.begins_s), rel=0.05)


def test_rounds_after_the_gateway_died_at_which_the_last_one_left() -> None:
    rounds = Rounds(2, 10.0, LIGHT_DRAINS_LAST)

    def home(arrival: Arrival, now: float) -> int:
        """The light one comes to the second gateway, and to the third one when that has died."""
        if arrival.id.startswith("heavy"):
            return 0
        return 1 if len(rounds.begins_s) == 1 else 2

    engines = [make_engine("vtc") for _ in range(3)]
    found = simulate_together(
        rounds.first(),
        engines=engines,
        backends={BACKEND: EngineModel(ENGINE)},
        next_arrival=rounds.next,
        arrives_at=home,
        store=SimulatedStore(),
        stalls=[Stall(1, 26.0)],
    )
    assert rounds.begins_s[1] > 26.0, "it died in the pause"
    assert refused(found) == set()
    assert ratios(found, rounds) == pytest.approx([4.0] * 2, rel=0.05)


# --- a tree of groups: each tenant and group has its part in every round, wherever it comes in ---


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
        arrives_at=rounds.at, store=SimulatedStore(),
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
        store=SimulatedStore(),
        until_s=65.0,
    )
    waits = sorted([found.records[one.id].ttft_s for one in chat])
    assert waits[len(waits) // 2] < 2.0
    assert waits[int(0.95 * len(waits))] < 5.5
    assert sum(engine.requests.preemption.preempted for engine in engines) >= 5
