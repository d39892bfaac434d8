"""What is drawn over time: each point is made afterwards from what is remembered, and loses nothing."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.operator.spans import Running, Taken, part_within, point
from gateway.telemetry.lately import End
from policies.queue.bounds import Waiting

NOW = 100.0


def end(
    tenant: str, *, dispatched_s: float, ended_s: float, service: float, queue_s: float = 0.0, **fields: object
) -> End:
    known = {
        "pool": "p", "tenant": tenant, "weight": 1.0, "outcome": "completed", "reason": "", "dispatched_s": dispatched_s,
        "ended_s": ended_s, "queue_s": queue_s, "service": service, "request_id": "r", "app": "a", "model": "m",
        "backend": "b", "waited_s": {}, "first_token_s": 0.2, "prompt_tokens": 1, "output_tokens": 1,
    }  # fmt: skip
    return End(**{**known, **fields})  # type: ignore[arg-type]


def taken(*ends: End, running: tuple[Running, ...] = (), **waiting: Waiting) -> Taken:
    return Taken("p", NOW, sorted(ends, key=lambda each: -each.ended_s), running, waiting)


@given(st.floats(0, NOW), st.floats(0, 50), st.integers(1, 30))
def test_the_parts_of_all_spans_add_up_to_the_whole(begun_s: float, length_s: float, spans: int) -> None:
    ended_s = min(NOW, begun_s + length_s)
    edges = [-1.0 + i * (NOW + 1) / spans for i in range(spans + 1)]
    parts = [part_within(since, until, begun_s, ended_s) for since, until in itertools.pairwise(edges)]
    assert sum(parts) == pytest.approx(1)


def test_service_counts_in_the_span_in_which_it_was_received() -> None:
    one = taken(
        end("long", dispatched_s=80, ended_s=100, service=40),  # 10 in each span of 5 s
        end("short", dispatched_s=91, ended_s=94, service=30),
    )
    assert point(one, 90, 95, {"long", "short"})["tenants"] == [
        ("long", 0.25, 0.25),
        ("short", 0.75, 0.75),
        ("", 0.0, 0.0),
    ]
    assert point(one, 95, 100, {"long"})["tenants"] == [("long", 1.0, 1.0), ("", 0.0, 0.0)]
    assert point(one, 90, 95, ())["tenants"] == [("", 1.0, 1.0)]


def test_who_waits_is_due_by_weight_and_who_waits_for_moments_what_it_asked_for() -> None:
    greedy = Running("greedy", 1.0, 70.0, 90.0, 90.0)
    light = Running("light", 3.0, 94.9, 95.0, 5.0)
    found = point(taken(running=(greedy, light), greedy=Waiting(4, 1.0, 80.0)), 95, 100, {"greedy", "light"})
    assert {name: due for name, _, due in found["tenants"]}["light"] == pytest.approx(5 / 50)
    both = {"greedy": Waiting(4, 1.0, 80.0), "light": Waiting(1, 3.0, 90.0)}
    found = point(taken(running=(greedy, light), **both), 95, 100, {"greedy", "light"})
    assert found["tenants"] == [("greedy", 0.9, 0.25), ("light", 0.1, 0.75), ("", 0.0, 0.0)]


def test_ends_are_counted_in_their_span_and_refusals_by_reason() -> None:
    found = point(
        taken(
            end("t", dispatched_s=91, ended_s=94, service=1, queue_s=2.0),
            end(
                "t", dispatched_s=92, ended_s=92, service=0, outcome="refused", reason="queue_full", first_token_s=None
            ),
            end("t", dispatched_s=91, ended_s=96, service=1, queue_s=9.0),
            end("t", dispatched_s=91, ended_s=94, service=1, queue_s=9.0, pool="another"),
        ),
        90,
        95,
        {"t"},
    )
    assert (found["ended"], found["refused"]) == (2, {"queue_full": 1})
    assert (found["wait_p50_s"], found["first_token_p95_s"]) == (2.0, 0.2)


def test_where_nothing_was_received_there_are_no_shares() -> None:
    found = point(taken(), 90, 95, ())
    assert (found["tenants"], found["wait_p50_s"]) == ([], None)
