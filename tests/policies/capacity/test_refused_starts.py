"""What becomes of starts that would wait for the working set for longer than they may?"""

from __future__ import annotations

from math import sqrt
from typing import Any

import pytest

from policies.admission.decisions import Reject
from policies.queue.bounds import QueueLimits
from policies.request import RejectReason, Request
from tests.policies.agents import HOLD_S, Pool, call, full
from tests.policies.making import make_request, rejected

TURN_S = (0.98 * 10.0 + 10.0 + HOLD_S) / (0.98 + 2)
"""Two turns of ten seconds were seen. Before that, one was expected to take as long as a context counts."""


def overfull(wait_s: float) -> tuple[Any, ...]:
    """A pool, the call that runs, and three starts of one tenant that wait for room. Each of the two turns before took
    ten seconds.
    """
    pool = Pool(limits=QueueLimits(queue_wait_s_max=wait_s, queue_wait_s_max_inside=wait_s, queue_requests_max=100))
    runs, starts = full(pool), [call("a", f"s{number}", 9000, user=f"u{number}") for number in range(5)]
    for start in starts:
        assert pool.asks(start) == []
    pool.after(10.0 - HOLD_S)
    last = [runs]
    for start in starts[:2]:
        pool.answers(last.pop())
        assert pool.after(HOLD_S) == [start.id]
        pool.now += 10.0 - HOLD_S
        last = [start]
    return pool, *last, *starts[2:]


def comes_back_in(pool: Pool, request: Request) -> float:
    """Seconds after which this start is to come back."""
    (refused,) = pool.engine.arrived(request, pool.now)
    return refused.retry_after_s


def test_a_start_that_comes_back_in_time_waits_and_goes_before_others() -> None:
    pool, runs, *waiting = overfull(49.0)
    late = call("a", "late", 9000, user="z")
    wait_s, refused_s = comes_back_in(pool, late), pool.now
    assert wait_s == pytest.approx((4 + sqrt(4)) * TURN_S)
    later = comes_back_in(pool, call("a", "later", 9000, user="zz"))
    assert later == pytest.approx((4 + sqrt(4)) * 5 / 4 * TURN_S), "the place of the one before is kept"
    pool.now += 2.0
    assert pool.answers(runs) == []
    assert pool.after(HOLD_S) == ["s2.0"]
    pool.now = refused_s + wait_s
    assert pool.after(0.0) == [], "s3 and s4 have waited for as long as they may"
    assert pool.asks(call("a", "fresh", 9000, user="v")) == []
    again = call("a", "late", 9000, user="z", serial=1)
    assert pool.asks(again) == []
    pool.answers(waiting[0])
    assert pool.after(HOLD_S) == [again.id], "before the fresh one"


def test_a_start_that_comes_back_early_reads_what_is_left() -> None:
    pool, *_ = overfull(30.0)
    wait_s = comes_back_in(pool, call("a", "late", 9000, user="z"))
    pool.now += 2.0
    assert comes_back_in(pool, call("a", "late", 9000, user="z", serial=1)) == pytest.approx(wait_s - 2.0)
    pool.now += 20.0
    assert pool.asks(call("a", "late", 9000, user="z", serial=2)) == [], "within its patience it may wait"
    assert pool.engine.explain("late.2", pool.now) is not None


def test_a_start_whose_time_in_the_queue_is_over_reads_when_it_is_its_turn() -> None:
    pool, runs, *waiting = overfull(75.0)
    last = call("a", "late", 9000, user="z")
    assert pool.asks(last) == []
    pool.now += 75.0
    late = [one for one in pool.engine.woke(pool.now) if isinstance(one, Reject)]
    assert rejected(late) == [(start.id, RejectReason.QUEUE_TIMEOUT) for start in (*waiting, last)]
    turns = [one.retry_after_s / TURN_S for one in late]
    assert turns[0] == pytest.approx(4 + sqrt(4))
    assert turns == sorted(turns), "none loses its place"
    assert pool.answers(runs) == []


def test_a_start_waits_for_as_many_turns_as_starts_of_its_tenant_stand_before_it() -> None:
    pool, _, *waiting = overfull(1000.0)
    expected = [pool.engine.requests.expected(start, pool.now, comes=False) for start in waiting]
    assert [one.turns for one in expected] == [1.0, 2.0, 3.0]


def test_the_first_in_line_may_always_wait_and_so_may_a_start_with_room_and_a_call_inside() -> None:
    pool, _, *waiting = overfull(48.0)
    wait_s = comes_back_in(pool, call("a", "late", 9000, user="z"))
    assert wait_s > 48.0
    small = make_request("a", id="small", user="zz", prompt=100)
    assert pool.asks(small) == [], "it has room, and waits for its turn"
    inside = call("a", "s1", 9000, user="u1", serial=1)
    assert not rejected(pool.engine.arrived(inside, pool.now))
    for start in (*waiting, small):
        pool.engine.cancelled(start.id, pool.now)
    assert pool.engine.requests.waiting.places.counts["a"], "a place is kept"
    first = call("a", "first", 9000, user="zzz")
    assert pool.asks(first) == []
    assert pool.engine.explain(first.id, pool.now) is not None
    pool.now += 1.25 * wait_s + 1.0  # places are forgotten by time
    pool.asks(call("b", "b0", 100))
    assert not pool.engine.requests.waiting.places.counts["a"]


def test_a_start_that_waits_for_a_slot_reads_when_engines_have_taken_what_waits() -> None:
    pool = Pool(limits=QueueLimits(queue_wait_s_max=48.0, queue_requests_max=100))
    starts = [call("a", f"s{number}", 1, user=f"u{number}") for number in range(68)]
    waiting = len(starts) - sum(len(pool.asks(start)) for start in starts)
    assert waiting >= 2
    pool.now += 48.0
    late = [one for one in pool.engine.woke(pool.now) if isinstance(one, Reject)]
    assert [one.retry_after_s for one in late] == [1.0] * waiting
