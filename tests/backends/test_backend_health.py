"""Health turns on evidence, with hysteresis; scrapes, probes and model lists survive any answer."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import aiohttp
import pytest
from aiohttp import web

from backends.control_client import ControlClient
from backends.engines.vllm import VllmAdapter
from backends.health import HealthState, ModelCard, fetch_models, probe
from backends.scraper import Scraper
from backends.upstream_errors import ConnectFailed, ProtocolViolation
from gateway.telemetry.background import Tasks
from policies.capacity.gauges import Gauges
from tests.waiting import WAIT_S, until

PAGE = (Path(__file__).parent / "fixtures" / "vllm-0.32-single.txt").read_text()


def test_health_needs_failures_in_a_row_and_comes_back_by_probes_in_a_row() -> None:
    state = HealthState()
    assert (state.healthy, state.reason) == (False, "not probed yet")
    state.probed(None)
    assert state.healthy
    state.probed("down")
    state.connect_failed("refused")
    state.failures = 0  # an answer
    state.probed("down")
    state.probed("down")
    assert state.healthy
    state.connect_failed("refused")
    assert (state.healthy, state.reason) == (False, "connect: refused")
    state.probed(None)
    state.probed("down")
    state.probed(None)
    assert not state.healthy
    state.probed(None)
    assert (state.healthy, state.reason) == (True, "")


def test_an_engine_that_was_given_up_comes_back_by_probes_in_a_row() -> None:
    state = HealthState()
    state.mark_unhealthy("its answers break")
    assert state.reason == "not probed yet"
    state.probed(None)
    state.mark_unhealthy("its answers break")
    assert (state.healthy, state.reason, state.probes_missing) == (False, "its answers break", 2)
    state.probed(None)
    state.probed(None)
    assert state.healthy


class Engine:
    """An engine whose answers a test sets; paths it was asked for are kept."""

    def __init__(self) -> None:
        self.pages: dict[str, tuple[int, bytes]] = {}
        self.asked: list[str] = []
        self.accepts: set[str] = set()
        self.hold = asyncio.Event()
        self.hold.set()
        self.url = ""
        self.location = ""

    async def serve(self, request: web.Request) -> web.Response:
        self.asked.append(request.path)
        self.accepts.add(request.headers.get("Accept", ""))
        await self.hold.wait()
        status, body = self.pages.get(request.path, (404, b""))
        return web.Response(status=status, body=body, headers={"Location": self.location} if self.location else {})


@pytest.fixture
async def engine() -> AsyncIterator[Engine]:
    served = Engine()
    app = web.Application()
    app.router.add_route("*", "/{path:.*}", served.serve)
    runner = web.AppRunner(app)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    served.url = f"http://127.0.0.1:{runner.addresses[0][1]}"
    yield served
    served.hold.set()
    await runner.cleanup()


@pytest.fixture
async def session() -> AsyncIterator[aiohttp.ClientSession]:
    async with aiohttp.ClientSession() as opened:
        yield opened


@asynccontextmanager
async def scraping(
    engine: Engine, session: aiohttp.ClientSession, timeout_s: float = WAIT_S
) -> AsyncIterator[asyncio.Queue[Gauges]]:
    """A scraper under way, and what it reports."""
    seen: asyncio.Queue[Gauges] = asyncio.Queue()
    scraper = Scraper(VllmAdapter(), ControlClient(engine.url, session), 0.001, seen.put_nowait, timeout_s=timeout_s)
    background = Tasks()
    background.repeat(scraper.run_once, "metrics")
    try:
        yield seen
    finally:
        await background.stop()


async def test_the_filtered_page_is_enough(engine: Engine, session: aiohttp.ClientSession) -> None:
    engine.pages = {"/metrics/": (200, PAGE.encode()), "/metrics": (500, b"")}
    before_s = asyncio.get_running_loop().time()
    async with scraping(engine, session) as seen:
        snapshot = await seen.get()
    assert snapshot.kv_capacity_tokens == 4096
    assert before_s <= snapshot.taken_s <= asyncio.get_running_loop().time()
    assert engine.asked[0] == "/metrics/"
    assert engine.accepts == {"text/plain"}


async def test_an_empty_filtered_page_is_asked_for_once_and_after_a_failure_anew(
    engine: Engine, session: aiohttp.ClientSession
) -> None:
    async with scraping(engine, session) as seen:
        await until(lambda: len(engine.asked) > 4)
    assert engine.asked[:4] == ["/metrics/", "/metrics"] * 2
    assert seen.empty()
    engine.pages = {"/metrics/": (200, b""), "/metrics": (200, PAGE.encode())}
    engine.asked.clear()
    async with scraping(engine, session) as seen:
        for _ in range(3):
            await seen.get()
    assert engine.asked[:4] == ["/metrics/", "/metrics", "/metrics", "/metrics"]
    engine.asked.clear()
    engine.hold.clear()
    async with scraping(engine, session, timeout_s=0.05) as seen:
        await until(lambda: len(engine.asked) > 1)
    assert set(engine.asked) == {"/metrics/"}, "one that hangs is bounded, nor would another path answer"
    assert seen.empty()


async def test_a_probe_says_what_is_wrong(engine: Engine, session: aiohttp.ClientSession) -> None:
    engine.pages = {"/health": (200, b""), "/sick": (503, b"")}
    client = ControlClient(engine.url, session)
    assert await probe(client, "/health") is None
    assert "status 503" in (await probe(client, "/sick") or "")
    engine.hold.clear()
    assert "within 0.1 s" in (await probe(client, "/health", timeout_s=0.1) or "")
    assert "http://127.0.0.1:1/" in (await probe(ControlClient("http://127.0.0.1:1", session), "/") or "")


async def test_models_are_listed_or_refused(engine: Engine, session: aiohttp.ClientSession) -> None:
    cards = b'{"data":[{"id":"a","max_model_len":4096,"root":"x"},{"id":"lora","parent":"a"},{"id":"b","parent":null}]}'
    engine.pages = {"/v1/models": (200, cards)}
    assert await fetch_models(ControlClient(engine.url, session)) == [
        ModelCard("a", 4096),
        ModelCard("lora", None, parent="a"),
        ModelCard("b", None),
    ]
    for length in (b"-5", b"0", b"9" * 400):
        engine.pages = {"/v1/models": (200, b'{"data":[{"id":"a","max_model_len":%b}]}' % length)}
        assert await fetch_models(ControlClient(engine.url, session)) == [ModelCard("a", None)], "it is not known"
    deep = b'{"data":[],"x":' + b"[" * 100_000
    for status, body in ((200, b"<html>"), (200, deep), (500, b"{}"), (401, b"{}"), (403, b"{}")):
        engine.pages = {"/v1/models": (status, body)}
        with pytest.raises(ProtocolViolation, match="api_key" if status in (401, 403) else f"status {status}|models"):
            await fetch_models(ControlClient(engine.url, session, api_key="key"))
    with pytest.raises(ConnectFailed):
        await fetch_models(ControlClient("http://127.0.0.1:1", session))


@pytest.mark.parametrize("status", [301, 302, 307, 308])
async def test_a_redirect_is_no_answer_and_is_not_followed(
    engine: Engine, session: aiohttp.ClientSession, status: int
) -> None:
    """It would take the backend's key elsewhere, and requests would not go there anyway."""
    engine.pages = {"/health": (status, b""), "/metrics/": (status, b""), "/metrics": (status, b"")}
    engine.location = "/elsewhere"
    assert f"status {status}" in (await probe(ControlClient(engine.url, session, api_key="key"), "/health") or "")
    async with scraping(engine, session) as seen:
        asked = len(engine.asked)
        await until(lambda: len(engine.asked) > asked + 2)
    assert seen.empty()
    assert "/elsewhere" not in engine.asked
