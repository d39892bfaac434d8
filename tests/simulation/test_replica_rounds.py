"""What was idle for a while comes back: every round of traffic is served by weight, whoever was idle before."""

from __future__ import annotations

import pytest

from backends.simulated.engine_model import EngineModel
from lab.service import service
from lab.several_gateways import Stall, simulate_together
from policies.replicas.messages import ReplicaReport, ReplicaView
from policies.request import Flow
from simulation.run import Arrival, Record, SimulationResult
from tests.simulation.replicas import (
    BACKEND,
    ENGINE,
    LIGHT_DRAINS_LAST,
    RAMP_S,
    Rounds,
    TwinStore,
    make_engine,
    play,
    refused,
)


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
