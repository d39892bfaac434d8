"""What does a gateway that stood still take an answer for?"""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from policies.admission.decisions import Decision
from policies.replicas.messages import ReplicaReport, ReplicaView
from policies.replicas.schedule import Schedule
from tests.kit.reference_store import ReferenceStore


class Speaker:
    """It has nothing to report, and keeps as of when each answer is."""

    def __init__(self) -> None:
        self.as_of_s: list[float] = []

    def is_urgent(self) -> bool:
        return False

    def is_busy(self) -> bool:
        return True

    def report(self, now: float) -> ReplicaReport:
        return ReplicaReport([], [], [], [], [], [], [], 0.0)

    def receive(self, view: ReplicaView, asked_s: float, now: float) -> Sequence[Decision]:
        self.as_of_s.append(asked_s)
        return ()

    def cut_off(self, now: float) -> Sequence[Decision]:
        return ()


@pytest.mark.interpreted_only("a gateway that tells nothing")
def test_an_answer_to_a_gateway_that_stood_still_is_as_old_as_the_answer_before() -> None:
    speaker, store = Speaker(), ReferenceStore()
    schedule = Schedule(speaker)
    for now in (0.0, 0.025, 5.0, 5.001):
        number, report = schedule.ask(now)
        schedule.answered(store.exchange("one", number, report, int(1000 * now)), now)
    assert speaker.as_of_s == [0.0, 0.025, 0.025, 5.001]
