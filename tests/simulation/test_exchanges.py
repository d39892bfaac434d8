"""Every charge counts once, and no room is given twice, in Redis and in the hub, which answer alike."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from math import inf, nan
from random import Random
from typing import Any

import msgspec
import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from redis import Redis
from redis.exceptions import ResponseError

from gateway.storage.hub.script_store import ScriptStore
from gateway.storage.redis.redis_store import Script, pool_key
from policies.replicas.messages import (
    Charge,
    CountDelta,
    Departure,
    Holding,
    InteractionDelta,
    ReplicaReport,
    ReplicaView,
    Standing,
)
from policies.tree.node import SEQUENCES, NodeUsage
from tests.redis_server import redis_client

BACKEND = "engine"
NAMES = ("a", "b", "c")
REPLICAS = 3
MOST = 10
"""Sequences that the engine may have, by what each replica tells or less."""
EXCHANGE_MS = 20
MEMBER_MS = 3000
KV_EACH = 10

_AT_A_TIME = """
local server = redis
local redis = { error_reply = server.error_reply, call = function(name, ...)
  return name == 'TIME' and { 0, ARGV[4] * 1000 } or server.call(name, ...)
end }
"""
_SCRIPT = _AT_A_TIME + Script("exchange.lua").source
"""The script with the time as its last argument."""
_KEYS = (pool_key("p", "replicas"), pool_key("p", ""))
_decode = msgspec.msgpack.Decoder(ReplicaView).decode
_encode = msgspec.msgpack.encode


class Stores:
    """The script in Redis and the script in the hub, which must reply alike."""

    def __init__(self, redis: Redis) -> None:
        self.run = redis.register_script(_SCRIPT)
        self.lose()

    def lose(self) -> None:
        """Begin with empty stores. Redis is flushed elsewhere."""
        self.hub = ScriptStore()

    def exchange(self, me: str, number: int, report: ReplicaReport, now_ms: int) -> ReplicaView:
        args: list[Any] = [me, number, _encode(report), now_ms]
        view = _decode(self.run(keys=_KEYS, args=args))
        of_hub = _decode(self.hub.exchange(me, number, _encode(report), now_ms))
        assert _as_plain(of_hub) == _as_plain(view)
        return view


def _as_plain(heard: ReplicaView) -> list[object]:
    """For comparison: tables of Lua have no order of their own."""
    return [*heard[:7], sorted(heard.usage), *heard[8:]]


@dataclass
class Replica:
    """What a gateway knows, as far as the script can tell: its counters, what it holds, what it has not read of."""

    name: str
    most: int
    number: int = 0
    counters: dict[str, float] = field(default_factory=lambda: dict.fromkeys(NAMES, 0.0))
    bases: dict[str, float] = field(default_factory=lambda: dict.fromkeys(NAMES, 0.0))
    pending: ReplicaReport | None = None
    granted: int = 0
    held: int = 0
    left_s: float = 0.0
    charged: dict[str, float] = field(default_factory=lambda: dict.fromkeys(NAMES, 0.0))
    """In all, here."""
    reported: dict[str, float] = field(default_factory=lambda: dict.fromkeys(NAMES, 0.0))
    """Of that, what has come to the store."""

    def charge(self, name: str, service: int) -> None:
        self.counters[name] += service
        self.charged[name] += service

    def lefts(self, waiting: int) -> list[Departure]:
        """Whose queue emptied last here."""
        self.left_s += 1.0
        name = NAMES[self.number % 3]
        return [] if waiting else [Departure("", name, self.counters[name], self.left_s)]

    def use(self, part: float) -> None:
        """Dispatch, or end, until this part of what is granted is held."""
        self.held = round(self.granted * part)

    def report(self, waiting: int) -> ReplicaReport:
        if self.pending is None:
            self.number += 1
            charges = [Charge(one, self.bases[one], self.counters[one] - self.bases[one], False) for one in NAMES]
            self.bases = dict(self.counters)
            held = Holding(
                BACKEND, self.held, KV_EACH * self.held, 0, self.most, KV_EACH * self.most,
                waiting, int(waiting > 0), KV_EACH * (waiting > 0),
            )  # fmt: skip
            self.pending = ReplicaReport(
                [self.standing()] if waiting else [], [held], charges, [], [], [], self.lefts(waiting), 0.0
            )
        return self.pending

    def standing(self) -> Standing:
        """Of one flow or another, so that all that decides who goes first is asked."""
        name, turn = NAMES[self.number % 2], self.number % 5
        flow = name if turn else f"{name}\x1f{self.number % 3}"
        return Standing(name, flow, self.counters[name], float(turn), float(self.number % 7), inside=turn == 3)

    def receive(self, view: ReplicaView) -> None:
        assert self.pending is not None
        for charge, total in zip(self.pending.charges, view.totals, strict=True):
            reported = charge.base + charge.service
            self.bases[charge.name] += total - reported
            self.counters[charge.name] += total - reported
        self.granted = view.grants[0].sequences
        self.pending = None


class World:
    """Some replicas before one store, at a time of its own."""

    def __init__(self, redis: Redis) -> None:
        redis.flushall()
        self.redis = redis
        self.stores = Stores(redis)
        self.now_ms = 1_000_000
        self._serial = 0
        self.replicas = [self.born() for _ in range(REPLICAS)]
        self.dead: list[Replica] = []

    def born(self) -> Replica:
        self._serial += 1
        return Replica(f"replica-{self._serial}", MOST - self._serial % 3)

    def die(self, at: int) -> None:
        self.dead.append(self.replicas[at])
        self.replicas[at] = self.born()

    def exchange(self, replica: Replica, waiting: int, lost: str) -> None:
        """`lost`: "" for neither, or the "request" or the "answer"."""
        report = replica.report(waiting)
        self.now_ms += EXCHANGE_MS
        if lost == "request":
            return
        others = self.granted_to_others(replica)
        view = self.stores.exchange(replica.name, replica.number, report, self.now_ms)
        for name in NAMES:
            replica.reported[name] = self.known_as_reported(replica, name)
        held, granted = report.holdings[0].sequences, view.grants[0].sequences
        assert granted <= max(held, MOST - others), "nothing is granted that another one has"
        if lost != "answer":
            replica.receive(view)

    def known_as_reported(self, replica: Replica, name: str) -> float:
        """All but what was charged since the exchange that is under way began."""
        untold = replica.counters[name] - replica.bases[name]
        return replica.charged[name] - untold

    def records(self) -> dict[str, Any]:
        found: dict[bytes, bytes] = self.redis.hgetall(_KEYS[0])  # type: ignore[assignment]
        return {name.decode(): msgspec.msgpack.decode(record) for name, record in found.items()}

    def granted_to_others(self, replica: Replica) -> int:
        members = {
            name: record for name, record in self.records().items() if self.now_ms - record["seen_ms"] <= MEMBER_MS
        }
        return sum(one["holdings"][0]["granted"] for name, one in members.items() if name != replica.name)

    def counter(self, name: str) -> float:
        return float(self.redis.get(f"{_KEYS[1]}c:{name}") or 0.0)

    def settle(self) -> None:
        """Everything is reported and read, nothing is held, and who died is forgotten."""
        self.now_ms += MEMBER_MS
        for _ in range(3):
            for replica in self.replicas:
                replica.held = 0
                self.exchange(replica, 0, "")


REPLICA = st.integers(0, REPLICAS - 1)
STEP = st.one_of(
    st.tuples(st.just("charge"), REPLICA, st.sampled_from(NAMES), st.integers(1, 50)),
    st.tuples(st.just("use"), REPLICA, st.just(""), st.sampled_from([0, 50, 100])),
    st.tuples(st.just("exchange"), REPLICA, st.sampled_from(["", "", "request", "answer"]), st.integers(0, 20)),
    st.tuples(st.just("die"), REPLICA, st.just(""), st.just(0)),
    st.tuples(st.just("time"), REPLICA, st.just(""), st.integers(1, 4000)),
)
FLUSH = st.tuples(st.just("flush"), REPLICA, st.just(""), st.just(0))


def play(world: World, steps: list[tuple[str, int, str, int]]) -> None:
    for what, at, which, amount in steps:
        replica = world.replicas[at]
        if what == "charge":
            replica.charge(which, amount)
        elif what == "use":
            replica.use(amount / 100)
        elif what == "exchange":
            world.exchange(replica, amount, which)
        elif what == "die":
            world.die(at)
        elif what == "time":
            world.now_ms += amount
        else:
            world.redis.flushall()
            world.stores.lose()


async def test_what_was_charged_counts_once_and_no_room_is_given_twice() -> None:
    async with redis_client() as redis:

        @settings(max_examples=150, suppress_health_check=list(HealthCheck))
        @given(st.lists(STEP, max_size=40))
        def check(steps: list[tuple[str, int, str, int]]) -> None:
            world = World(redis)
            play(world, steps)
            world.settle()
            for name in NAMES:
                alive = sum(replica.charged[name] for replica in world.replicas)
                assert world.counter(name) == alive + sum(replica.reported[name] for replica in world.dead)
                assert {replica.counters[name] for replica in world.replicas} == {world.counter(name)}
            members = {replica.name for replica in world.replicas}
            live = {name for name, one in world.records().items() if world.now_ms - one["seen_ms"] <= MEMBER_MS}
            assert live == members, "no grant without a member"
            granted = [one["holdings"][0]["granted"] for name, one in world.records().items() if name in members]
            most = max(replica.most for replica in world.replicas)
            assert sum(granted) <= most
            for replica in [*world.replicas, *world.replicas]:
                world.exchange(replica, 20 if replica is world.replicas[0] else 0, "")
            for _ in range(MOST):
                world.replicas[0].use(1.0)
                world.exchange(world.replicas[0], 20, "")
            assert world.replicas[0].granted == most, "what the dead had has come back, and all that is free is given"

        check()


async def test_a_flush_takes_nothing_that_one_who_is_left_has_heard_of() -> None:
    async with redis_client() as redis:

        @settings(max_examples=150, suppress_health_check=list(HealthCheck))
        @example([("charge", 0, "a", 10), ("flush", 0, "", 0), ("die", 1, "", 0), ("exchange", 1, "", 0)])
        @given(st.lists(st.one_of(STEP.filter(lambda step: step[:2] != ("die", 0)), FLUSH), max_size=40))
        def check(steps: list[tuple[str, int, str, int]]) -> None:
            world = World(redis)
            known = dict.fromkeys(NAMES, 0.0)
            for step in steps:
                if step[0] == "flush":
                    for replica in world.replicas * 2:  # what is under way may count twice or not at all
                        world.exchange(replica, 0, "")
                    known = dict(world.replicas[0].counters)
                play(world, [step])
            world.settle()
            for name in NAMES:
                charged = sum(replica.charged[name] for replica in world.replicas)
                charged += sum(replica.reported[name] for replica in world.dead)
                assert known[name] <= world.counter(name) <= charged
                assert {replica.counters[name] for replica in world.replicas} == {world.counter(name)}

        check()


SOUND = ReplicaReport(
    [Standing("a", "a\x1fx", 1.0, 1.0, -1.0, True)],
    [Holding(BACKEND, 1, 1, 1, 1, 1, 1, 1, 1)],
    [Charge("a", 1.0, -0.5, True), Charge("a\x1fx", 1.0, 1.0, False)],
    [CountDelta("users:a", 7, 180, (1, 1, -1, 2), (1, 1, 1, 1), 5)],
    [InteractionDelta("i", 1, -1, -1.0, 60.0, False)],
    [NodeUsage("a", SEQUENCES, 1)],
    [Departure("", "a", 1.0, 1.0)],
    1.0,
)
"""Has a number of every kind."""
SIGNED = {
    *(*(f"standings[0][{place}]" for place in (2, 3, 4)), "lefts[0][2]", "lefts[0][3]"),
    *(f"charges[{i}][{place}]" for i in (0, 1) for place in (1, 2)),
    *(f"tallies[0][{place}]" for place in (3, 4, 5)),
    *(f"calls[0][{place}]" for place in (1, 2, 3)),
    "usage[0][1]",
}


def spoiled(number: float) -> Iterator[tuple[str, ReplicaReport]]:
    """The same message with one number in the place of another, and which."""
    for name, rows in SOUND._asdict().items():
        if name == "quantum":
            yield name, SOUND._replace(quantum=number)
            continue
        for i, row in enumerate(rows):
            for place, value in enumerate(row):
                if isinstance(value, (str, bool)):
                    continue
                is_four = name == "tallies" and place in (3, 4)
                for put in [number] if not is_four else ((number, 1, 1, 1), (1, 1, 1, number)):
                    values = (*row[:place], put, *row[place + 1 :])
                    other = type(row)(*values)
                    part = [*rows[:i], other, *rows[i + 1 :]]
                    yield f"{name}[{i}][{place}]", SOUND._replace(**{name: part})


async def test_a_number_that_cannot_be_counted_is_refused_and_nothing_is_stored() -> None:
    async with redis_client() as redis:
        stores = Stores(redis)

        def refused(place: str, number: Any, report: ReplicaReport) -> None:
            args: list[Any] = ["bad", number, _encode(report), 1_000_000]
            said = f"^UNSOUND {re.escape(place)} of what[^\n]*$"
            with pytest.raises(ResponseError, match=said):
                stores.run(keys=_KEYS, args=args)
            with pytest.raises(ValueError, match=f"{said}|^Expected `int`"):
                stores.hub.exchange("bad", number, _encode(report), 1_000_000)

        stores.exchange("good", 1, SOUND, 1_000_000)
        stored = {key: redis.dump(key) for key in sorted(redis.keys())}
        for number in (nan, inf, -inf, 2e18, -1):
            for place, report in spoiled(number):
                if number != -1 or place not in SIGNED:
                    refused(place, 1, report)
        refused("number", -1, SOUND)
        for number in (nan, inf):
            refused("number", number, SOUND)
        for seconds in (0, 2e12):
            refused("calls[0][4]", 1, SOUND._replace(calls=[SOUND.calls[0]._replace(idle_s=seconds)]))
            refused("tallies[0][2]", 1, SOUND._replace(tallies=[SOUND.tallies[0]._replace(ttl_s=seconds)]))
        assert {key: redis.dump(key) for key in sorted(redis.keys())} == stored
        assert stores.exchange("good", 2, SOUND, 1_000_000).replicas == 1, "whoever was refused is no member"


async def test_a_counter_that_was_spoilt_before_goes_on_from_what_its_gateway_knows() -> None:
    async with redis_client() as redis:
        redis.set(f"{_KEYS[1]}c:a", "nan")
        args: list[Any] = ["one", 1, _encode(SOUND), 1_000_000]
        view = _decode(redis.register_script(_SCRIPT)(keys=_KEYS, args=args))
        assert view.totals[0] == SOUND.charges[0].base + SOUND.charges[0].service


async def test_both_stores_keep_the_same_buckets_and_answer_for_the_same() -> None:
    chance = Random(7)
    async with redis_client() as redis:
        stores = Stores(redis)
        for life in range(20):
            key, bucket = f"minute:{life}", 0
            stores.lose()
            for number in range(1, 30):
                bucket = max(0, bucket + chance.choice([-1, 0, 0, 1, 1, 5, 62, 64, 70]))
                more = (chance.randrange(-1, 3), chance.randrange(3), 0, 0)
                tally = CountDelta(
                    key,
                    bucket,
                    180,
                    more,
                    (0, 4, 5, 0),
                    bucket - chance.choice([-2, 0, 0, 3, 61, 80]),
                    chance.random() < 0.1,
                )
                report = ReplicaReport([], [], [], [tally], [], [], [], 0.0)
                stores.exchange(f"{life} {chance.randrange(2)}", number, report, life * 10**7)
                assert redis.hlen(f"{_KEYS[1]}w:{key}") <= 64
