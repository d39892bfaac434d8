"""Answers that break stop an engine only where it is at fault; else they slow down who asks for them, and no other."""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from collections.abc import Awaitable, Callable
from contextlib import AbstractAsyncContextManager
from pathlib import Path

import pytest

from gateway.config.sections.keys import hash_key
from gateway.pool.breaks import BREAKS_MIN, PACE_S, RECENT, TENANTS_MAX, WINDOW_S, Breaks
from tests.gateway.capture import BEGUN, DONE, OK, STREAM, Peer, Seen, Upstream, answer, token
from tests.gateway.live import CHAT, Live, Starter, chat, until
from tests.kit.batching import TENANTS, client, is_over, jsonl, line
from tests.kit.together import together
from tests.waiting import eventually

pytestmark = pytest.mark.usefixtures("quick_probes")

Break = Callable[[Peer], Awaitable[None]]


async def cut(peer: Peer) -> None:
    await peer.send(BEGUN)
    peer.writer.close()


class Moody(Upstream):
    """An engine on which the requests break that say so, or all. What is polled is there."""

    def __init__(self, how: Break) -> None:
        super().__init__(self._answer)
        self.how = how
        self.breaks_all = False
        self.broken: list[str] = []
        """What was said in the requests that broke."""

    async def _answer(self, seen: Seen, peer: Peer) -> None:
        if seen.line.startswith(b"GET"):
            await peer.send(answer(b"{}"))
            return
        said = seen.json["messages"][0]["content"]
        if self.breaks_all or said.startswith("break"):
            self.broken.append(said)
            await self.how(peer)
        else:
            await peer.send(STREAM if seen.json.get("stream") else OK)


async def closes(peer: Peer) -> None:
    peer.writer.close()


async def no_json(peer: Peer) -> None:
    await peer.send(answer(b'{"choices":['))


def moodies(how: Break, count: int) -> AbstractAsyncContextManager[list[Moody]]:
    """Some of them, all alike."""
    return together([Moody(how) for _ in range(count)])


def urls(engines: list[Moody]) -> list[str]:
    return [engine.url for engine in engines]


def broken(engines: list[Moody]) -> int:
    return sum(len(engine.broken) for engine in engines)


async def breaking(live: Live) -> str:
    """What comes of a request that breaks: the code of the error, in an answer or in a stream."""
    got = await live.ask(CHAT, chat("break", stream=True), key="bob")
    return str(json.loads(got.body[got.body.index(b'{"error"') :])["error"]["code"])


def in_service(live: Live) -> list[bool]:
    return [backend.in_service for backend in live.gateway.pools[0].backends.values()]


# --- the judge ---


def told(breaks: Breaks, engine: str, tenant: str, answers: str, now: float = 0.0) -> None:
    """Its answers there, in order: b: it broke; w: it was whole."""
    for each in answers:
        breaks.answered(engine, tenant, now, broke=each == "b")


LATER = f"+{WINDOW_S + 1.0}"
FAULTS = {
    "a:bbbb": False,
    "a:bbbbb": True,
    "a:wwwwbbbbb": True,
    "a:wwwwwwwwbbbb": False,
    "a:b b:b c:b d:b e:b": True,
    "a:bbbbbbbbbbbbbbbbbbbb h:w": False,
    "a:bbb b:bbb h:w": True,
    "a:bbb b:bbb h:w i:w": False,
    "a:bbbbb a@f:wwww": True,
    "a:bbbbb a@f:b": False,
    "a:bwbwbwbwbwbwbwbwbwbw": False,
    "a:bbbwwww b:bbbwwww": False,
    "a:bbbbb a@f:b b:bbbbb": True,
    # What is long ago says nothing.
    f"a:bbbbb {LATER}": False,
    f"a:bbbb {LATER} a:b": False,
    f"a:bbbb {LATER} a:b +1.0 a:bbbb": True,
    # Nor does what was whole before speak for an engine that breaks for several.
    "a:wwww b:wwww c:wwww d:wwww +1.0 a:bbbbb": False,
    "a:wwww b:wwww c:wwww d:wwww +1.0 a:bbbbb b:bbbbb +1.0 c:w": True,
    "a:wwww b:wwww c:wwww d:wwww +1.0 a:bbbbb b:bbbbb +1.0 c:w d:w": False,
}
"""Whether engine e is at fault, by stories: a tenant's answers at e, or at another engine; `+` lets seconds pass."""


@pytest.mark.parametrize(("story", "is_at_fault"), FAULTS.items())
def test_an_engine_is_at_fault_for_more_tenants_than_it_answers(story: str, is_at_fault: bool) -> None:
    breaks, now = Breaks(), 0.0
    for word in story.split():
        if word.startswith("+"):
            now += float(word)
        else:
            who, _, answers = word.partition(":")
            tenant, _, engine = who.partition("@")
            told(breaks, engine or "e", tenant, answers, now)
    assert breaks.is_engine_at_fault("e", now, is_shared=False) is is_at_fault
    assert not breaks.is_engine_at_fault("g", now, is_shared=False)


def test_one_of_several_is_not_heard_while_others_have_long_answers() -> None:
    breaks = Breaks()
    told(breaks, "e", "a", "b" * BREAKS_MIN)
    assert not breaks.is_engine_at_fault("e", 0.0, is_shared=True)
    told(breaks, "e", "b", "b")
    assert breaks.is_engine_at_fault("e", 0.0, is_shared=True)


def test_a_tenant_at_fault_is_slow_until_an_answer_is_whole() -> None:
    breaks = Breaks()
    told(breaks, "e", "a", "b" * (BREAKS_MIN - 1))
    assert breaks.waits_s("a", 0.0) == 0.0
    told(breaks, "e", "a", "b")
    assert breaks.waits_s("a", PACE_S / 2) == PACE_S / 2
    assert breaks.waits_s("b", PACE_S / 2) == 0.0
    assert [breaks.waits_s("a", PACE_S + now) for now in (0.0, 0.0, PACE_S / 4)] == [0.0, PACE_S, 0.75 * PACE_S]
    told(breaks, "e", "a", "w", PACE_S)
    assert "a" not in breaks.paced
    told(breaks, "e", "a", "b", PACE_S)
    assert "a" in breaks.paced
    told(breaks, "f", "a", "w", PACE_S)
    told(breaks, "e", "a", "b", PACE_S)
    assert "a" not in breaks.paced, "it is answered elsewhere"


def test_a_tenant_is_slow_no_longer_than_its_answers_say_something() -> None:
    breaks = Breaks()
    told(breaks, "e", "a", "b" * BREAKS_MIN)
    assert [breaks.waits_s("a", WINDOW_S + 1.0) for _ in range(3)] == [0.0] * 3


def test_an_engine_that_goes_takes_what_broke_there_with_it() -> None:
    breaks = Breaks()
    told(breaks, "e", "a", "b" * BREAKS_MIN)
    breaks.forget("e")
    assert "a" not in breaks.paced
    told(breaks, "e", "a", "b" * (BREAKS_MIN - 1))
    assert "a" not in breaks.paced


def test_what_is_remembered_is_bounded() -> None:
    breaks = Breaks()
    for number in range(2 * TENANTS_MAX):
        told(breaks, "e", f"t{number}", "b" * (2 * RECENT), number / TENANTS_MAX)
    assert len(breaks.latest["e"]) == TENANTS_MAX
    assert len(breaks.paced) <= TENANTS_MAX
    assert max(answers.bits for answers in breaks.latest["e"].values()) < 1 << RECENT


# --- the gateway ---

NAMES = ("alice", "bob", "carol", "dan")
KEYS = [{"name": name, "keys": [hash_key(name)]} for name in NAMES]


def test_a_crash_is_one_incident_and_slows_down_nobody() -> None:
    breaks = Breaks()
    for _ in range(100):
        breaks.answered("one", "alice", 10.0, broke=True, began_s=9.0)
    assert breaks.waits_s("alice", 10.0) == 0.0
    for number in range(1, BREAKS_MIN):
        breaks.answered("one", "alice", 10.0 + number, broke=True, began_s=9.5 + number)
    assert breaks.waits_s("alice", 10.0 + number) > 0.0


@pytest.mark.parametrize(("how", "count", "first"), [(cut, 1, "alice"), (closes, 2, "bob")])
async def test_nobody_loses_anything_beside_one_whose_requests_break(
    start: Starter, how: Break, count: int, first: str
) -> None:
    async with moodies(how, count) as engines, start(*urls(engines), tenants=KEYS) as live:
        over = asyncio.Event()

        async def break_on() -> None:
            while not over.is_set():
                await breaking(live)

        async def ask_on(stream: bool) -> set[int]:
            return {(await live.ask(CHAT, chat(stream=stream), key="alice")).status for _ in range(100)}

        if first == "alice":
            await asyncio.gather(*[live.ask(CHAT, chat(), key="alice") for _ in range(8)])
        tasks = [asyncio.ensure_future(break_on()) for _ in range(4)]
        await until(lambda: broken(engines) >= BREAKS_MIN)
        await until(lambda: all(in_service(live)))  # bob alone can take one of two out, once
        assert await asyncio.gather(ask_on(False), ask_on(True)) == [{200}, {200}]
        assert all(in_service(live))
        over.set()
        await asyncio.gather(*tasks)
        lines = [each for each in await live.lines(200) if each["tenant"] == "alice"]
        assert {each["tries"] for each in lines} == {1}
        assert {held for each in lines for held in each.get("waited_ms", ())} <= {"turn", "slots", "prefill"}


@pytest.mark.parametrize("how", [cut, no_json])
async def test_an_engine_whose_answers_break_for_all_is_out_of_service(
    start: Starter, how: Break, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("gateway.pool.pool.PROBE_INTERVAL_S", 60.0)  # it does not come back meanwhile
    # By their prompts all but one tenant might go to the other engine, and one of several alone stops no engine.
    spread = {"name": "fairserve", "placement": "least_loaded"}
    async with moodies(how, 2) as engines, start(*urls(engines), tenants=KEYS, policy=spread) as live:
        sick, _ = engines
        for _ in range(4):
            await asyncio.gather(*[live.ask(CHAT, chat(), key=name) for name in NAMES])
        sick.breaks_all = True
        while all(in_service(live)):
            await asyncio.gather(*[live.ask(CHAT, chat(stream=True), key=name) for name in NAMES])
        assert in_service(live) == [False, True]
        assert len(sick.broken) < 3 * RECENT * len(NAMES)
        assert {(await live.ask(CHAT, chat(stream=True), key=name)).body for name in NAMES} == {token("a") + DONE}


async def test_the_last_engine_stays_and_who_asks_for_what_breaks_is_slow(start: Starter) -> None:
    async with moodies(cut, 1) as engines, start(*urls(engines), tenants=KEYS) as live:
        [engine] = engines
        assert [await breaking(live) for _ in range(BREAKS_MIN)] == ["backend_failed"] * BREAKS_MIN
        got = await live.ask(CHAT, chat("break"), key="bob")
        assert (got.status, got.error["code"]) == (503, "answers_break")
        assert 0 < int(got.headers["retry-after-ms"]) <= 1.1 * PACE_S * 1000
        assert (len(engine.broken), in_service(live)) == (BREAKS_MIN, [True])
        assert (await live.ask(CHAT, chat(), key="alice")).status == 200
        [line] = [each for each in await live.lines(BREAKS_MIN + 2) if each["reason"] == "answers_break"]
        assert (line["tenant"], line["tries"], line["tokens_in"], line["tokens_out"]) == ("bob", 0, 0, 0)


async def test_who_is_slow_takes_no_second_engine_with_its_requests(start: Starter) -> None:
    async with moodies(closes, 2) as engines, start(*urls(engines), tenants=KEYS) as live:
        for _ in range(BREAKS_MIN):
            await breaking(live)
        before = broken(engines)
        pool = live.gateway.pools[0]
        pool.breaks.paced["bob"] = 0.0  # its next one may go
        got = await live.ask(CHAT, chat("break"), key="bob")
        assert (got.status, broken(engines) - before) == (502, 1)


async def test_what_passes_through_says_nothing_of_answers_that_break(
    start: Starter, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("gateway.pool.pool.PROBE_INTERVAL_S", 60.0)  # no engine comes back meanwhile
    async with moodies(cut, 2) as engines, start(*urls(engines), tenants=KEYS) as live:
        codes = []
        for _ in range(3 * BREAKS_MIN):
            codes.append(await breaking(live))
            assert (await live.get("/version", key="bob")).status == 200
        assert "answers_break" in codes, codes


@pytest.mark.slow
async def test_a_line_of_a_batch_is_sent_to_two_engines_at_most_and_stops_none(
    start: Starter, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("gateway.proxy.batches.batch_lane.AGAIN_S", 0.01)
    usage = str(tmp_path / "usage.db")
    lines = [line(n, messages=[{"role": "user", "content": f"break {n}"}]) for n in range(BREAKS_MIN + 1)]
    async with (
        moodies(closes, 2) as engines,
        start(*urls(engines), tenants=TENANTS, usage=usage, batches={"running_max": len(lines)}) as live,
        client(live.url) as api,
    ):
        batch = await api.made(jsonl(*lines))

        async def is_done() -> bool:
            live.gateway.pools[0].breaks.paced.clear()  # nobody waits for seconds here
            assert (await live.ask(CHAT, chat(), key="b")).status == 200
            return is_over(await api.batches.retrieve(batch.id))

        await eventually(is_done)
        assert all(in_service(live))
        sent = Counter(said for engine in engines for said in engine.broken)
        assert len(sent) == len(lines)
        assert max(sent.values()) <= 2
