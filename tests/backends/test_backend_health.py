"""Health turns on evidence, with hysteresis; scrapes, probes and model lists survive any answer."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import aiohttp
import pytest
from aiohttp import web

from backends.control_client import ControlClient
from backends.engines.vllm import VllmAdapter
from backends.health import HealthState, ModelCard, fetch_models, probe
from backends.scraper import Scraper
from backends.upstream_errors import ConnectFailed, ProtocolViolation
from gateway.telemetry.background import Background
from policies.capacity.gauges import Gauges
from tests.waiting import WAIT_S

PAGE = (Path(__file__).parent / "fixtures" / "vllm-0.32-single.txt").read_text()


def test_health_needs_failures_in_a_row_and_comes_back_by_probes_in_a_row() -> None:
    state = HealthState(failures_max=3, successes_min=2)
    assert (state.healthy, state.reason) == (False, "not probed yet")
    state.probed(None, 1.0)
    assert state.healthy
    state.probed("down", 2.0)
    state.connect_failed("refused", 3.0)
    state.answered()
    state.probed("down", 4.0)
    state.probed("down", 5.0)
    assert state.healthy
    state.connect_failed("refused", 6.0)
    assert (state.healthy, state.reason, state.since_s) == (False, "connect: refused", 6.0)
    state.probed(None, 7.0)
    state.probed("down", 8.0)
    state.probed(None, 9.0)
    assert not state.healthy
    state.probed(None, 10.0)
    assert (state.healthy, state.reason) == (True, "")


def test_an_engine_that_was_given_up_comes_back_by_probes_in_a_row() -> None:
    state = HealthState()
    state.give_up("its answers break", 0.0)
    assert state.reason == "not probed yet"
    state.probed(None, 1.0)
    state.give_up("its answers break", 2.0)
    assert (state.healthy, state.reason, state.since_s, state.probes_missing) == (False, "its answers break", 2.0, 2)
    state.probed(None, 3.0)
    state.probed(None, 4.0)
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


async def scrape(
    engine: Engine, session: aiohttp.ClientSession, results: int, timeout_s: float = WAIT_S
) -> list[Gauges | str]:
    """What a scraper reports first."""
    seen: asyncio.Queue[Gauges | str] = asyncio.Queue()
    client = ControlClient(engine.url, session)
    scraper = Scraper(VllmAdapter(), client, 0.001, seen.put_nowait, seen.put_nowait, timeout_s=timeout_s)
    background = Background()
    background.repeat(scraper.turn, "metrics")
    try:
        return [await seen.get() for _ in range(results)]
    finally:
        await background.stop()


async def test_the_filtered_page_is_enough(engine: Engine, session: aiohttp.ClientSession) -> None:
    engine.pages = {"/metrics/": (200, PAGE.encode()), "/metrics": (500, b"")}
    before_s = asyncio.get_running_loop().time()
    (snapshot,) = await scrape(engine, session, 1)
    assert isinstance(snapshot, Gauges)
    assert snapshot.kv_capacity_tokens == 4096
    assert before_s <= snapshot.taken_s <= asyncio.get_running_loop().time()
    assert engine.asked[0] == "/metrics/"
    assert engine.accepts == {"text/plain"}


async def test_an_empty_filtered_page_is_asked_for_once(engine: Engine, session: aiohttp.ClientSession) -> None:
    engine.pages = {"/metrics/": (200, b""), "/metrics": (200, PAGE.encode())}
    assert all(isinstance(each, Gauges) for each in await scrape(engine, session, 3))
    assert engine.asked[:4] == ["/metrics/", "/metrics", "/metrics", "/metrics"]


async def test_a_failed_scrape_is_told_and_the_next_one_starts_anew(
    engine: Engine, session: aiohttp.ClientSession
) -> None:
    results = await scrape(engine, session, 2)
    assert all(isinstance(each, str) and "status 404" in each for each in results)
    assert engine.asked[:4] == ["/metrics/", "/metrics"] * 2


async def test_a_scrape_that_hangs_is_bounded(engine: Engine, session: aiohttp.ClientSession) -> None:
    engine.hold.clear()
    (problem,) = await scrape(engine, session, 1, timeout_s=0.3)
    assert isinstance(problem, str)
    assert "within 0.3 s" in problem
    assert engine.asked == ["/metrics/"]


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
    (problem,) = await scrape(engine, session, 1)
    assert f"status {status}" in str(problem)
    assert "/elsewhere" not in engine.asked


ODD_LENGTHS = (b"-5", b"0", b"9" * 400)


async def test_a_length_that_is_none_is_not_known(engine: Engine, session: aiohttp.ClientSession) -> None:
    for length in ODD_LENGTHS:
        engine.pages = {"/v1/models": (200, b'{"data":[{"id":"a","max_model_len":%b}]}' % length)}
        assert await fetch_models(ControlClient(engine.url, session)) == [ModelCard("a", None)]
