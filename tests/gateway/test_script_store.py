"""The table on which the hub runs the script of Redis forgets what Redis would, at the time that it is given."""

from __future__ import annotations

import msgspec
import pytest

from gateway.storage.hub.script_store import ScriptStore
from policies.replicas.messages import (
    BUCKETS_MAX,
    NUMBER_MAX,
    CallDelta,
    Charge,
    CountDelta,
    Opened,
    ReplicaReport,
    ReplicaView,
    Standing,
)
from policies.replicas.schedule import ALONE_S, WAITS_S

EMPTY = ReplicaReport([], [], [], [], [], [], [], 0.0)


START_MS = 1_000_000
COUNTERS_MS = 900_000
SWEEP_MS = 60_000


def exchange(store: ScriptStore, number: int, report: ReplicaReport, now_ms: int, me: str = "me") -> ReplicaView:
    content = store.exchange(me, number, msgspec.msgpack.encode(report), now_ms)
    return msgspec.msgpack.decode(content, type=ReplicaView)


@pytest.mark.parametrize(
    ("after_ms", "replicas", "waiting"),
    [(1000 * WAITS_S, 2, 1), (1000 * WAITS_S + 1, 2, 0), (3000 * ALONE_S, 2, 0), (3000 * ALONE_S + 1, 1, 0)],
)
def test_a_gateway_waits_and_is_present_for_as_long_as_policies_have_it(
    after_ms: float, replicas: int, waiting: int
) -> None:
    store, waits = ScriptStore(), Standing("a", "a\x1f", 1.0, 1.0, 0.0, inside=False)
    exchange(store, 1, EMPTY._replace(standings=[waits]), START_MS, "other")
    view = exchange(store, 1, EMPTY, START_MS + round(after_ms))
    assert (view.replicas, len(view.standings)) == (replicas, waiting)


@pytest.mark.parametrize(("after_ms", "total"), [(COUNTERS_MS - 1, 7.0), (COUNTERS_MS, 5.0)])
def test_a_counter_that_nobody_changes_is_forgotten_in_time(after_ms: int, total: float) -> None:
    store = ScriptStore()
    exchange(store, 1, EMPTY._replace(charges=[Charge("a", 3.0, 4.0, False)]), START_MS)
    exchange(store, 2, EMPTY, START_MS + 1)
    view = exchange(store, 3, EMPTY._replace(charges=[Charge("a", 5.0, 0.0, False)]), START_MS + after_ms)
    assert view.totals == [total]


def test_who_waits_at_another_gateway_too_is_lifted_to_nothing() -> None:
    """Not even to its own counter as of the report there, from which a refund has been taken since."""
    store = ScriptStore()
    waiting = [
        Standing(name, f"{name}\x1f", served, 0.0, 0.0, inside=False) for name, served in (("b", 9.0), ("a", 7.0))
    ]
    exchange(store, 1, EMPTY._replace(standings=waiting, charges=[Charge("a", 0.0, 7.0, False)]), START_MS, "other")
    exchange(store, 1, EMPTY, START_MS)
    totals = []
    for number, refund, is_sole in ((2, -4.0, False), (3, 0.0, True)):
        charge = Charge("a", 7.0, refund, raises=False, is_sole=is_sole)
        totals += exchange(store, number, EMPTY._replace(charges=[charge]), START_MS + number).totals
    assert totals == [3.0, 3.0]


def counted(store: ScriptStore, number: int, bucket: int, requests: int, now_ms: int = START_MS) -> int:
    """Report requests in one bucket, and return those that the store has counted there."""
    tally = CountDelta("minute:a", bucket, 10, (requests, 0, 0, 0), (0, 0, 0, 0), bucket)
    [sums] = exchange(store, number, EMPTY._replace(tallies=[tally]), now_ms).counted
    return sums[-1][0]


@pytest.mark.parametrize(("after_ms", "requests"), [(9_999, 2), (10_000, 0)])
def test_counts_are_forgotten_in_time(after_ms: int, requests: int) -> None:
    store = ScriptStore()
    counted(store, 1, 7, 2)
    assert counted(store, 2, 7, 0, START_MS + after_ms) == requests
    counted(store, 3, 8, 1, START_MS + after_ms)
    assert counted(store, 4, 7, 0, START_MS + after_ms) == requests


def test_an_interaction_that_is_over_is_forgotten() -> None:
    store = ScriptStore()
    call, question = CallDelta("i", 1, 100, 2.0, 30.0, False), CallDelta("i", 0, 0, 0.0, 30.0, False)
    over, opened = call._replace(is_over=True), Opened(1, 100, 2.0)
    for number, (each, answer) in enumerate([(call, opened), (question, opened), (over, None), (question, None)]):
        assert exchange(store, number, EMPTY._replace(calls=[each]), START_MS).opened == [answer]


def test_what_has_expired_takes_no_memory() -> None:
    store = ScriptStore()
    kib = store.lua.eval("function() collectgarbage() return collectgarbage('count') end")
    held = []
    for minute in range(4):
        calls = [CallDelta(f"interaction {minute} {i}", 1, 100, 0.0, 30.0, False) for i in range(1000)]
        exchange(store, minute, EMPTY._replace(calls=calls), START_MS + minute * SWEEP_MS)
        held.append(kib())
    assert held[-1] < 1.1 * held[0]


def test_a_bucket_is_kept_until_as_many_are_newer_as_the_store_keeps() -> None:
    store = ScriptStore()
    assert counted(store, 1, 0, 5) == 5
    counted(store, 2, BUCKETS_MAX - 1, 1)
    assert counted(store, 3, 0, 0) == 5
    counted(store, 4, BUCKETS_MAX, 1)
    assert counted(store, 5, 0, 0) == 0


def test_the_highest_number_of_a_bucket_ends() -> None:
    bucket = int(NUMBER_MAX)
    tally = CountDelta("minute:a", bucket, 10, (1, 0, 0, 0), (0, 0, 0, 0), 0)
    [sums] = exchange(ScriptStore(), 1, EMPTY._replace(tallies=[tally]), START_MS).counted
    assert len(sums) <= 2 * BUCKETS_MAX
    assert sums[-1] == (1, 0, 0, 0)


def test_who_leaves_is_no_replica_any_more() -> None:
    store = ScriptStore()
    store.leave("you")
    exchange(store, 1, EMPTY, START_MS, "you")
    assert exchange(store, 1, EMPTY, START_MS).replicas == 2
    store.leave("you")
    assert exchange(store, 2, EMPTY, START_MS).replicas == 1
