"""When tenants that come and go are due: a slot is kept for them then, and not otherwise."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from policies.capacity.visits import KNOWN_AFTER, TENANTS_MAX, Visits


def absent(tenant: str) -> bool:
    return True


def regular(every_s: float = 0.4, stay_s: float = 0.03, visits: int = 10) -> Visits:
    known = Visits()
    for number in range(visits):
        known.came("light", number * every_s)
        known.stayed("light", stay_s)
    return known


def test_a_tenant_that_comes_evenly_is_due_when_it_is_expected_and_only_then() -> None:
    visits = regular()
    assert [visits.due(3.6 + after_s, 0.0, absent) for after_s in (0.1, 0.3, 0.4, 0.405, 0.5)] == [0, 0, 1, 1, 0]


def test_a_slot_that_frees_later_must_be_kept_earlier() -> None:
    visits = regular()
    assert [visits.due(3.9, ahead_s, absent) for ahead_s in (0.0, 0.05, 0.1, 0.3)] == [0, 0, 1, 1]


def test_one_that_is_hardly_known_is_always_due() -> None:
    visits = regular(visits=KNOWN_AFTER - 1)
    assert visits.due(5.0, 0.0, absent) == 1


def test_one_that_waits_here_needs_nothing_kept() -> None:
    assert regular().due(4.0, 0.0, lambda tenant: False) == 0


def test_of_many_somebody_is_always_due_and_silent_ones_are_forgotten() -> None:
    visits = Visits(active_s=30.0)
    for number in range(TENANTS_MAX + 1):
        visits.came(f"tenant-{number}", 0.0)
    assert visits.due(29.0, 0.0, absent) == TENANTS_MAX
    visits.came("last", 30.0)
    assert len(visits) == TENANTS_MAX + 1
    visits.expire(31.0)
    assert (len(visits), visits.due(31.0, 0.0, absent)) == (1, 1)


@settings(max_examples=100, deadline=None)
@given(
    intervals=st.lists(st.floats(0.05, 5.0), min_size=KNOWN_AFTER, max_size=20),
    stay_s=st.floats(0.001, 1.0),
    ahead_s=st.floats(0.0, 0.5),
)
def test_what_is_kept_is_bounded_by_what_they_take(intervals: list[float], stay_s: float, ahead_s: float) -> None:
    """Between two requests a slot is kept for twice the stay, and for the time that it takes to become free."""
    visits, now = Visits(), 0.0
    for interval_s in intervals:
        now += interval_s
        visits.came("light", now)
        visits.stayed("light", stay_s)
    look_s = 0.01
    kept_s = sum(look_s * visits.due(now + tick * look_s, ahead_s, absent) for tick in range(1200))
    assert kept_s <= 2 * stay_s + ahead_s + 2 * look_s


def test_of_many_tenants_only_that_they_are_many_is_remembered() -> None:
    visits = Visits()
    for number in range(1000):
        visits.came(f"tenant-{number}", 1.0)
        assert len(visits) <= TENANTS_MAX + 1
    assert visits.due(1.0, 0.0, absent) == TENANTS_MAX
