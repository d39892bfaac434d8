"""A gateway that has just started: a flood, and one light request. Nobody is worse off than under plain VTC."""

from __future__ import annotations

from random import Random

import pytest

from backends.simulated.engine_model import EngineModel
from backends.simulated.engine_profiles import profile
from lab.lab_driver import simulate
from policies.admission.engine import AdmissionEngine
from policies.admission.named import named_policy
from policies.orders.cost import LinearCost
from policies.request import Flow, ServiceTokens
from simulation.run import Arrival, Record, SimulationResult

HEAVY = Flow("heavy")
LIGHT = {"another tenant": Flow("light"), "another user": Flow("heavy", "", "light"), "another app": Flow("heavy", "b")}
AFTER_S = (0.1, 1.0, 5.0)
QUANTUM = 20_000.0
RUNNING = 32 * 2 * 120
"""What the answers of the running requests may still add."""


def fresh(policy: str, light: Flow, after_s: float, *, engines: int = 1, streamed: bool = False) -> SimulationResult:
    """Short answers where long ones are allowed: what a guess of their length gets most wrong."""
    lengths = Random(7)
    arrivals = [
        Arrival(f"heavy-{number:03}", HEAVY, 0.001 * number, 20, lengths.randint(40, 120), streamed=streamed)
        for number in range((200 if after_s > 1.0 else 100) * engines)  # so many that some wait for longer
    ]
    arrivals.append(Arrival("light", light, after_s, 9, 5))
    names = [f"engine-{number}" for number in range(engines)]
    admission = AdmissionEngine(named_policy(policy))
    for name in names:
        admission.add_backend(name)
    return simulate(
        sorted(arrivals, key=lambda arrival: arrival.arrived_s),
        engine=admission,
        backends={name: EngineModel(profile("demo")) for name in names},
    )


def wait_s(run: SimulationResult) -> float:
    waited_s = run.records["light"].ttft_s
    assert waited_s is not None
    return waited_s


def passed_by(run: SimulationResult) -> float:
    """Service of the requests that were dispatched while the light one waited."""
    cost, light = LinearCost(), run.records["light"]
    assert light.dispatched_s is not None
    return sum(
        cost(ServiceTokens(record.arrival.prompt_tokens, record.arrival.output_tokens))
        for record in run.records.values()
        if record.dispatched_s is not None and light.arrival.arrived_s < record.dispatched_s < light.dispatched_s
    )


@pytest.mark.parametrize("engines", [1, 2])
@pytest.mark.parametrize("streamed", [True, False], ids=["streamed", "whole"])
@pytest.mark.parametrize("after_s", AFTER_S)
@pytest.mark.parametrize("light", LIGHT.values(), ids=LIGHT)
def test_what_has_learned_nothing_is_as_fair_as_plain_vtc(
    light: Flow, after_s: float, streamed: bool, engines: int
) -> None:
    plain_s = wait_s(fresh("vtc", light, after_s, engines=engines, streamed=streamed))
    for policy in ("fairserve", "wsc", "lcf"):
        run = fresh(policy, light, after_s, engines=engines, streamed=streamed)
        assert wait_s(run) <= 2 * plain_s or not passed_by(run), policy


@pytest.mark.parametrize("after_s", AFTER_S)
@pytest.mark.parametrize("policy", ["rr", "dlpm", "d2lpm"])
def test_a_quantum_is_all_that_goes_before(policy: str, after_s: float) -> None:
    """Within a round the flood may go first: that is what these policies promise, and no more."""
    run = fresh(policy, LIGHT["another tenant"], after_s)
    assert passed_by(run) <= QUANTUM + RUNNING


def many_light(policy: str, until_s: float = 15.0) -> list[float]:
    """First tokens of 200 tenants that ask now and then, beside a flood whose clients ask again at once."""
    random = Random(2)
    arrivals = [Arrival(f"heavy-{client}-", HEAVY, random.uniform(0.0, 0.5), 200, 100) for client in range(100)]
    for number in range(450):
        light = Flow(f"light-{random.randrange(200)}")
        arrivals.append(Arrival(f"light-{number}", light, random.uniform(0.0, until_s), 150, 60))

    def following(record: Record, now: float) -> Arrival | None:
        arrival = record.arrival
        is_over = arrival.flow != HEAVY or now > until_s
        return None if is_over else Arrival(f"{arrival.id}x", HEAVY, now, 200, 100)

    admission = AdmissionEngine(named_policy(policy))
    admission.add_backend("engine")
    run = simulate(
        sorted(arrivals, key=lambda arrival: arrival.arrived_s),
        engine=admission,
        backends={"engine": EngineModel(profile("demo"))},
        next_arrival=following,
    )
    return sorted(
        record.ttft_s
        for record in run.records.values()
        if record.arrival.flow != HEAVY and record.ttft_s is not None
    )  # fmt: skip


def test_many_light_tenants_wait_as_under_plain_vtc() -> None:
    """What nobody has learned is not charged ahead: the refunds of a long guess would put the flood before them."""
    plain, found = many_light("vtc"), many_light("fairserve")
    for part in (0.5, 0.9, 0.99):
        place = int(part * len(plain))
        assert found[place] <= 1.35 * plain[place]
