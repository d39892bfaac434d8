"""An engine that says after each step what it holds is believed while it can be; else its metrics are read, at once."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any
from urllib.parse import urlsplit

import aiohttp
import pytest
from aiohttp import web

from backends.control_client import ControlClient
from backends.engines.vllm import VllmAdapter
from backends.scraper import CHECK_INTERVAL_S, Scraper
from backends.step_feed import SILENCE_S, StepFeed
from backends.vllm_plugin import steps
from gateway.proxy.exchange import Exchange
from gateway.telemetry.background import Tasks
from policies.capacity.gauges import Gauges
from policies.capacity.slots import FIRST_SLOTS
from tests.gateway.capture import STREAM_END, STREAM_HEAD, Peer, Seen, Upstream, chunk, token
from tests.gateway.live import CHAT, MODEL, Live, Starter, chat, simulated, until

Said = dict[str, Any]


class Middleman:
    """Stands before an engine and does to its feed what `change` does to each message; None: it is held back."""

    def __init__(self, url: str) -> None:
        self.engine = url
        self.url = ""
        self.change: Callable[[Said], Said | bytes | None] = lambda said: said
        self.feed: asyncio.Future[None] | None = None
        self.pages = 0

    async def answer(self, request: web.Request) -> web.StreamResponse:
        async with (
            aiohttp.ClientSession() as http,
            http.request(request.method, self.engine + request.raw_path, data=await request.read()) as answer,
        ):
            self.pages += request.path.startswith("/metrics")
            response = web.StreamResponse(status=answer.status, headers={"content-type": answer.content_type})
            await response.prepare(request)
            if request.path == steps.PATH:
                self.feed = asyncio.ensure_future(self.relay(answer, response))
                await asyncio.gather(self.feed, return_exceptions=True)
            else:
                async for data in answer.content.iter_any():
                    await response.write(data)
            return response

    async def relay(self, answer: aiohttp.ClientResponse, response: web.StreamResponse) -> None:
        async for line in answer.content:
            changed = self.change(json.loads(line))
            if changed is not None:
                await response.write(changed if isinstance(changed, bytes) else json.dumps(changed).encode() + b"\n")


@asynccontextmanager
async def before(url: str) -> AsyncIterator[Middleman]:
    middleman = Middleman(url)
    app = web.Application()
    app.router.add_route("*", "/{path:.*}", middleman.answer)
    runner = web.AppRunner(app, handler_cancellation=True, shutdown_timeout=0.1)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    middleman.url = f"http://127.0.0.1:{runner.addresses[0][1]}"
    try:
        yield middleman
    finally:
        await runner.cleanup()


async def read_by(live: Live) -> tuple[str, str]:
    [engine] = (await live.get("/state", admin=True)).json["pools"][0]["backends"]
    return engine["read_by"], engine["not_by_steps_because"]


async def on_steps(live: Live) -> None:
    [backend] = live.gateway.pools[0].backends.values()
    await until(lambda: backend.read_by == "steps")


def older(said: Said) -> Said:
    return {**said, "now_s": said["now_s"] - 0.6}


FAULTS: dict[str, Callable[[Said], Said | bytes | None]] = {
    "silent": lambda said: None,
    "late": older,
    "another start": lambda said: {**said, "start": "another"},
    "not JSON": lambda said: b"\x00\xff\n",
    "absurd": lambda said: {**said, "ranks": [{**rank, "waiting": 10**30} for rank in said["ranks"]]},
}


@pytest.mark.parametrize("fault", FAULTS)
async def test_a_feed_that_fails_is_replaced_by_the_metrics(
    start: Starter, caplog: pytest.LogCaptureFixture, fault: str
) -> None:
    caplog.set_level("INFO")
    bodies = [chat(f"{number} hello", stream=True, max_tokens=3500, ignore_eos=True) for number in range(6)]
    async with simulated() as sim, before(sim.url) as middleman, start(middleman.url) as live:
        asking = [asyncio.ensure_future(live.ask(CHAT, body)) for body in bodies]
        await until(lambda: sim.server.gauges.prompt_tokens_total > 0 and sim.server.gauges.running == 6)
        await on_steps(live)
        caplog.clear()
        middleman.change = FAULTS[fault]
        [backend] = live.gateway.pools[0].backends.values()
        await until(lambda: backend.read_by == "metrics")
        pages = middleman.pages
        await until(lambda: middleman.pages >= pages + 3)
        said = [record.message for record in caplog.records if "is read by its metrics" in record.message]
        assert said, "it is said"
        assert len(said) <= 2, "once for each reason"
        for one in asking:
            one.cancel()
        await asyncio.gather(*asking, return_exceptions=True)


def test_what_is_wrong_is_known_within_a_second() -> None:
    assert max(SILENCE_S, CHECK_INTERVAL_S) < 1.0


async def test_a_feed_that_is_lost_or_whose_engine_restarts_comes_back(start: Starter) -> None:
    async with simulated() as sim, before(sim.url) as middleman, start(middleman.url) as live:
        [backend] = live.gateway.pools[0].backends.values()
        await on_steps(live)
        assert middleman.feed is not None
        middleman.feed.cancel()
        await until(lambda: backend.read_by == "metrics")
        assert (await read_by(live))[1].startswith("the feed of its steps")
        await on_steps(live)
        assert (await live.ask(CHAT, chat(max_tokens=3))).status == 200
        await sim.server.stop()
        await until(lambda: backend.read_by == "metrics")
        async with simulated(port=sim.port):
            await on_steps(live)
            await until(lambda: backend.in_service)
            assert (await live.ask(CHAT, chat(max_tokens=3))).status == 200


async def test_an_engine_without_a_feed_or_left_unheard_is_read_by_its_metrics_and_it_is_said_once(
    start: Starter, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("backends.step_feed.RETRY_S_MAX", 0.05)
    caplog.set_level("INFO")
    async with simulated() as sim:
        sim.server.steps.end("two API servers share the engine")
        async with start(sim.url) as live:
            await until(lambda: sim.server.scrapes > 8)
            why = "it has no feed of its steps: status 501, two API servers share the engine"
            assert await read_by(live) == ("metrics", why)
            assert len([one.message for one in caplog.records if why in one.message]) == 1
            assert (await live.metrics())["fairgate_backend_on_steps", urlsplit(sim.url).netloc, "pool"] == 0
            sim.server.steps.missing = ""
            await on_steps(live)
            assert (await live.metrics())["fairgate_backend_on_steps", urlsplit(sim.url).netloc, "pool"] == 1
        async with start(pools=[{"name": "pool", "backends": [{"url": sim.url, "steps": False}]}]) as live:
            scrapes = sim.server.scrapes
            await until(lambda: sim.server.scrapes > scrapes + 3)
            assert await read_by(live) == ("metrics", "")


async def test_while_it_is_heard_the_page_is_read_rarely_and_all_is_fact() -> None:
    heard: list[Gauges] = []
    async with simulated() as sim, aiohttp.ClientSession() as http:
        async with watched(sim.url, http, heard) as feed:
            await until(lambda: not feed.silent.is_set())
            heard.clear()
            pages = sim.server.scrapes
            async with http.post(sim.url + CHAT, json=chat(max_tokens=300, ignore_eos=True)) as response:
                assert response.status == 200
                await response.read()
            await until(lambda: heard and not heard[-1].running)
            assert sim.server.scrapes - pages <= 1
        assert all(one.is_step for one in heard)
        assert [one.taken_s for one in heard] == sorted(one.taken_s for one in heard)
        assert max(one.running or 0 for one in heard) == 1
        assert (heard[-1].max_num_seqs, heard[-1].scheduled_tokens_max) == (8, 2048)


@asynccontextmanager
async def watched(url: str, http: aiohttp.ClientSession, heard: list[Gauges]) -> AsyncIterator[StepFeed]:
    client = ControlClient(url, http)
    feed = StepFeed(client, steps.PATH, heard.append, lambda is_heard, why: None)
    scraper = Scraper(VllmAdapter(), client, 0.05, heard.append, feed=feed)
    background = Tasks()
    background.repeat(feed.run_once, "steps")
    background.repeat(scraper.run_once, "metrics")
    try:
        yield feed
    finally:
        await background.stop()


ROLE = b'data: {"choices":[{"index":0,"delta":{"role":"assistant"}}],"model":"%b"}\n\n' % MODEL.encode()


async def test_the_role_alone_is_no_sign_that_the_engine_has_begun(start: Starter) -> None:
    turn, inside, most_inside = asyncio.Lock(), 0, 0

    async def one_by_one(seen: Seen, peer: Peer) -> None:
        """As `transformers serve`: each stream gets its role at once and its tokens in its turn, and no `[DONE]`."""
        nonlocal inside, most_inside
        inside += 1
        most_inside = max(most_inside, inside)
        await peer.send(STREAM_HEAD + chunk(ROLE))
        async with turn:
            await peer.send(chunk(token("a")))
            await asyncio.sleep(0)
            inside -= 1
            await peer.send(chunk(token("b", "length")) + STREAM_END)

    async with Upstream(one_by_one) as engine:
        pool = {"name": "pool", "backends": [{"url": engine.url, "engine": "openai"}]}
        async with start(pools=[pool]) as live:

            async def ask_often() -> None:
                for _ in range(4):
                    assert (await live.ask("/v1/chat/completions", chat(stream=True))).status == 200

            await asyncio.gather(*[ask_often() for _ in range(40)])
            target = live.gateway.pools[0].config.capacity.waiting_target
            assert most_inside <= FIRST_SLOTS + 2 * target


@pytest.mark.parametrize(("kind", "is_start"), [("vllm", True), ("openai", False)])
async def test_an_answer_begins_once(start: Starter, kind: str, is_start: bool) -> None:
    """With its role where that comes with the first token, otherwise with the first token."""
    goes_on = asyncio.Event()

    async def in_pieces(seen: Seen, peer: Peer) -> None:
        await peer.send(STREAM_HEAD + chunk(ROLE))
        await goes_on.wait()
        await peer.send(chunk(token("a")) + chunk(token("b", "length")) + STREAM_END)

    async with Upstream(in_pieces) as engine:
        pool = {"name": "pool", "backends": [{"url": engine.url, "engine": kind}]}
        async with start(pools=[pool]) as live, live.post(CHAT, chat(stream=True)) as response:
            assert ROLE.strip() in await response.content.readany()
            [exchange] = live.gateway.pools[0].dispatcher.exchanges()
            assert isinstance(exchange, Exchange)
            begun_s = exchange.context.first_token_s
            goes_on.set()
            await response.read()
            assert (begun_s is not None, exchange.context.first_token_s == begun_s) == (is_start, is_start)
