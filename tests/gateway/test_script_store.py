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
    ReplicaReport,
    ReplicaView,
)

EMPTY = ReplicaReport([], [], [], [], [], [], [], 0.0)
START_MS = 1_000_000
COUNTERS_MS = 900_000
SWEEP_MS = 60_000


def exchange(store: ScriptStore, number: int, report: ReplicaReport, now_ms: int, me: str = "me") -> ReplicaView:
    content = store.exchange(me, number, msgspec.msgpack.encode(report), now_ms)
    return msgspec.msgpack.decode(content, type=ReplicaView)


@pytest.mark.parametrize(("after_ms", "total"), [(COUNTERS_MS - 1, 7.0), (COUNTERS_MS, 5.0)])
def test_a_counter_that_nobody_changes_is_forgotten_in_time(after_ms: int, total: float) -> None:
    store = ScriptStore()
    exchange(store, 1, EMPTY._replace(charges=[Charge("a", 3.0, 4.0, False)]), START_MS)
    exchange(store, 2, EMPTY, START_MS + 1)
    view = exchange(store, 3, EMPTY._replace(charges=[Charge("a", 5.0, 0.0, False)]), START_MS + after_ms)
    assert view.totals == [total]


@pytest.mark.parametrize(("after_ms", "requests"), [(9_999, 3), (10_000, 1)])
def test_counts_are_forgotten_in_time(after_ms: int, requests: int) -> None:
    store, view = ScriptStore(), None
    for number, (more, now_ms) in enumerate([(2, START_MS), (1, START_MS + after_ms)], 1):
        tally = CountDelta("minute:a", 7, 10, (more, 0, 0, 0), (0, 0, 0, 0), 7)
        view = exchange(store, number, EMPTY._replace(tallies=[tally]), now_ms)
    assert view is not None
    assert view.counted == [[(requests, 0, 0, 0)]]


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

    def counted(number: int, bucket: int, requests: int) -> int:
        tally = CountDelta("minute:a", bucket, 180, (requests, 0, 0, 0), (0, 0, 0, 0), bucket)
        [sums] = exchange(store, number, EMPTY._replace(tallies=[tally]), START_MS).counted
        return sums[-1][0]

    assert counted(1, 0, 5) == 5
    counted(2, BUCKETS_MAX - 1, 1)
    assert counted(3, 0, 0) == 5
    counted(4, BUCKETS_MAX, 1)
    assert counted(5, 0, 0) == 0


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
