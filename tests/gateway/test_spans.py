"""What is made afterwards from requests that are remembered: sums of a span, what waited, a tenant's minutes."""

from __future__ import annotations

import itertools
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gateway.operator.snapshots.spans import (
    OTHERS,
    TENANTS_DRAWN,
    PoolSample,
    Running,
    part_within,
    percentile,
    shares_due,
    sums,
    waiting_over_time,
)
from gateway.telemetry.ends import End
from gateway.telemetry.recent_requests import MINUTE_S, RecentRequests
from policies.queue.bounds import Waiting
from tests.kit.tracing import end

NOW = 100.0


def taken(*ends: End, running: tuple[Running, ...] = (), **waiting: Waiting) -> PoolSample:
    return PoolSample("p", NOW, sorted(ends, key=lambda each: -each.ended_s), running, waiting)


@settings(max_examples=40)
@given(st.floats(0, NOW), st.floats(0, 50), st.integers(1, 30))
def test_the_parts_of_all_spans_add_up_to_the_whole(begun_s: float, length_s: float, spans: int) -> None:
    ended_s = min(NOW, begun_s + length_s)
    edges = [-1.0 + i * (NOW + 1) / spans for i in range(spans + 1)]
    parts = [part_within(since, until, begun_s, ended_s) for since, until in itertools.pairwise(edges)]
    assert sum(parts) == pytest.approx(1)


def received(one: PoolSample, since_s: float, until_s: float) -> dict[str, float]:
    found = sums(one, since_s, until_s)
    total = sum(each.received for each in found.values())
    return {name: each.received / total for name, each in found.items() if each.received}


def due(one: PoolSample, since_s: float, until_s: float) -> dict[str, float]:
    return shares_due(sums(one, since_s, until_s))


def test_service_counts_in_the_span_in_which_it_was_received() -> None:
    one = taken(
        end("long", dispatched_s=80, ended_s=100, service=40),  # 10 in each span of 5 s
        end("short", dispatched_s=91, ended_s=94, service=30),
    )
    assert received(one, 90, 95) == {"long": 0.25, "short": 0.75}
    assert received(one, 95, 100) == {"long": 1.0}
    assert (due(taken(), 90, 95), percentile([], 0.5)) == ({}, None)


def test_who_asked_for_little_is_due_that_and_who_floods_the_rest() -> None:
    greedy = Running("greedy", 1.0, 70.0, 90.0, 90.0)
    light = Running("light", 3.0, 94.9, 95.0, 5.0)
    flood = {"greedy": Waiting(40, 1.0, 80.0)}
    alone = taken(running=(greedy, light), **flood)
    assert received(alone, 95, 100) == due(alone, 95, 100) == pytest.approx({"greedy": 0.9, "light": 0.1})
    known = end("light", dispatched_s=95, ended_s=95.1, service=1.0)
    both = {**flood, "light": Waiting(10, 3.0, 90.0)}  # ten more, each worth as much as the one that ended
    assert due(taken(known, running=(greedy, light), **both), 95, 100)["light"] == pytest.approx(16 / 51)
    many = {**flood, "light": Waiting(1000, 3.0, 90.0)}
    assert due(taken(known, running=(greedy, light), **many), 95, 100)["light"] == 0.75


def test_what_waited_at_the_end_of_a_span_was_asked_for_in_it() -> None:
    late = end("light", dispatched_s=96, ended_s=99, service=30, queue_s=4.0)
    flood = end("flood", dispatched_s=80, ended_s=100, service=400)
    assert due(taken(late, flood), 90, 95)["light"] == pytest.approx(0.3)


def test_ends_are_counted_in_their_span_and_refusals_by_reason() -> None:
    refused = {"service": 0, "outcome": "refused", "reason": "queue_full", "first_token_s": None}
    one = taken(
        end("t", dispatched_s=91, ended_s=94, service=1, queue_s=2.0),
        end("t", dispatched_s=92, ended_s=92, **refused),  # type: ignore[arg-type]
        end("t", dispatched_s=91, ended_s=96, service=1, queue_s=9.0),
        end("t", dispatched_s=91, ended_s=94, service=1, queue_s=9.0, pool="another"),
    )
    found = sums(one, 90, 95)["t"]
    assert (found.outcomes.total(), found.refused) == (2, {"queue_full": 1})
    assert (percentile(found.waits_s, 0.5), percentile(found.first_tokens_s, 0.95)) == (2.0, 0.2)


def over_time(one: PoolSample, covered_s: float = 20.0) -> dict[str, list[int]]:
    found = waiting_over_time(one, covered_s)
    return dict(found["waiting"])


def test_what_waited_at_each_step_is_counted_again_from_ends_from_what_runs_and_from_what_waits() -> None:
    one = taken(
        end("t", dispatched_s=91, ended_s=94, service=1, queue_s=9.0),  # waited from 82 to 91
        end("t", dispatched_s=87, ended_s=88, service=1, queue_s=1.0),  # between two steps
        end("t", dispatched_s=91, ended_s=94, service=1, queue_s=9.0, pool="another"),
        running=(Running("run", 1.0, 84.0, 96.0, 5.0),),
        wait=Waiting(4, 1.0, 90.0),
        t=Waiting(1, 1.0, NOW),
    )
    #                                 80 85 90 95 100
    assert over_time(one) == {"t": [0, 1, 1, 0, 0], "run": [0, 1, 1, 1, 0], "wait": [0, 0, 0, 2, 4]}
    assert over_time(one, 0.0) == {"wait": [4]}


def test_tenants_beyond_those_that_are_drawn_are_one() -> None:
    ends = [
        end(f"t{n}", dispatched_s=96, ended_s=97, service=1, queue_s=1.5 + 0.1 * n) for n in range(TENANTS_DRAWN + 3)
    ]
    found = over_time(taken(*ends), 5.0)
    assert len(found) == TENANTS_DRAWN + 1
    assert found[OTHERS] == [3, 0]


@pytest.mark.parametrize("wrong", [float("nan"), float("inf"), float("-inf")])
def test_a_time_that_is_none_does_no_harm(wrong: float) -> None:
    one = taken(
        end("t", dispatched_s=wrong, ended_s=94, service=1, queue_s=wrong),
        running=(Running("run", 1.0, wrong, wrong, 5.0),),
        wait=Waiting(4, 1.0, wrong),
    )
    assert all(0 <= count <= 1 for counts in over_time(one).values() for count in counts)


# --- minutes of a tenant ---


BEGINS_S = MINUTE_S - (time.time() - time.monotonic()) % MINUTE_S
"""When a minute begins, on the monotonic clock."""


def of_minute(number: int, tenant: str, queue_s: float, **fields: object) -> End:
    """An end of this minute."""
    dispatched_s = BEGINS_S + MINUTE_S * number + 30.0
    return end(tenant, dispatched_s=dispatched_s, ended_s=dispatched_s + 1, service=1.0, queue_s=queue_s, **fields)


def test_a_minute_has_its_requests_and_the_slowest_of_them() -> None:
    recent = RecentRequests(40)
    refused = {"outcome": "refused", "reason": "queue_full"}
    recent.take(
        [
            of_minute(1, "t", 2.0),
            of_minute(1, "t", 5.0),
            of_minute(1, "other", 9.0),
            of_minute(1, "t", 0.5, **refused),
            of_minute(2, "t", 1.0),
        ]
    )
    first, second = recent.minutes_of("t")
    assert (first.at_s % MINUTE_S, second.at_s - first.at_s) == (0.0, MINUTE_S)
    assert (first.requests, first.queue_s, first.slowest.queue_s) == (3, 7.5, 5.0)
    assert (first.not_served, first.reason) == (1, "queue_full")
    assert (second.requests, second.not_served, second.reason) == (1, 0, "")
    assert [one.requests for one in recent.minutes_of("t")] == [3, 1], "asking counts nothing again"


def test_a_flood_does_not_make_a_tenant_forget_and_all_is_bounded() -> None:
    recent = RecentRequests(40)
    recent.take([of_minute(1, "quiet", 4.0)])
    recent.take([of_minute(1, "flood", 1.0) for _ in range(1000)])
    assert "quiet" not in {one.tenant for one in recent.latest(1000)}
    assert [one.requests for one in recent.minutes_of("quiet")] == [1]
    assert [one.requests for one in recent.minutes_of("flood")] == [1000]
    recent.take([of_minute(n, "flood", 1.0) for n in range(2, 100)])
    assert recent.minutes_of("quiet") == []
    assert len(recent.minutes_of("flood")) == 20
