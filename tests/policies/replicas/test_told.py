"""What other gateways are told of is bounded, however much changes before they can be told."""

from __future__ import annotations

from math import inf, nan

import pytest

from policies.limits.sliding_counts import SlidingCounts
from policies.queue.backlog import Backlog
from policies.replicas.counters import SharedCounters
from policies.replicas.exchange import Exchange
from policies.replicas.messages import Charge, Heard, Holding, Presence, Told, is_answer
from policies.replicas.tallies import SharedCounts
from tests.policies.making import make_request


def test_counters_that_cannot_be_told_to_other_gateways_are_bounded() -> None:
    backlog = Backlog(flows_max=8)
    shared = SharedCounters(backlog, epoch_s=0.0)
    for number in range(100):
        request = make_request("tenant", app="app", user=f"user{number}")
        backlog.push(request)
        backlog.withdraw(request)
    assert backlog.changed is not None
    assert len(backlog.changed) <= 10
    charges, _ = shared.tell(0.0)
    assert len(charges) <= 10


def test_counts_that_cannot_be_told_to_other_gateways_are_bounded() -> None:
    counts = SlidingCounts(60.0, members_max=8)
    shared = SharedCounts("users", counts, epoch_s=0.0)
    for number in range(100):
        counts.at(10.0 * number)
        count = counts.of(number, 1.0)
        count.requests += 1
        counts.note_change(number, count)
    assert len(shared.tell(1000)) == 8


@pytest.mark.parametrize(
    ("heard", "why"),
    [
        ({"totals": [nan]}, "not a number"),
        ({"totals": [inf]}, "infinite"),
        ({"totals": [-2e18]}, "more than anybody counts"),
        ({"totals": []}, "less than was told"),
        ({"totals": [1.0, 2.0]}, "more than was told"),
        ({"grants": []}, "no grant"),
        ({"presence": Presence(weights=nan)}, "not a number within"),
        ({"opened": [None]}, "an interaction that was not told"),
    ],
)
def test_what_is_no_answer_to_what_was_told_is_known(heard: dict[str, object], why: str) -> None:
    told = Told([], Presence(), [Holding("b", 1, 10, 10, 4, 0)], [Charge("t", 0.0, 5.0, False)], [], [], [], [], 0.0)
    answer: Heard = Exchange().exchange("one", 1, told, 0)
    assert is_answer(answer, told)
    assert not is_answer(answer._replace(**heard), told), why  # type: ignore[arg-type]
