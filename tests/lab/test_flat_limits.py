"""Requests per minute: a sliding window per tenant over what was admitted, and arrival order behind it."""

from __future__ import annotations

import csv
import gzip
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lab.vtc.unfair_orders import WINDOW_S, Rpm
from policies.admission.policy import Policy
from policies.orders.order import Selection
from policies.request import CALM, Limit, Refusal, Refused
from tests.policies.making import Room, make_request

pytestmark = pytest.mark.interpreted_only("extends a policy")


def arrives(policy: Policy, tenant: str, now: float) -> Refused | None:
    """As the engine does it: what is not refused is queued."""
    request = make_request(tenant, arrived_s=now)
    refused = policy.order.refusal(request, now, CALM)
    if refused is None:
        policy.push(request, now)
    return refused


@settings(max_examples=200)
@given(
    limit=st.integers(1, 5),
    arrivals=st.lists(st.tuples(st.sampled_from("ab"), st.floats(0, 40, allow_subnormal=False)), max_size=60),
)
def test_admits_what_fits_in_any_sixty_seconds_and_nothing_more(limit: int, arrivals: list[tuple[str, float]]) -> None:
    policy, now = Policy(Rpm(limit)), 0.0
    admitted: dict[str, list[float]] = {"a": [], "b": []}
    for tenant, pause_s in arrivals:
        now += pause_s
        in_window = [then for then in admitted[tenant] if then + WINDOW_S > now]
        refused = arrives(policy, tenant, now)
        assert (refused is not None) == (len(in_window) >= limit)
        if refused is None:
            admitted[tenant].append(now)
        else:
            opens_in_s = in_window[0] + WINDOW_S - now
            assert refused == Refused(
                Refusal.RATE_LIMITED,
                refused.retry_after_s,
                Limit("requests", limit, 0, refused.retry_after_s, WINDOW_S),
            )
            assert refused.retry_after_s == pytest.approx(opens_in_s)
            returns = policy.order.refusal(make_request(tenant), now + refused.retry_after_s, CALM)
            assert returns is None, "whoever comes back when told is admitted, and a refusal is not counted"


def test_what_a_backend_sent_back_is_not_counted_again() -> None:
    policy = Policy(Rpm(2))
    arrives(policy, "a", 0.0)
    selection = policy.pop(1.0, Room())
    assert isinstance(selection, Selection)
    policy.push(selection.request, 2.0, front=True)
    assert arrives(policy, "a", 3.0) is None
    assert arrives(policy, "a", 4.0) is not None


ARENA = Path(__file__).parents[3] / "shared" / "traces" / "vtc_arena27_10min.csv.gz"


@pytest.mark.skipif(not ARENA.exists(), reason="needs the Arena trace of the VTC paper in ../shared/traces")
@pytest.mark.parametrize(("limit", "admitted"), [(5, 581), (10, 900), (15, 1053), (20, 1159), (30, 1325)])
def test_admits_as_many_as_the_papers_baseline(limit: int, admitted: int) -> None:
    """VTC, table 2 and the artifact's other runs, which admitted one fewer at 20 and at 30."""
    with gzip.open(ARENA, "rt") as file:
        arrivals = [(float(row["t_s"]), row["client"]) for row in csv.DictReader(file)]
    policy = Policy(Rpm(limit))
    assert sum(arrives(policy, client, now) is None for now, client in arrivals) == admitted
