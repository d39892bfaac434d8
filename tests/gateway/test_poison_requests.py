"""A request that engines die of is not passed around: two engines have it at most, and retries stay a small part."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from itertools import product
from typing import Any

import pytest

from gateway.pool.retries import AT_START, PER_REQUEST, SAVED_MAX, RetryBudget
from tests.gateway.capture import Peer, Seen, Upstream, answer
from tests.gateway.live import MODEL, Answer, Live, Simulated, Starter, chat, simulated, until
from tests.gateway.playbook import ASKED
from tests.kit.together import together
from tests.ports import free_port

WHOLE = b'{"choices":[],"usage":{"prompt_tokens":1,"completion_tokens":1}}'
OK, LAST = answer(WHOLE), answer(WHOLE, b"Connection: close")
POISON = "kills"
PATHS: dict[str, dict[str, Any]] = {
    path: {**ASKED[path], "user": POISON}
    for path in ("/v1/chat/completions", "/v1/responses", "/v1/messages", "/v1/embeddings")
}


class Frail:
    """An engine whose connections break when it is sent the poison; it goes on to take others."""

    def __init__(self, *, resets: bool = False, good: bytes = OK) -> None:
        self.resets = resets
        self.good = good
        self.poisoned = 0

    async def __call__(self, seen: Seen, peer: Peer) -> None:
        if POISON.encode() not in seen.body:
            await peer.send(self.good)
            return
        self.poisoned += 1
        if self.resets:
            peer.reset()
        else:
            peer.writer.close()


@pytest.mark.parametrize(("resets", "attempts_max"), [(False, 3), (True, 10)])
async def test_it_goes_to_two_engines_and_never_to_a_third(start: Starter, resets: bool, attempts_max: int) -> None:
    engines, limits = [Frail(resets=resets) for _ in range(4)], {"attempts_max": attempts_max}
    async with (
        together(map(Upstream, engines)) as upstreams,
        start(*[each.url for each in upstreams], limits=limits) as live,
    ):
        for number, (path, stream) in enumerate(product(PATHS, (False, True)), 1):
            got = await live.ask(path, {**PATHS[path], "stream": stream}, key=f"key-{number}")
            await is_given_up(live, got, number)
            assert sorted(engine.poisoned for engine in engines) == [0, 0, 1, 1], path
            forget(live, engines)


async def is_given_up(live: Live, got: Answer, number: int) -> None:
    """Its client need not try again, pays nothing, and nothing of it is left."""
    assert (got.status, got.headers["x-should-retry"]) == (502, "false")
    assert "retry-after" not in got.headers
    line = (await live.lines(number))[-1]
    assert (line["outcome"], line["reason"], line["tries"]) == ("failed", "backend_failed", 2)
    assert (line["tokens_in"], line["tokens_out"]) == (0, 0)
    await until(live.holds_nothing)


def forget(live: Live, engines: list[Frail]) -> None:
    """What comes next is the first of its kind."""
    for engine in engines:
        engine.poisoned = 0
    for pool in live.gateway.pools:
        for backend in pool.backends:
            pool.breaks.forget(backend)


@pytest.mark.parametrize("others", [0, 1], ids=["there is one engine", "the others are down"])
async def test_without_another_engine_it_is_not_sent_again(start: Starter, others: int) -> None:
    engine = Frail()
    async with Upstream(engine) as upstream:
        async with start(upstream.url, *[f"http://127.0.0.1:{free_port()}"] * others) as live:
            got = await live.ask("/v1/chat/completions", chat(POISON))
            assert (got.status, got.error["code"], engine.poisoned) == (502, "backend_failed", 1)
            assert live.holds_nothing()
            assert (await live.ask("/v1/chat/completions", chat())).status == 200


async def test_where_the_other_engine_is_out_of_reach_it_does_not_come_back(start: Starter) -> None:
    """The other engine has died and nobody knows it yet."""
    frail = Frail()
    async with Upstream(frail) as upstream, simulated(time_scale=0) as dies, start(upstream.url, dies.url) as live:
        await dies.server.stop()
        for _ in range(4):  # wherever it goes first
            assert (await live.ask("/v1/chat/completions", chat(POISON))).status == 502
        assert frail.poisoned == 4
        assert live.holds_nothing()


@pytest.mark.parametrize("backends", [1, 3])
async def test_on_connections_that_are_in_use_it_is_sent_twice_at_most(start: Starter, backends: int) -> None:
    """Where a used connection ends without a byte it may have been closed as idle, so a new one is tried, once."""
    engines = [Frail() for _ in range(backends)]
    async with together(map(Upstream, engines)) as upstreams, start(*[each.url for each in upstreams]) as live:
        warm = [live.ask("/v1/chat/completions", chat()) for _ in range(6 * backends)]
        assert {got.status for got in await asyncio.gather(*warm)} == {200}
        got = await live.ask("/v1/chat/completions", chat(POISON))
        assert (got.status, sum(engine.poisoned for engine in engines)) == (502, 2)
        assert live.holds_nothing()


async def test_retries_are_a_small_part_of_what_is_asked(start: Starter) -> None:
    asked, good = 60, 4
    engines = [Frail(good=LAST) for _ in range(3)]  # on a kept connection it might be sent twice to one
    async with together(map(Upstream, engines)) as upstreams, start(*[each.url for each in upstreams]) as live:
        for _ in range(asked):
            for _ in range(good):  # so that its answers do not mostly break
                assert (await live.ask("/v1/chat/completions", chat())).status == 200
            assert (await live.ask("/v1/chat/completions", chat(POISON))).status == 502
        sent = sum(engine.poisoned for engine in engines)
        assert asked < sent <= asked + AT_START + PER_REQUEST * asked * (1 + good)
        assert live.holds_nothing()


def two_pools(first: list[str], second: list[str], **of_second: Any) -> list[dict[str, Any]]:
    """The second stands in for the first."""
    return [
        {"name": "first", "models": [MODEL], "fallback": "small", "backends": [{"url": url} for url in first]},
        {"name": "second", "models": ["small"], "backends": [{"url": url} for url in second], **of_second},
    ]


async def test_without_another_engine_the_fallback_has_it_once_and_no_third_one(start: Starter) -> None:
    engines = [Frail() for _ in range(3)]
    async with together(map(Upstream, engines)) as (first, *others):
        async with start(pools=two_pools([first.url], [each.url for each in others], fallback=MODEL)) as live:
            for number, (path, stream) in enumerate(product(PATHS, (False, True)), 1):
                got = await live.ask(path, {**PATHS[path], "stream": stream}, key=f"key-{number}")
                await is_given_up(live, got, number)
                assert engines[0].poisoned == 1, path
                assert sorted(engine.poisoned for engine in engines[1:]) == [0, 1], path
                forget(live, engines)


@asynccontextmanager
async def with_fallback(start: Starter, **of_second: Any) -> AsyncIterator[tuple[Live, Frail, Simulated]]:
    """An engine that dies, and one in good health whose pool stands in for it."""
    frail = Frail()
    async with Upstream(frail) as dies, simulated(models=("small",), time_scale=0) as small:
        both = two_pools([dies.url], [small.url], **of_second)
        async with start(pools=both, limits={"attempts_max": 10}) as live:
            yield live, frail, small
            await until(live.holds_nothing)


async def test_the_fallback_answers_what_the_only_engine_died_with_within_its_budget(start: Starter) -> None:
    async with with_fallback(start, fallback=MODEL) as (live, frail, small):
        for stream in (False, True):
            assert (await live.ask("/v1/chat/completions", chat(POISON, stream=stream))).status == 200
        assert frail.poisoned == 2
        for line in await live.lines(2):
            assert (line["outcome"], line["model"], line["tries"]) == ("completed", "small", 2)
        await small.server.stop()  # its fallback is the first pool, and nobody knows yet that it has died
        assert (await live.ask("/v1/chat/completions", chat(POISON))).status == 502
        assert frail.poisoned == 3, "it does not come back to the engine that died of it"
    async with with_fallback(start) as (live, _, _):
        while live.gateway.pools[0].retries.take():
            pass
        assert (await live.ask("/v1/chat/completions", chat(POISON))).status == 502


def test_the_budget_of_retries() -> None:
    budget = RetryBudget()
    assert [budget.take() for _ in range(int(AT_START) + 1)] == [True] * int(AT_START) + [False]
    for _ in range(round(1 / PER_REQUEST) + 1):
        budget.sent()
    assert [budget.take(), budget.take()] == [True, False]
    for _ in range(10**4):
        budget.sent()
    assert [budget.take() for _ in range(200)].count(True) in (int(SAVED_MAX), int(SAVED_MAX) - 1)
