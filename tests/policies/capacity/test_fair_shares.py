"""Who is active, and who holds less than its fair share."""

from __future__ import annotations

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from policies.capacity.fair_shares import FairShares
from tests.policies.making import make_request


def test_shares_are_by_weight() -> None:
    shares = FairShares()
    light, heavy = make_request("light", weight=1.0), make_request("heavy", weight=3.0)
    for request in (light, heavy):
        shares.seen(request, 0.0)
    shares.dispatched(heavy, 70)
    shares.dispatched(light, 30)
    assert not shares.is_below(light), "30 of 100 is more than a quarter"
    assert shares.is_below(heavy)
    shares.grew(heavy, 100)
    assert shares.is_below(light)
    assert not shares.is_below(heavy)


def test_with_nothing_dispatched_everybody_is_below() -> None:
    shares = FairShares()
    request = make_request()
    shares.seen(request, 0.0)
    assert shares.is_below(request)
    assert not shares.someone_is_absent()


def test_a_tenant_is_active_for_a_while_after_its_last_request() -> None:
    shares = FairShares(active_s=30.0)
    gone, here = make_request("gone"), make_request("here")
    shares.seen(gone, 0.0)
    shares.withdrawn(gone)
    shares.seen(here, 29.9)
    assert shares.someone_is_absent()
    shares.expire(29.9)
    assert shares.someone_is_absent()
    assert shares.expires_s() == 30.0
    shares.expire(30.0)
    assert not shares.someone_is_absent()
    assert shares.expires_s() == math.inf


def test_a_tenant_with_a_long_request_stays_active() -> None:
    shares = FairShares(active_s=30.0)
    long, here = make_request("long"), make_request("here")
    shares.seen(long, 0.0)
    shares.dispatched(long, 10)
    for second in range(0, 200, 10):
        shares.seen(here, float(second))
        shares.withdrawn(here)
    shares.seen(here, 200.0)
    assert shares.someone_is_absent()
    shares.ended(long, 10)
    shares.seen(here, 300.0)
    assert not shares.someone_is_absent()


def test_whoever_waits_in_the_queue_is_not_absent() -> None:
    shares = FairShares()
    one, two = make_request("one"), make_request("two")
    shares.seen(one, 0.0)
    shares.seen(two, 0.0)
    assert not shares.someone_is_absent()
    shares.dispatched(two, 10)
    assert shares.someone_is_absent()


@settings(max_examples=100)
@given(
    arrivals=st.lists(
        st.tuples(st.sampled_from("abcd"), st.sampled_from([0.1, 0.7, 1.0, 3.0]), st.integers(0, 40)), max_size=60
    )
)
def test_weights_are_those_of_the_active(arrivals: list[tuple[str, float, int]]) -> None:
    shares, now = FairShares(), 0.0
    last: dict[str, tuple[float, float]] = {}
    for tenant, weight, seconds in arrivals:
        now += seconds
        request = make_request(tenant, weight=weight)
        shares.seen(request, now)
        shares.withdrawn(request)
        last[tenant] = (now, weight)
        active = [weight for seen_s, weight in last.values() if now - seen_s < 30.0]
        assert shares.activity().weights == pytest.approx(sum(active))
        assert shares.activity().absent == len(shares) == len(active)


def test_no_more_tenants_are_remembered_than_it_may() -> None:
    shares = FairShares(active_s=30.0, tenants_max=10)
    here = make_request("here")
    shares.seen(here, 0.0)
    for number in range(100):
        request = make_request(f"tenant-{number}")
        shares.seen(request, 0.1)
        shares.withdrawn(request)
        assert len(shares) <= 11
    assert shares.weight(here) == 1.0, "its request still waits"
    assert shares.activity().weights == pytest.approx(float(len(shares)))
