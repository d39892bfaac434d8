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
from simulation.run import Arrival, SimulationResult

HEAVY = Flow("heavy")
LIGHT = {"another tenant": Flow("light"), "another user": Flow("heavy", "", "light"), "another app": Flow("heavy", "b")}
AFTER_S = (0.1, 1.0, 5.0)


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
    for policy in ("fairserve", "wsc"):
        run = fresh(policy, light, after_s, engines=engines, streamed=streamed)
        assert wait_s(run) <= 2 * plain_s or not passed_by(run), policy
