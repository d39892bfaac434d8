"""What other gateways are told of is bounded, however much changes before they can be told."""

from __future__ import annotations

from policies.limits.sliding_counts import SlidingCounts
from policies.queue.backlog import Backlog
from policies.replicas.counters import SharedCounters
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
