"""Sliding counts, the throttle and the classic limits."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from policies.limits.leaky_counts import LeakyCounts
from policies.limits.quotas import Quota, Quotas
from policies.limits.sliding_counts import PARTS, SlidingCounts, rolling
from policies.limits.throttle import Ceilings, Throttle, ThrottleSettings
from policies.recent import given_up
from policies.replicas.messages import BUCKETS_MAX
from policies.request import CALM, Pressure, Rejection, RejectReason, Request, ServiceTokens
from tests.policies.limits.sharing import limit_of
from tests.policies.making import make_request

OVERLOADED = Pressure(True, "full")
NO_LIMITS = Ceilings()
TEN = Ceilings(starts=10)


# --- counts ---


def counting(members_max: int = 200_000, parts: int = PARTS) -> SlidingCounts:
    return SlidingCounts(rolling(60.0, parts), members_max=members_max)


def add(counts: SlidingCounts, member: object, requests: int, now: float) -> None:
    counts.at(now)
    counts.add(member, (0, requests, 0, 0))


@settings(max_examples=300)
@given(
    events=st.lists(
        st.tuples(st.sampled_from([0.0, 0.01, 0.3, 0.99, 1.0, 1.7, 19.0, 58.9, 59.99, 60.0, 61.0]), st.integers(1, 30)),
        max_size=80,
    ),
    limit=st.integers(20, 60),
    parts=st.sampled_from([1, 7, PARTS]),
    calendar=st.booleans(),
)
def test_no_window_holds_more_than_the_limit_and_the_time_that_is_named_is_exact(
    events: list[tuple[float, int]], limit: int, parts: int, calendar: bool
) -> None:
    window = rolling(60.0, parts)
    counts = SlidingCounts(window._replace(kept=1) if calendar else window)
    admitted: list[tuple[float, int]] = []
    now = 0.0
    for step_s, amount in events:
        now += step_s
        counts.at(now)
        found = counts.limit("requests", 1, "a", amount, limit, now)
        used = sum([each for then, each in admitted if window.bucket(then) >= counts.oldest])
        assert (found.remaining, counts.sums("a", now)[1]) == (max(0, limit - used), used)
        assert (found.reset_s == 0.0) == (used + amount <= limit)
        if found.reset_s:
            assert found.reset_s <= found.window_s
            if amount <= limit:
                assert counts.limit("requests", 1, "a", amount, limit, now + found.reset_s + 1e-6).reset_s == 0.0
                assert counts.limit("requests", 1, "a", amount, limit, now + found.reset_s - 1e-6).reset_s > 0.0
            continue
        counts.add("a", (0, amount, 0, 0))
        admitted.append((now, amount))
    for end_s, _ in admitted:
        within = [each for then, each in admitted if then <= end_s and (
            window.bucket(then) == window.bucket(end_s) if calendar else end_s - 60.0 < then
        )]  # fmt: skip
        assert sum(within) <= limit


def test_who_asks_all_the_time_gets_nearly_all_of_the_limit() -> None:
    quotas = Quotas(Quota(requests_per_minute=60))
    served = 0
    for number in range(36_000):
        if quotas.find_rejection(make_request("a"), number / 10) is None:
            quotas.admitted(make_request("a"), number / 10)
            served += 1
    assert 3600 / 1.02 <= served <= 3600
    assert quotas.minute.window.kept <= BUCKETS_MAX, "the store keeps as many"


def test_an_earlier_bucket_takes_what_is_given_back_and_what_others_say() -> None:
    counts = counting()
    counts.pending = {}
    for second in (5, 7, 9):
        add(counts, "a", second, second + 0.5)
    counts.add("a", (0, -7, 0, 0), 7)
    counts.add("a", (0, 2, 0, 0), 6)
    counts.add("a", (0, -8, 0, 0), 3)
    assert [counts.measures("a", bucket)[1] for bucket in range(3, 10)] == [0, 0, 5, 2, 0, 0, 9]
    assert (counts.last("a"), counts.last("b")) == (9, None)
    counts.pending = {"a": {9: [0, 4, 0, 0, 1]}}
    counts.apply_reply("a", 8, (0, 3, 0, 0))
    counts.apply_reply("a", 9, (0, 20, 0, 0))
    assert [counts.measures("a", bucket)[1] for bucket in (8, 9)] == [3, 24]
    assert counts.sums("a")[1] == 5 + 2 + 3 + 24
    assert counts.answered("a") == 9
    counts.at(66.0)
    assert counts.sums("a")[1] == 2 + 3 + 24


@pytest.mark.parametrize(("jump_s", "kept"), [(-1e6, 0), (-61.0, 0), (1e9, 0), (-2.0, 100)])
def test_a_clock_that_jumps_begins_anew_and_one_set_back_a_little_frees_nobody(jump_s: float, kept: int) -> None:
    counts = counting()
    add(counts, "a", 100, 1e7)
    counts.at(1e7 + jump_s)
    assert counts.sums("a", 1e7 + jump_s)[1] == kept
    counts.add("a", (0, 1, 0, 0))
    assert counts.sums("a", 1e7 + jump_s)[1] == kept + 1


def test_members_are_bounded_and_the_silent_ones_forgotten() -> None:
    counts = counting(100)
    add(counts, "busy", 50, 0.0)
    for number in range(1000):
        add(counts, number, 1, 0.0)
        assert len(counts) <= 100
    assert counts.sums("busy", 0.0)[1] == 50, "members that are invented free a busy one of nothing"
    add(counts, "steady", 1, 50.0)
    add(counts, "steady", 1, 100.0)
    assert len(counts) <= 101
    add(counts, "steady", 1, 150.0)
    assert len(counts) == 1
    counts.at(300.0)
    assert len(counts) == 0


# --- settings ---


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        (lambda: Ceilings(starts=-1), "starts is -1"),
        (lambda: Ceilings(starts=5, requests=3), "3 is less than starts"),
        (lambda: ThrottleSettings(app_user=TEN, app=Ceilings(starts=5)), "5 starts are fewer than the 10"),
        (lambda: ThrottleSettings(app_user=TEN, user=Ceilings(starts=5)), "10 starts are more than the 5"),
        (lambda: ThrottleSettings(window_s=0.0), "window_s"),
        (lambda: Quota(concurrent=0), "concurrent is 0"),
        (lambda: Quota(requests_per_minute=10, requests_per_day=9), "never reached"),
        (lambda: Quota(tokens_per_day=10, tokens_per_month=9), "never reached"),
        (lambda: Quota(tokens_per_minute=10, tokens_per_month=9), "never reached"),
    ],
)
def test_limits_that_make_no_sense_are_refused(wrong: Callable[[], object], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        wrong()


# --- the throttle ---


def throttle(user: Ceilings = NO_LIMITS, app_user: Ceilings = NO_LIMITS, app: Ceilings = NO_LIMITS) -> Throttle:
    return Throttle(ThrottleSettings(user=user, app_user=app_user, app=app))


def start(
    one: Throttle, now: float, pressure: Pressure = OVERLOADED, *, inside: bool = False, request: Request | None = None
) -> Rejection | None:
    request = request or make_request("a")
    request.progress.inside = inside
    refused = one.find_rejection(request, now, pressure)
    if refused is None:
        one.count(request, now)
    return refused


def test_a_start_beyond_its_limit_is_refused_under_overload_and_says_until_when() -> None:
    one = throttle(Ceilings(starts=3))
    assert [start(one, 0.0) for _ in range(3)] == [None, None, None]
    refused = start(one, 0.0)
    assert (refused.reason, *refused.limit[:3]) == (RejectReason.OVER_USER_LIMIT, "user_starts", 3, 0)
    assert refused.retry_after_s == refused.limit.reset_s
    for second in range(1, int(refused.limit.reset_s)):
        assert start(one, float(second)) is not None, "and no attempt meanwhile counts"
    assert start(one, refused.limit.reset_s + 1e-6) is None


@pytest.mark.parametrize(("pressure", "inside"), [(CALM, False), (OVERLOADED, True)], ids=["no overload", "inside"])
def test_nothing_is_refused_whatever_the_counts(pressure: Pressure, inside: bool) -> None:
    one = throttle(Ceilings(1, 1, 1), Ceilings(1, 1, 1), Ceilings(1, 1, 1))
    assert all(start(one, 0.0, pressure, inside=inside) is None for _ in range(500))


@pytest.mark.parametrize(
    ("level", "name", "reason"),
    [
        ("user", "user_tokens", RejectReason.OVER_USER_LIMIT),
        ("app_user", "app_user_tokens", RejectReason.OVER_USER_LIMIT),
        ("app", "app_tokens", RejectReason.OVER_APP_LIMIT),
    ],
)
def test_tokens_count_with_what_was_answered(level: str, name: str, reason: RejectReason) -> None:
    one = throttle(**{level: Ceilings(tokens=1000)})
    request = make_request("a", prompt=10)
    assert start(one, 0.0, request=request) is None
    one.settle(request, ServiceTokens(10, 985), 1.0)
    refused = start(one, 1.0, request=make_request("a", prompt=10))
    assert (refused.reason, limit_of(refused)) == (reason, name)


def test_one_user_of_an_app_cannot_use_up_what_the_others_may_have() -> None:
    one = throttle(app=Ceilings(starts=20))
    for user in range(4):
        assert start(one, 0.0, request=make_request("a", user=f"u{user}")) is None
    outcomes = [start(one, 0.0, request=make_request("a", user="greedy")) for _ in range(40)]
    assert outcomes[-1] is not None
    assert outcomes[-1].reason is RejectReason.OVER_APP_LIMIT
    for user in range(4):
        assert start(one, 0.0, request=make_request("a", user=f"u{user}")) is None


def test_naming_a_new_user_for_each_request_leaves_none_of_them_a_part() -> None:
    one = throttle(user=Ceilings(starts=5), app=Ceilings(starts=20))
    admitted = sum(start(one, 0.0, request=make_request("a", user=f"u{number}")) is None for number in range(500))
    assert admitted <= 21


# --- classic limits ---


def test_a_call_inside_is_no_start_and_what_a_request_did_not_take_stays_counted() -> None:
    throttle = Throttle(ThrottleSettings(user=Ceilings(starts=9, requests=9, tokens=900)))
    start, inside = make_request("t", prompt=50), make_request("t", prompt=70)
    inside.progress.inside = True
    for request in (start, inside):
        throttle.count(request, 1.0)
    throttle.settle(start, ServiceTokens(20, 10), 2.0)
    throttle.settle(inside, ServiceTokens(70, 10), 2.0)
    numbers = throttle.explain(start.flow, 2.0)
    assert [numbers[f"user_{measure}"] for measure in ("starts", "requests", "tokens")] == [1, 2, 50 + 80]


def test_the_last_place_of_a_concurrent_limit_is_given_once() -> None:
    quotas = Quotas(Quota(concurrent=2))
    quotas.under_way_elsewhere = {"t": 1}
    assert quotas.find_rejection(make_request("t"), 0.0) is None
    quotas.admitted(make_request("t"), 0.0)
    assert quotas.find_rejection(make_request("t"), 0.0) is not None
    assert quotas.find_rejection(make_request("t"), 0.0, is_counted=True) is None, "counted already"


# --- leaky counts: so much at once, and after that so much per second ---


def test_so_much_at_once_and_then_so_much_per_second() -> None:
    counts = LeakyCounts(2.0, 3.0)
    assert [counts.take("a", 10.0) for _ in range(5)] == [0.0, 0.0, 0.0, 0.5, 0.5]
    assert counts.wait_s("a", 10.25) == 0.25
    assert counts.take("b", 10.0) == 0.0, "another member does not notice"
    assert [counts.take("a", 10.5) for _ in range(2)] == [0.0, 0.5]
    taken = sum(counts.take("a", 20.0 + step / 100) == 0.0 for step in range(1000))
    assert taken == 3 + 2 * 10 - 1, "who asks all the time gets the rate, not less"
    counts = LeakyCounts(1.0, 1.0)
    assert [counts.take("a", now) for now in (5.0, 5.0, 4.0)] == [0.0, 1.0, 2.0], "a clock that is set back"


def test_the_members_are_bounded_and_whoever_does_it_again_drives_out_nobody() -> None:
    counts = LeakyCounts(1.0, 1.0, members_max=2)
    for member in "abc":
        counts.take(member, 0.0)
    assert [counts.wait_s(member, 0.0) for member in "abc"] == [0.0, 1.0, 1.0], "the one silent for longest"
    counts = LeakyCounts(per_s=0.001, at_once_max=2, members_max=2)
    assert [counts.take(member, float(now)) for now, member in enumerate("abba")] == [0.0] * 4
    assert counts.wait_s("a", 4.0) > 0.0


def test_of_a_full_table_the_tenant_that_has_most_loses_its_oldest() -> None:
    assert given_up({"few": {1: None}, "many": dict.fromkeys(range(5))}, 200) == [("many", 0), ("many", 1)]
