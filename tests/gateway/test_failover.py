"""An engine that fails or refuses: tried elsewhere while nothing was seen of an answer, a visible error afterwards."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from itertools import product
from typing import Any

import pytest

from gateway.pool.pool import AT_START, PER_REQUEST, SAVED_MAX, RetryBudget
from tests.gateway.capture import OK, Peer, Script, Seen, Upstream, answer, replies, silent
from tests.gateway.live import MODEL, Answer, Live, Simulated, Starter, chat, simulated, until
from tests.gateway.playbook import ASKED, STREAMED
from tests.kit.together import together
from tests.ports import free_port

FIFTY = {"max_tokens": 50, "max_output_tokens": 50, "ignore_eos": True}
BY_LOAD = {"name": "fairserve", "placement": "least_loaded"}


@asynccontextmanager
async def two_engines(start: Starter) -> AsyncIterator[tuple[Live, Simulated]]:
    """Two engines of one pool, of which `a`, the other value, is asked where both are idle: it comes first by name."""
    async with simulated(time_scale=0) as first, simulated(time_scale=0) as second:
        backends = [{"url": first.url, "name": "a"}, {"url": second.url, "name": "b"}]
        async with start(policy=BY_LOAD, pools=[{"name": "pool", "backends": backends}]) as live:
            yield live, first


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("fault", ["refuses the connection", "resets it before the first byte"])
async def test_an_engine_that_has_said_nothing_is_replaced_by_another(start: Starter, fault: str, stream: bool) -> None:
    async with two_engines(start) as (live, fails):
        if fault == "refuses the connection":
            await fails.server.stop()
        else:
            fails.faults.reset_next = 1
        got = await live.ask("/v1/chat/completions", chat(stream=stream, max_tokens=3))
        assert (got.status, fails.faults.reset_next) == (200, 0)
        [line] = await live.lines(1)
        assert (line["tries"], line["outcome"], line["backend"]) == (2, "completed", "b")


UNQUEUED: dict[str, Any] = {
    "/tokenize": {"model": MODEL, "prompt": "x" * 400_000},
    "/detokenize": {"model": MODEL, "tokens": [1]},
    "/v1/messages/count_tokens": {"model": MODEL, "messages": []},
    "/v1/videos": {"a": 1},
}


async def test_beside_the_queue_a_refused_connection_is_tried_elsewhere(start: Starter) -> None:
    routes = [{"path": "/v1/videos", "treatment": "pass"}]
    async with (
        simulated() as one,
        simulated() as two,
        Upstream(replies(answer(b'{"count":3}'))) as well,
        start(one.url, two.url, well.url, routes=routes) as live,
    ):
        await asyncio.gather(one.server.stop(), two.server.stop())
        paths = (*UNQUEUED, "/version", *UNQUEUED)
        for path in paths:
            assert (await ask_beside(live, path)).body == b'{"count":3}', path
        assert {line["backend"] for line in await live.lines(len(paths))} == {well.url.removeprefix("http://")}
        assert [json.loads(seen.unsalted or b"null") for seen in well.requests] == [
            UNQUEUED.get(path) for path in paths
        ]


async def ask_beside(live: Live, path: str) -> Answer:
    return await (live.ask(path, UNQUEUED[path]) if path in UNQUEUED else live.get(path))


@pytest.mark.parametrize("path", ["/tokenize", "/version"])
async def test_beside_the_queue_each_engine_is_tried_once(start: Starter, path: str) -> None:
    async with simulated() as one, simulated() as two, start(one.url, two.url) as live:
        await asyncio.gather(one.server.stop(), two.server.stop())
        got = await ask_beside(live, path)
        assert (got.status, got.error["code"]) == (503, "no_backend")
        assert [line["tries"] for line in await live.lines(1)] == [2]


async def dies(seen: Seen, peer: Peer) -> None:
    peer.reset()


@pytest.mark.parametrize(
    ("path", "script", "status"), [("/tokenize", dies, 502), ("/v1/chat/completions", silent, 504)]
)
async def test_what_an_engine_may_be_at_work_on_is_sent_to_no_other(
    start: Starter, path: str, script: Script, status: int
) -> None:
    limits = {"upstream_silence_s": 0.1}
    async with Upstream(script) as one, Upstream(script) as two, start(one.url, two.url, limits=limits) as live:
        assert (await live.ask(path, ASKED[path])).status == status
        assert len(one.requests) + len(two.requests) == 1


@pytest.mark.parametrize("attempts_max", [1, 3])
async def test_attempts_to_reach_an_engine_are_bounded(start: Starter, attempts_max: int) -> None:
    async with simulated() as sim, start(sim.url, limits={"attempts_max": attempts_max}) as live:
        await sim.server.stop()
        got = await live.ask("/v1/chat/completions", chat())
        assert (got.status, got.error["code"]) == (503, "no_backend")
        # The third failure in a row puts the engine out of service, for two probes at least.
        again_ms = 1000 if attempts_max == 1 else 4000
        assert again_ms <= int(got.headers["retry-after-ms"]) <= 1.1 * again_ms
        [line] = await live.lines(1)
        assert (line["tries"], line["tokens_in"], line["tokens_out"]) == (attempts_max, 0, 0)


@pytest.mark.parametrize("fault", ["refuse_next", "refuse_in_stream_next"])
@pytest.mark.parametrize("stream", [False, True])
async def test_a_refusal_is_waited_out_and_costs_nothing(start: Starter, fault: str, stream: bool) -> None:
    async with simulated(time_scale=0) as sim, start(sim.url) as live:
        setattr(sim.faults, fault, 2)
        got = await live.ask("/v1/chat/completions", chat(stream=stream, max_tokens=5, ignore_eos=True))
        assert got.status == 200
        assert b'"error"' not in got.body
        [line] = await live.lines(1)
        assert (line["outcome"], line["tries"], line["tokens_out"]) == ("completed", 3, 5)
        metrics = await live.metrics()
        assert metrics["fairgate_tokens_total", "output", MODEL, "pool", line["tenant"]] == 5
        assert [charged.output for charged in live.charged.values()] == [5]


class Busy:
    """An engine that refuses what says so, and answers the rest."""

    def __init__(self, status: bytes, again: bytes) -> None:
        self.refusal = answer(b"{}", b"Retry-After: " + again, status=status)
        self.refused = 0

    async def __call__(self, seen: Seen, peer: Peer) -> None:
        is_refused = b"busy" in seen.body
        self.refused += is_refused
        await peer.send(self.refusal if is_refused else OK)


@pytest.mark.parametrize(
    ("count", "status"), [(1, b"429 Too Many Requests"), (2, b"503 Service Unavailable")], ids=["429", "503 of two"]
)
async def test_an_engine_that_says_when_is_not_asked_before_and_its_time_is_told(
    start: Starter, count: int, status: bytes
) -> None:
    engines = [Busy(status, b"700") for _ in range(count)]
    async with together(map(Upstream, engines)) as upstreams, start(*[each.url for each in upstreams]) as live:
        asked = asyncio.ensure_future(live.ask("/v1/chat/completions", chat("busy"), key="a"))
        others = [await live.ask("/v1/chat/completions", chat(), key="b") for _ in range(20)]
        assert {each.status for each in others} == {200}
        got = await asked
        assert (got.status, got.error["code"]) == (503, "server_busy")
        assert 690 <= int(got.headers["retry-after"]) <= 800
        assert [engine.refused for engine in engines] == [1] * count


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("path", STREAMED)
async def test_a_draining_engine_s_empty_abort_is_tried_elsewhere(start: Starter, path: str, stream: bool) -> None:
    async with two_engines(start) as (live, drains):
        drains.faults.is_draining = True
        got = await live.ask(path, {**ASKED[path], **FIFTY, "stream": stream})
        assert (got.status, b"abort" in got.body, b"cancelled" in got.body) == (200, False, False)
        [line] = await live.lines(1)
        assert (line["tries"], line["tokens_out"]) == (2, 50)


# --- a request that engines die of is not passed around, and retries are bounded ---

POISON = "kills"
PATHS: dict[str, dict[str, Any]] = {
    path: {**ASKED[path], "user": POISON}
    for path in ("/v1/chat/completions", "/v1/responses", "/v1/messages", "/v1/embeddings")
}


class Frail:
    """An engine whose connections break when it is sent the poison; it goes on to take others."""

    def __init__(self, *, resets: bool = False) -> None:
        self.resets = resets
        self.poisoned = 0

    async def __call__(self, seen: Seen, peer: Peer) -> None:
        if POISON.encode() not in seen.body:
            await peer.send(OK)
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
