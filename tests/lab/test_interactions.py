"""Whole interactions in virtual time: the next call follows the answer, a refusal cuts, and who hangs up is charged."""

from __future__ import annotations

import pytest

from backends.simulated.engine_model import EngineModel
from backends.simulated.engine_profiles import profile
from lab.fairserve.interaction_clients import InteractionClients, PlannedCall, PlannedInteraction
from lab.lab_driver import simulate
from policies.admission.engine import AdmissionEngine
from policies.admission.policy import Policy
from policies.orders.fcfs import Fcfs
from policies.request import Flow, Limit, Pressure, Refusal, Refused, Request
from simulation.run import Arrival


class RefusesStage(Fcfs):
    """Refuses every call of one stage."""

    def __init__(self, stage: int) -> None:
        super().__init__()
        self.stage = stage

    def refusal(self, request: Request, now: float, pressure: Pressure) -> Refused | None:
        if request.claim.stage == self.stage:
            return Refused(Refusal.RATE_LIMITED, 1.0, Limit("requests", 1, 0, 1.0))
        return None


CALLS = (PlannedCall(100, 10, 40, tools_s=0.5), PlannedCall(150, 20, 40, tools_s=0.25), PlannedCall(200, 30, 40))


def run_one(order: Fcfs) -> tuple[InteractionClients, list[Arrival]]:
    interactions = InteractionClients([PlannedInteraction("i", Flow("a"), 1.0, CALLS)])
    engine = AdmissionEngine(Policy(order))
    engine.add_backend("one")
    run = simulate(
        interactions.arrivals(), engine=engine, backends={"one": EngineModel(profile("demo"))},
        next_arrival=interactions.next_arrival,
    )  # fmt: skip
    return interactions, [record.arrival for record in run.records.values()]


def test_each_call_follows_the_answer_before_and_its_tools() -> None:
    interactions, arrivals = run_one(Fcfs())
    course = interactions.courses["i"]
    assert (course.completed, course.refused, course.cut, course.wasted_tokens) == (True, False, False, 0)
    assert [arrival.claim.stage for arrival in arrivals] == [1, 2, 3]
    assert [arrival.claim.begins for arrival in arrivals] == [True, False, False]
    assert [arrival.claim.ends for arrival in arrivals] == [False, False, True]
    ends_s = [record.finished_s or 0.0 for record in course.records]
    assert [arrival.arrived_s for arrival in arrivals] == [1.0, ends_s[0] + 0.5, ends_s[1] + 0.25]


@pytest.mark.interpreted_only("extends a policy")
@pytest.mark.parametrize(("stage", "wasted"), [(1, 0), (2, 110), (3, 110 + 170)])
def test_a_refused_call_cuts_its_interaction_and_wastes_what_was_spent(stage: int, wasted: int) -> None:
    interactions, arrivals = run_one(RefusesStage(stage))
    course = interactions.courses["i"]
    assert len(arrivals) == stage, "nothing follows a refusal"
    assert (course.completed, course.refused, course.cut) == (False, stage == 1, stage > 1)
    assert course.wasted_tokens == wasted
