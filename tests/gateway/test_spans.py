"""What is drawn over time: each point is made afterwards from what is remembered, and loses nothing."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.operator.snapshots.spans import Running, Taken, part_within, point
from gateway.telemetry.ends import End
from policies.queue.bounds import Waiting

NOW = 100.0


def end(
    tenant: str, *, dispatched_s: float, ended_s: float, service: float, queue_s: float = 0.0, **fields: object
) -> End:
    known: dict[str, object] = {"pool": "p", "tenant": tenant, "weight": 1.0, "outcome": "completed", "reason": ""}
    known |= {"request_id": "r", "app": "a", "model": "m", "backend": "b", "waited_s": {}, "first_token_s": 0.2}
    known |= {"dispatched_s": dispatched_s, "ended_s": ended_s, "queue_s": queue_s, "service": service}
    known |= {"prompt_tokens": 1, "output_tokens": 1}
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


def test_who_asked_for_little_is_due_that_and_who_floods_the_rest() -> None:
    greedy = Running("greedy", 1.0, 70.0, 90.0, 90.0)
    light = Running("light", 3.0, 94.9, 95.0, 5.0)
    flood = {"greedy": Waiting(40, 1.0, 80.0)}
    found = point(taken(running=(greedy, light), **flood), 95, 100, {"greedy", "light"})
    assert found["tenants"] == [("greedy", 0.9, 0.9), ("light", 0.1, 0.1), ("", 0.0, 0.0)]
    known = end("light", dispatched_s=95, ended_s=95.1, service=1.0)
    both = {**flood, "light": Waiting(10, 3.0, 90.0)}  # ten more, each worth as much as the one that ended
    found = point(taken(known, running=(greedy, light), **both), 95, 100, {"greedy", "light"})
    assert {name: due for name, _, due in found["tenants"]}["light"] == pytest.approx(16 / 51, abs=1e-4)
    many = {**flood, "light": Waiting(1000, 3.0, 90.0)}
    found = point(taken(known, running=(greedy, light), **many), 95, 100, {"greedy", "light"})
    assert {name: due for name, _, due in found["tenants"]}["light"] == 0.75


def test_what_waited_at_the_end_of_a_span_was_asked_for_in_it() -> None:
    late = end("light", dispatched_s=96, ended_s=99, service=30, queue_s=4.0)
    flood = end("flood", dispatched_s=80, ended_s=100, service=400)
    found = point(taken(late, flood), 90, 95, {"light", "flood"})
    assert {name: due for name, _, due in found["tenants"]}["light"] == pytest.approx(0.3)


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
