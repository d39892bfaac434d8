"""Several gateways give the shares that one gives: production engines and their store's script, in virtual time."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache
from statistics import mean

import pytest

from backends.simulated.engine_model import EngineModel
from lab.service import service
from lab.several_gateways import Stall, simulate_together
from policies.replicas.messages import ReplicaReport, ReplicaView
from policies.request import Flow
from simulation.run import LOST, Arrival, Record, SimulationResult
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
    TwinStore,
    make_engine,
    off,
    play,
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
    until_s = 20.0
    store = TwinStore()
    found, _ = run(Floods(RAMP_S + until_s, where), gateways, store, policy=policy)
    assert refused(found) == set()
    assert off(found, RAMP_S, RAMP_S + until_s) <= 0.05
    assert found.waiting_max <= waiting_bound(gateways)
    assert sum(service(found.records.values(), RAMP_S, RAMP_S + until_s).values()) / until_s >= kept * one_gateway


def test_many_engines_are_kept_busy_however_many_requests_begin_between_two_exchanges() -> None:
    """They begin some ten in 25 ms. Whoever has to hear of every few of them leaves half of the engines idle."""
    two = flooded(2, skewed(2), TwinStore())
    assert sum(service(two.records.values(), RAMP_S, BUSY_S).values()) >= 0.97 * rate_of_one()
    assert off(two, RAMP_S, BUSY_S) <= 0.05


BUSY_S, ENGINES = RAMP_S + 3.0, 24


def flooded(of: int, where: Callable[..., int], store: TwinStore | None) -> SimulationResult:
    """Before many engines."""
    return run(Floods(BUSY_S, where, clients=ENGINES * SLOTS), of, store, engines=ENGINES)[0]


@cache
def rate_of_one() -> float:
    """Of one gateway before them."""
    return sum(service(flooded(1, lambda *_: 0, None).records.values(), RAMP_S, BUSY_S).values())


@pytest.mark.parametrize("policy", ["fairserve", "vtc", "fcfs"])
def test_a_gateway_that_comes_when_others_fill_the_engines_serves_those_of_its_clients_that_came_first(
    policy: str,
) -> None:
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

    found, _ = run(Later(until_s, lambda *_: 0, clients=20), 2, TwinStore(), policy=policy)
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
        found, _ = run(Floods(until_s, skewed(2)), 2, TwinStore(lost=0.05, seed=seed))
        assert refused(found) == set()
        assert found.waiting_max < SLOTS
        missed.append(off(found, RAMP_S, until_s))
    # A gateway hears nothing for 0.35 s of every exchange that is lost, one in ten: it is late to use what it is owed.
    # By seed 0.01 to 0.30.
    assert sum(missed) / len(missed) <= 0.15


def test_while_the_store_is_gone_each_goes_on_with_its_share() -> None:
    gone_s, back_s, until_s = 10.0, 20.0, 50.0
    store = TwinStore(gone=lambda now: gone_s <= now < back_s)
    found, _ = run(Floods(until_s, skewed(2)), 2, store)
    assert refused(found) == set()
    assert off(found, gone_s, back_s) <= 0.15
    assert off(found, back_s + 10.0, until_s) <= 0.05


def test_what_a_gateway_had_that_died_comes_back() -> None:
    died_s, until_s = 8.0, 30.0
    at: list[tuple[float, int]] = []

    class Watched(TwinStore):
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
    found, _ = run(floods, 2, TwinStore(), stalls=[Stall(1, stands_s, goes_on_s)])
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
    found = play(rounds, 2, TwinStore(), policy)
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
    found = play(rounds, 2, TwinStore(), "vtc")
    assert ratios(found, rounds) == pytest.approx([1.0] * 3, rel=0.05)


def test_rounds_after_the_store_has_lost_all() -> None:
    rounds = Rounds(2, 5.0, LIGHT_DRAINS_LAST, length_s=20.0)

    class Flushed(TwinStore):
        is_flushed = False

        def exchange(self, gateway: int, number: int, told: ReplicaReport, now: float) -> ReplicaView | None:
            if len(rounds.begins_s) == 2 and not self.is_flushed and now > rounds.begins_s[1] - 2.0:
                self.is_flushed = True
                self.flush()
            return super().exchange(gateway, number, told, now)

    store = Flushed()
    found = play(rounds, 2, store, "vtc")
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
        store=TwinStore(),
        stalls=[Stall(1, 26.0)],
    )
    assert rounds.begins_s[1] > 26.0, "it died in the pause"
    assert refused(found) == set()
    assert ratios(found, rounds) == pytest.approx([4.0] * 2, rel=0.05)
