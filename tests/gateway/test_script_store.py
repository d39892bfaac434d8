"""The store's script: who goes first, who has how much of an engine, who is lifted, and what is forgotten when."""

from __future__ import annotations

import itertools

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gateway.storage.hub.script_store import ScriptStore
from policies.replicas.messages import (
    BUCKETS_MAX,
    NUMBER_MAX,
    Charge,
    CountDelta,
    Departure,
    Holding,
    InteractionDelta,
    InteractionTotals,
    ReplicaReport,
    ReplicaView,
    Standing,
)
from policies.replicas.schedule import ALONE_S, WAITS_S
from policies.request import of_batch
from policies.tree.node import SEQUENCES, NodeUsage

EMPTY = ReplicaReport([], [], [], [], [], [], [], 0.0)


START_MS = 1_000_000
COUNTERS_MS = 900_000
SWEEP_MS = 60_000


def exchange(store: ScriptStore, number: int, report: ReplicaReport, now_ms: int, me: str = "me") -> ReplicaView:
    content = store.exchange(me, number, msgspec.msgpack.encode(report), now_ms)
    return msgspec.msgpack.decode(content, type=ReplicaView)


# --- who goes first, and how an engine is divided ---


STANDINGS = st.builds(
    lambda tenant, flow, *rest: Standing(tenant, f"{tenant}\x1f{flow}", *rest),
    st.sampled_from(("a", "b", of_batch("a"))), st.sampled_from("fg"), *[st.integers(0, 2)] * 3, *[st.booleans()] * 2,
)  # fmt: skip
WANTS = Holding("e", 0, 0, 0, 10, 100, 1, 1, 10)


def test_who_goes_first_is_who_does_by_policies() -> None:
    store, numbers = ScriptStore(), itertools.count(1)

    @settings(max_examples=200)
    @given(STANDINGS, STANDINGS)
    def check(one: Standing, other: Standing) -> None:
        number = next(numbers)
        for name, waiting in (("one", one), ("other", other)):
            exchange(store, number, EMPTY._replace(standings=[waiting], holdings=[WANTS]), START_MS, name)
        view = exchange(store, number, EMPTY, START_MS)
        assert view.standings == [one, other]
        assert view.next_elsewhere == (other if other.goes_first(one) else one)

    check()


FIRST, LATER = Standing("a", "a\x1f", 1.0, 0.0, 0.0, False), Standing("b", "b\x1f", 2.0, 0.0, 0.0, False)
RUNS = Holding("e", 2, 20, 15, 10, 100)
"""Two of ten sequences, and 20 of 100 tokens of KV."""
FEW = Holding("e", 0, 0, 0, 4, 200, 1, 1, 10)


@pytest.mark.parametrize(
    ("there", "here", "after_ms", "grant"),
    [
        pytest.param((None, RUNS), (FIRST, WANTS._replace(waiting=9)), 0, (2, 20, 2, 15, 2), id="half of what is free"),
        pytest.param((None, RUNS), (FIRST, WANTS), 0, (1, 10, 2, 15, 2), id="no more than can be used"),
        pytest.param((None, RUNS), (FIRST, WANTS._replace(next_sequences=3)), 0, (3, 10, 2, 15, 2), id="all it needs"),
        pytest.param((None, RUNS), (None, RUNS), 0, (3, 30, 2, 15, 2), id="in advance, where nothing waits"),
        pytest.param((FIRST, WANTS), (None, RUNS), 0, (2, 20, 0, 0, 2), id="nothing in advance of who waits"),
        pytest.param((FIRST, RUNS._replace(waiting=9, next_sequences=1, next_kv_tokens=10)), (LATER, WANTS), 0,
                     (0, 0, 2, 15, 2), id="what goes first keeps what it needs"),
        pytest.param((LATER, RUNS._replace(waiting=9, next_sequences=1, next_kv_tokens=10)), (FIRST, WANTS), 0,
                     (1, 10, 2, 15, 2), id="what goes later keeps nothing"),
        pytest.param((FIRST, FEW._replace(sequences=2, kv_tokens=20, waiting=9)), (LATER, FEW), 0, (0, 10, 2, 0, 2),
                     id="what finds no slot keeps no KV"),
        pytest.param((None, RUNS._replace(sequences_max=14, kv_tokens_max=140)), (None, RUNS), 0, (4, 40, 2, 15, 2),
                     id="the larger engine that one of them has seen"),
        pytest.param((None, RUNS), (None, RUNS), 301, (3, 30, 0, 0, 1), id="who is silent keeps its grant alone"),
        pytest.param((None, RUNS), (None, RUNS), 3001, (10, 100, 0, 0, 1), id="who is gone keeps nothing"),
    ],
)  # fmt: skip
def test_an_engine_is_divided(
    there: tuple[Standing | None, Holding], here: tuple[Standing | None, Holding], after_ms: int, grant: tuple[int, ...]
) -> None:
    store = ScriptStore()
    exchange(store, 1, EMPTY, START_MS)
    for name, number, at_ms, (waiting, holding) in (("you", 1, 0, there), ("me", 2, after_ms, here)):
        report = EMPTY._replace(standings=[] if waiting is None else [waiting], holdings=[holding])
        view = exchange(store, number, report, START_MS + at_ms, name)
    assert view.grants == [grant]


# --- counters ---


@pytest.mark.parametrize(
    ("waiting", "left", "quantum", "total"),
    [
        pytest.param({"b": 9.0, "c": 7.0}, None, 0.0, 7.0, id="the least that waits"),
        pytest.param({"b": 9.0, "c": 7.0}, None, 4.0, 4.0, id="whole rounds"),
        pytest.param({of_batch("b"): 9.0}, None, 0.0, 1.0, id="of its own line"),
        pytest.param({}, "b", 0.0, 6.0, id="who left last, where nobody waits"),
        pytest.param({}, "a", 0.0, 1.0, id="not by itself"),
        pytest.param({"a": 9.0, "b": 7.0}, None, 0.0, 1.0, id="not who waits elsewhere, too"),
    ],
)
@pytest.mark.parametrize("are_flows", [False, True])
def test_who_arrives_alone_is_lifted_to(
    waiting: dict[str, float], left: str | None, quantum: float, total: float, are_flows: bool
) -> None:
    def waits(name: str, served: float) -> Standing:
        if not are_flows:
            return Standing(name, f"{name}\x1f", served, 0.0, 0.0, False)
        return Standing("t" + name[1:], own(name), 0.0, served, 0.0, False)

    def own(name: str) -> str:
        return f"t\x1f{name}" if are_flows else name

    store, among = ScriptStore(), "t" if are_flows else ""
    rows = () if left is None else (("c", 8.0, 1.0), (left, 5.0, 2.0), ("d", 6.0, 1.5))
    lefts = [Departure(among, own(name), served, left_s) for name, served, left_s in rows]
    later, standings = [Charge(own("b"), 5.0, 1.0, raises=False)], [waits(*one) for one in waiting.items()]
    exchange(store, 1, EMPTY._replace(standings=standings, lefts=lefts, charges=later), START_MS, "other")
    exchange(store, 1, EMPTY, START_MS)
    charge = Charge(own("a"), 1.0, 0.0, raises=False, is_sole=True)
    view = exchange(store, 2, EMPTY._replace(charges=[charge], quantum=quantum), START_MS)
    assert view.totals == [total]
    again = EMPTY._replace(charges=[charge._replace(base=3.0, service=2.0, raises=True, is_sole=False)])
    assert exchange(store, 1, again, START_MS).totals == [total]


def test_a_counter_is_raised_to_what_a_gateway_says_that_raises_it_or_comes_anew() -> None:
    store = ScriptStore()
    charge = Charge("a", 3.0, 1.0, raises=False)
    raising, later = charge._replace(base=7.0, raises=True), charge._replace(base=9.0)
    totals = []
    for me, number, one in (
        ("me", 1, charge), ("me", 2, later), ("me", 2, charge), ("me", 3, raising), ("you", 1, later),
    ):  # fmt: skip
        totals += exchange(store, number, EMPTY._replace(charges=[one]), START_MS, me).totals
    assert totals == [4.0, 5.0, 5.0, 8.0, 10.0]


@pytest.mark.parametrize("order", [("waits", "charges"), ("charges", "waits")])
def test_what_waits_is_told_as_of_now_and_what_runs_in_sum(order: tuple[str, str]) -> None:
    store, waiting = ScriptStore(), Standing("b", "b\x1f", 5.0, 5.0, 1.0, False)
    charges = {"waits": (0.0, 0.0), "charges": (4.0, 3.0)}
    for runs, me in enumerate(order, 1):
        report = EMPTY._replace(
            charges=[Charge(name, 5.0, more, False) for name, more in zip(("b", "b\x1f"), charges[me], strict=True)],
            usage=[NodeUsage("b", SEQUENCES, runs)],
        )
        if me == "waits":
            report = report._replace(standings=[waiting], holdings=[WANTS])
        exchange(store, 1, report, START_MS, me)
    view = exchange(store, 1, EMPTY, START_MS + 100)
    assert view.next_elsewhere == Standing("b", "b\x1f", 9.0, 8.0, 1.1, False)
    assert view.usage == [NodeUsage("b", SEQUENCES, 3)]


def test_a_gateway_that_the_store_has_forgotten_hears_so_and_its_counts_are_raised_to_what_it_knows() -> None:
    store = ScriptStore()
    sums = []
    for me, number, base in (("me", 1, 0), ("me", 2, 9), ("you", 1, 5), ("they", 7, 0)):
        tally = CountDelta("minute:a", 7, 10, (1, 0, 0, 0), (base, 0, 0, 0), 7)
        view = exchange(store, number, EMPTY._replace(tallies=[tally]), START_MS, me)
        sums.append((view.counted[0][-1][0], view.is_forgotten))
    assert sums == [(1, False), (2, False), (6, False), (7, True)]


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
    call, question = InteractionDelta("i", 1, 100, 2.0, 30.0, False), InteractionDelta("i", 0, 0, 0.0, 30.0, False)
    over, opened = call._replace(is_over=True), InteractionTotals(1, 100, 2.0)
    for number, (each, answer) in enumerate([(call, opened), (question, opened), (over, None), (question, None)]):
        assert exchange(store, number, EMPTY._replace(calls=[each]), START_MS).opened == [answer]


def test_what_has_expired_takes_no_memory() -> None:
    store = ScriptStore()
    kib = store.lua.eval("function() collectgarbage() return collectgarbage('count') end")
    held = []
    for minute in range(4):
        calls = [InteractionDelta(f"interaction {minute} {i}", 1, 100, 0.0, 30.0, False) for i in range(1000)]
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
