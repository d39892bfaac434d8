"""Who is active, and what part does each have?"""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from policies.capacity.fair_shares import FairShares
from tests.policies.making import make_request


def test_a_tenant_is_active_for_a_while_after_its_last_request() -> None:
    shares = FairShares(active_s=30.0)
    gone, here = make_request("gone"), make_request("here")
    shares.seen(gone, 0.0)
    shares.withdrawn(gone)
    shares.seen(here, 29.9)
    shares.expire(29.9)
    assert shares.part(here) == 0.5
    shares.expire(30.0)
    assert shares.part(here) == 1.0


def test_a_tenant_with_a_long_request_stays_active() -> None:
    shares = FairShares(active_s=30.0)
    long, here = make_request("long"), make_request("here")
    shares.seen(long, 0.0)
    shares.dispatched(long)
    for second in range(0, 200, 10):
        shares.seen(here, float(second))
        shares.withdrawn(here)
    shares.seen(here, 200.0)
    assert shares.part(here) == 0.5
    shares.ended(long)
    shares.seen(here, 300.0)
    assert shares.part(here) == 1.0


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
        assert len(shares) == len(active)


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
