"""Sums of a span of time: made afterwards from what is remembered, and nothing is lost."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gateway.operator.snapshots.spans import (
    PoolSample,
    Running,
    part_within,
    percentile,
    shares_due,
    sums,
)
from gateway.telemetry.ends import End
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
