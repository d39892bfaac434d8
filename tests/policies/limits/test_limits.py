"""Sliding counts, learned limits, the throttle and the classic limits."""

from __future__ import annotations

import random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from policies.limits.ceilings import Auto, Ceilings, Percentile, ThrottleSettings
from policies.limits.quotas import Quota, Quotas
from policies.limits.sliding_counts import SlidingCounts
from policies.limits.throttle import Throttle
from policies.request import CALM, Pressure, Refusal, Refused, Request, ServiceTokens
from tests.policies.making import make_request

PATIENCE_S = ThrottleSettings().patience_s
OVERLOADED = Pressure(True, "full", 3.0, wait_s=PATIENCE_S + 15.0, under_way=9)
NO_LIMITS = Ceilings()


# --- counts ---


def test_counts_slide_over_two_periods() -> None:
    counts = SlidingCounts(60.0)
    counts.at(30.0)
    counts.of("a", 1.0).requests += 10
    assert counts.sliding("a", 30.0)[1] == 10
    counts.at(90.0)
    assert counts.sliding("a", 90.0)[1] == pytest.approx(5.0), "half of the period before has faded"
    counts.of("a", 1.0).requests += 2
    assert counts.sliding("a", 90.0)[1] == pytest.approx(7.0)
    counts.at(120.0)
    assert counts.sliding("a", 120.0)[1] == pytest.approx(2.0)
    counts.at(300.0)
    assert counts.sliding("a", 300.0) == (0.0, 0.0, 0.0)


@settings(max_examples=200, deadline=None)
@given(
    events=st.lists(st.floats(0.0, 20.0), min_size=1, max_size=60),
    limit=st.integers(1, 20),
)
def test_the_time_that_is_named_is_when_one_more_is_allowed(events: list[float], limit: int) -> None:
    counts = SlidingCounts(60.0)
    now = 0.0
    allowed_s: list[float] = []
    for step_s in events:
        now += step_s
        counts.at(now)
        found = counts.limit("requests", "requests", "a", 1, limit, now)
        if found.reset_s == 0.0:
            counts.of("a", 1.0).requests += 1
            allowed_s.append(now)
            continue
        assert found.remaining == 0
        assert 0.0 < found.reset_s <= 120.0
        early = SlidingCounts(60.0)
        for then in allowed_s:
            early.at(then)
            early.of("a", 1.0).requests += 1
        early.at(now)
        early.at(now + 0.999 * found.reset_s - 1e-6)
        assert early.limit("requests", "requests", "a", 1, limit, now + 0.999 * found.reset_s - 1e-6).reset_s > 0.0
        now += found.reset_s + 1e-6
        counts.at(now)
        assert counts.limit("requests", "requests", "a", 1, limit, now).reset_s == 0.0


@pytest.mark.parametrize("jump_s", [-1e6, -61.0, 1e9])
def test_a_clock_that_jumps_begins_anew(jump_s: float) -> None:
    counts = SlidingCounts(60.0)
    counts.at(1e7)
    counts.of("a", 1.0).requests += 100
    counts.at(1e7 + jump_s)
    assert counts.sliding("a", 1e7 + jump_s)[1] == 0.0
    counts.of("a", 1.0).requests += 1
    assert counts.sliding("a", 1e7 + jump_s)[1] == 1.0


def test_members_are_bounded_and_the_silent_ones_forgotten() -> None:
    counts = SlidingCounts(60.0, members_max=100)
    counts.at(0.0)
    for number in range(10_000):
        counts.of(number, 1.0).requests += 1
        assert len(counts) <= 200
    counts.at(200.0)
    assert len(counts) == 0


def test_a_percentile_follows_and_no_single_value_moves_it_far() -> None:
    rng = random.Random(5)
    median = Percentile(0.5)
    for _ in range(3000):
        median.learn(rng.lognormvariate(3.0, 1.0))
    assert 12 < median.value < 33  # e^3 is 20
    before = median.value
    median.learn(1e12)
    assert median.value < 1.1 * before


# --- settings ---


def test_limits_that_make_no_sense_are_refused() -> None:
    with pytest.raises(ValueError, match="-1 starts"):
        Ceilings(starts=-1)
    with pytest.raises(ValueError, match="5 starts are more than the 3 requests"):
        Ceilings(starts=5, requests=3)
    with pytest.raises(ValueError, match="factor"):
        Auto(floor=1, factor=0.5)
    with pytest.raises(ValueError, match="more than its whole app"):
        ThrottleSettings(user=Ceilings(starts=10), app=Ceilings(starts=5))
    with pytest.raises(ValueError, match="window_s"):
        ThrottleSettings(window_s=0.0)
    with pytest.raises(ValueError, match="tokens_per_minute"):
        Quota(tokens_per_minute=100, tokens_per_day=10)
    with pytest.raises(ValueError, match="concurrent is 0"):
        Quota(concurrent=0)


# --- the throttle ---


def throttle(user: Ceilings = NO_LIMITS, app_user: Ceilings = NO_LIMITS, app: Ceilings = NO_LIMITS) -> Throttle:
    return Throttle(ThrottleSettings(user=user, app_user=app_user, app=app))


def start(
    one: Throttle,
    now: float,
    pressure: Pressure = OVERLOADED,
    *,
    inside: bool = False,
    request: Request | None = None,
) -> Refused | None:
    request = request or make_request("a")
    request.progress.inside = inside
    refused = one.refusal(request, now, pressure)
    if refused is None:
        one.count(request, now)
    return refused


def test_a_start_beyond_its_limit_is_refused_under_overload_and_says_until_when() -> None:
    one = throttle(Ceilings(starts=3))
    assert [start(one, 0.0) for _ in range(3)] == [None, None, None]
    refused = start(one, 0.0)
    assert refused is not None
    assert refused.reason is Refusal.OVER_USER_LIMIT
    assert refused.limit is not None
    assert (refused.limit.name, refused.limit.limit, refused.limit.remaining) == ("user_starts", 3, 0)
    assert 1.0 <= refused.retry_after_s <= 60.0
    assert start(one, refused.limit.reset_s + 1e-6) is None


def test_nothing_is_refused_without_overload_whatever_the_counts() -> None:
    one = throttle(Ceilings(1, 1, 1), Ceilings(1, 1, 1), Ceilings(1, 1, 1))
    assert all(start(one, 0.0, CALM) is None for _ in range(500))


def test_nothing_is_refused_inside_an_interaction_whatever_the_counts() -> None:
    one = throttle(Ceilings(1, 1, 1), Ceilings(1, 1, 1), Ceilings(1, 1, 1))
    assert all(start(one, 0.0, inside=True) is None for _ in range(500))


def test_attempts_that_were_refused_do_not_count() -> None:
    one = throttle(Ceilings(starts=1))
    assert start(one, 0.0) is None
    for second in range(1, 120):
        start(one, float(second))
    assert start(one, 240.0) is None


@pytest.mark.parametrize(
    ("level", "name", "reason"),
    [
        ("user", "user_tokens", Refusal.OVER_USER_LIMIT),
        ("app_user", "app_user_tokens", Refusal.OVER_USER_LIMIT),
        ("app", "app_tokens", Refusal.OVER_APP_LIMIT),
    ],
)
def test_tokens_count_with_what_was_answered(level: str, name: str, reason: Refusal) -> None:
    one = throttle(**{level: Ceilings(tokens=1000)})
    request = make_request("a", prompt=10)
    assert start(one, 0.0, request=request) is None
    one.settle(request, ServiceTokens(10, 985), 1.0)
    refused = start(one, 1.0, request=make_request("a", prompt=10))
    assert refused is not None
    assert refused.limit is not None
    assert (refused.reason, refused.limit.name) == (reason, name)


def test_one_user_of_an_app_cannot_use_up_what_the_others_may_have() -> None:
    one = throttle(app=Ceilings(starts=20))
    for user in range(4):
        assert start(one, 0.0, request=make_request("a", user=f"u{user}")) is None
    outcomes = [start(one, 0.0, request=make_request("a", user="greedy")) for _ in range(40)]
    assert outcomes[-1] is not None
    assert outcomes[-1].reason is Refusal.OVER_APP_LIMIT
    for user in range(4):
        assert start(one, 0.0, request=make_request("a", user=f"u{user}")) is None


def test_naming_a_new_user_for_each_request_leaves_none_of_them_a_part() -> None:
    one = throttle(user=Ceilings(starts=5), app=Ceilings(starts=20))
    admitted = sum(start(one, 0.0, request=make_request("a", user=f"u{number}")) is None for number in range(500))
    assert admitted <= 21


def test_an_auto_limit_is_learned_from_the_others_and_never_below_its_floor() -> None:
    one = throttle(user=Ceilings(starts=Auto(floor=4, percentile=0.5, factor=3)))
    for minute in range(10):
        for user in range(9):
            for _ in range(5):
                assert start(one, 60.0 * minute, CALM, request=make_request(f"t{user}")) is None
        for _ in range(100):
            start(one, 60.0 * minute, CALM, request=make_request("abuser"))
    explained = one.explain(make_request("t0").flow, 1.0, 600.0)
    assert 12 < explained["user_starts_limit"] < 24, "three times the usual five"
    assert start(one, 600.0, request=make_request("t0")) is None
    assert start(one, 600.0, request=make_request("abuser")) is not None
    fresh = throttle(user=Ceilings(starts=Auto(floor=4)))
    assert [start(fresh, 0.0) is None for _ in range(5)] == [True] * 4 + [False]


@pytest.mark.parametrize("level", ["user", "app_user", "app"])
@pytest.mark.parametrize(
    "waits",
    [{"wait_s": PATIENCE_S}, {"wait_s": None}, {"under_way": 0}],
    ids=["for less than patience", "for how long is not known", "alone"],
)
def test_a_learned_limit_refuses_nobody_who_waits_for_too_little_and_a_number_does(
    level: str, waits: dict[str, Any]
) -> None:
    pressure = OVERLOADED._replace(**waits)
    one = throttle(**{level: Ceilings(starts=Auto(floor=3))})
    assert all(start(one, 0.0, pressure) is None for _ in range(50))
    assert start(one, 0.0) is not None
    number = throttle(**{level: Ceilings(starts=3, tokens=Auto(floor=3))})
    assert [start(number, 0.0, pressure) is None for _ in range(4)] == [True, True, True, False]
    assert 1.0 <= refusal_of(number, 0.0, pressure).retry_after_s <= 60.0


def refusal_of(one: Throttle, now: float, pressure: Pressure = OVERLOADED, tenant: str = "a") -> Refused:
    refused = one.refusal(make_request(tenant), now, pressure)
    assert refused is not None
    return refused


def beyond(tenants: str = "a") -> Throttle:
    """These tenants are beyond a learned limit."""
    one = Throttle(ThrottleSettings(1000.0, user=Ceilings(starts=Auto(floor=3)), app_user=NO_LIMITS, app=NO_LIMITS))
    for tenant in tenants:
        for _ in range(50):
            one.count(make_request(tenant), 0.0)
    return one


@settings(max_examples=200, deadline=None)
@given(
    wait_s=st.floats(PATIENCE_S + 0.001, 1e6),
    after=st.lists(st.floats(0.0, 1.0), max_size=10),
    late=st.floats(0.0, 0.1),
    wait_then_s=st.floats(PATIENCE_S + 0.001, 1e6),
)
def test_who_obeys_a_learned_limit_gets_in_at_the_first_return(
    wait_s: float, after: list[float], late: float, wait_then_s: float
) -> None:
    one = beyond()
    pressure = OVERLOADED._replace(wait_s=wait_s)
    first_s = refusal_of(one, 0.0, pressure).retry_after_s
    assert first_s == max(1.0, min(60.0, wait_s - PATIENCE_S)), "when the wait has shrunk to patience"
    assert first_s <= max(1.0, wait_s), "no later than a queue would serve it"
    back_s = [first_s]
    for part in sorted(after):
        refused = one.refusal(make_request("a"), part * first_s, pressure)
        if refused is not None:
            assert 1.0 <= refused.retry_after_s <= first_s
            back_s.append(part * first_s + refused.retry_after_s)
    longer = OVERLOADED._replace(wait_s=wait_then_s)
    for then_s in back_s:
        for again_s in (then_s, then_s + late * first_s + 1.0):
            assert one.refusal(make_request("a"), again_s, longer) is None


def test_who_does_not_obey_is_refused_until_the_return_and_after_it() -> None:
    one = beyond("ab")
    first_s = refusal_of(one, 0.0).retry_after_s
    assert first_s == 15.0
    assert refusal_of(one, 14.5).retry_after_s == 1.0
    assert refusal_of(one, 15.0, tenant="b").retry_after_s == 15.0, "another tenant has its own time"
    assert refusal_of(one, 30.0).retry_after_s == 15.0
    assert one.refusal(make_request("a"), 45.0, OVERLOADED) is None


def test_returns_hold_across_a_reload() -> None:
    before, after = beyond(), beyond("b")
    first_s = refusal_of(before, 0.0).retry_after_s
    after.resume(before)
    assert refusal_of(after, 1.0).retry_after_s == first_s - 1.0
    assert after.refusal(make_request("a"), first_s, OVERLOADED) is None


def test_what_is_learned_counts_per_weight() -> None:
    one = throttle(user=Ceilings(starts=Auto(floor=4)))
    heavy = [start(one, 0.0, request=make_request("heavy", weight=3.0)) is None for _ in range(13)]
    assert heavy == [True] * 12 + [False]


def test_what_was_learned_is_restored() -> None:
    one = throttle(user=Ceilings(starts=Auto(floor=1)))
    for minute in range(5):
        for _ in range(30):
            start(one, 60.0 * minute, CALM)
    learned = one.snapshot()
    fresh = throttle(user=Ceilings(starts=Auto(floor=1)))
    fresh.restore(learned)
    flow = make_request("a").flow
    assert fresh.explain(flow, 1.0, 0.0)["user_starts_limit"] == one.explain(flow, 1.0, 0.0)["user_starts_limit"] > 200
    for wrong in (None, [], {"users": []}, {**learned, "apps": [[1]]}):
        with pytest.raises(ValueError, match=r"expected|missing"):
            fresh.restore(wrong)
    assert fresh.snapshot() == learned


# --- classic limits ---


def admit(quotas: Quotas, now: float = 0.0, tenant: str = "a", prompt: int = 10) -> Request | Refused:
    request = make_request(tenant, prompt=prompt)
    refused = quotas.refusal(request, now)
    if refused is not None:
        return refused
    quotas.admitted(request, now)
    return request


def test_requests_per_minute_hold_at_any_time() -> None:
    quotas = Quotas(Quota(requests_per_minute=2))
    assert isinstance(admit(quotas), Request)
    assert isinstance(admit(quotas), Request)
    refused = admit(quotas)
    assert isinstance(refused, Refused)
    assert refused.reason is Refusal.RATE_LIMITED
    assert isinstance(admit(quotas, tenant="b"), Request)
    assert isinstance(admit(quotas, now=refused.retry_after_s + 1e-6), Request)


def test_concurrent_requests_make_room_when_they_end() -> None:
    quotas = Quotas(tenants={"a": Quota(concurrent=1)})
    first = admit(quotas)
    assert isinstance(first, Request)
    refused = admit(quotas)
    assert isinstance(refused, Refused)
    assert refused.limit is not None
    assert refused.limit.name == "concurrent"
    quotas.ended(first, 10, 0.0)
    assert isinstance(admit(quotas), Request)


def test_a_budget_per_day_is_spent_by_what_was_answered() -> None:
    quotas = Quotas(Quota(tokens_per_day=1000))
    first = admit(quotas)
    assert isinstance(first, Request)
    quotas.ended(first, 995, 1.0)
    refused = admit(quotas, now=2.0)
    assert isinstance(refused, Refused)
    assert refused.retry_after_s > 3600
    (limit,) = quotas.standing("a", 2.0)
    assert (limit.name, limit.limit, limit.remaining) == ("tokens_per_day", 1000, 5)


def test_without_quotas_there_is_nothing_to_say() -> None:
    assert Quotas().is_off
    assert Quotas().standing("a", 0.0) == []
