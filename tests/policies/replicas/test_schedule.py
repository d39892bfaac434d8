"""When do gateways exchange, and what does one that stood still take an answer for?"""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from policies.admission.decisions import Decision
from policies.replicas.messages import ReplicaReport, ReplicaView
from policies.replicas.schedule import Schedule
from tests.kit.typed_script_store import TypedScriptStore


class ReportSource:
    """A gateway that has something to tell or nothing, and keeps as of when each answer is."""

    def __init__(self, *, is_busy: bool = True, is_urgent: bool = False) -> None:
        self.as_of_s: list[float] = []
        self.is_busy = lambda: is_busy
        self.is_urgent = lambda: is_urgent
        self.cut_off = lambda now: ("alone",)
        self.report = lambda now: ReplicaReport([], [], [], [], [], [], [], 0.0)

    def receive(self, view: ReplicaView, asked_s: float, now: float) -> Sequence[Decision]:
        self.as_of_s.append(asked_s)
        return ()


def exchanges(schedule: Schedule, *times_s: float) -> None:
    store = TypedScriptStore()
    for now in times_s:
        number, report = schedule.ask(now)
        schedule.answered(store.exchange("one", number, report, int(1000 * now)), now)


@pytest.mark.interpreted_only("a gateway that tells nothing")
def test_an_answer_to_a_gateway_that_stood_still_is_as_old_as_the_answer_before() -> None:
    source = ReportSource()
    exchanges(Schedule(source), 0.0, 0.025, 5.0, 5.001)
    assert source.as_of_s == [0.0, 0.025, 0.025, 5.001]


@pytest.mark.interpreted_only("a gateway that tells nothing")
@pytest.mark.parametrize(
    ("is_busy", "is_urgent", "due_s"), [(True, False, 0.025), (False, False, 0.1), (False, True, 0.005)]
)
def test_when_gateways_exchange(is_busy: bool, is_urgent: bool, due_s: float) -> None:
    schedule = Schedule(ReportSource(is_busy=is_busy, is_urgent=is_urgent))
    exchanges(schedule, 0.0)
    assert schedule.due_s() == pytest.approx(due_s)
    schedule.ask(1.0)
    assert schedule.lost(0.99) == ()
    assert len(schedule.lost(1.01)) == 1
    assert schedule.due_s() == pytest.approx(1.11)
