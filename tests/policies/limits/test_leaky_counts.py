"""Leaky counts: so much at once, and after that so much per second."""

from __future__ import annotations

from policies.limits.fullness import given_up
from policies.limits.leaky_counts import LeakyCounts


def test_so_much_at_once_and_then_so_much_per_second() -> None:
    counts = LeakyCounts(2.0, 3.0)
    assert [counts.take("a", 10.0) for _ in range(5)] == [0.0, 0.0, 0.0, 0.5, 0.5]
    assert counts.wait_s("a", 10.25) == 0.25
    assert counts.take("b", 10.0) == 0.0, "another member does not notice"
    assert [counts.take("a", 10.5) for _ in range(2)] == [0.0, 0.5]
    taken = sum(counts.take("a", 20.0 + step / 100) == 0.0 for step in range(1000))
    assert taken == 3 + 2 * 10 - 1, "who asks all the time gets the rate, not less"


def test_a_clock_that_stands_still_or_goes_back_forgets_nothing() -> None:
    counts = LeakyCounts(1.0, 1.0)
    assert [counts.take("a", now) for now in (5.0, 5.0, 4.0)] == [0.0, 1.0, 2.0]


def test_the_members_are_bounded() -> None:
    counts = LeakyCounts(1.0, 1.0, members_max=2)
    for member in "abc":
        counts.take(member, 0.0)
    assert [counts.wait_s(member, 0.0) for member in "abc"] == [0.0, 1.0, 1.0], "the one silent for longest"


def test_of_a_full_table_the_tenant_that_has_most_loses_its_oldest() -> None:
    assert given_up({"few": {1: None}, "many": dict.fromkeys(range(5))}, 200) == [("many", 0), ("many", 1)]


def test_whoever_does_it_again_drives_out_nobody() -> None:
    counts = LeakyCounts(per_s=0.001, at_once_max=2, members_max=2)
    for now, member in enumerate("abb"):
        assert counts.take(member, float(now)) == 0.0
    assert counts.take("a", 3.0) == 0.0
    assert counts.wait_s("a", 4.0) > 0.0
