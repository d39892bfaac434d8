"""A real llama.cpp: found without a setting, filled but not flooded, shared by weight, and lost and found again."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from docs.examples.tiny_gguf import make_model
from tests.commands import run
from tests.gateway.live import CHAT, Live, Starter, chat, simulated, until
from tests.gateway.load import tenants
from tests.kit.floods import Flood, answered
from tests.llama_server import LlamaServer

pytestmark = pytest.mark.usefixtures("quick_probes")

SLOTS, CONTEXT = 6, 2048
"""The context of one slot."""


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model") / "simulated.gguf"
    make_model(path)
    return path


@asynccontextmanager
async def llama(model: Path, slots: int = SLOTS, **options: Any) -> AsyncIterator[LlamaServer]:
    async with LlamaServer(model, slots=slots, context=slots * CONTEXT, **options) as server:
        yield server


async def gauge(live: Live, server: LlamaServer, name: str) -> float:
    """Return what llama.cpp itself says."""
    async with live.http.get(f"{server.url}/metrics") as response:
        page = await response.text()
    return float(next(line.split()[1] for line in page.splitlines() if line.startswith(f"llamacpp:{name} ")))


def engines(live: Live) -> dict[str, Any]:
    return {name: ledger.slots for name, ledger in live.engine.backends.items()}


@pytest.mark.parametrize("metrics", [True, False])
async def test_slots_and_context_are_known_before_any_load(start: Starter, model: Path, metrics: bool) -> None:
    async with llama(model, metrics=metrics) as server, start(server.url) as live:
        [slots] = engines(live).values()
        assert slots.known() == SLOTS
        [engine] = (await live.get("/state", admin=True)).json["pools"][0]["backends"]
        assert engine["engine"].startswith(f"llama.cpp: {SLOTS} slots of {CONTEXT:,} tokens; ")
        assert "tenants share its prompt cache" in engine["engine"]
        info = [key for key in await live.metrics() if key[0] == "fairgate_backend_info"]
        assert [kind for _, _, kind, _ in info] == ["llama.cpp"]
        refused = await live.ask(CHAT, chat("x" * 3 * CONTEXT, max_tokens=5))
        assert (refused.status, refused.error["type"]) == (400, "exceed_context_size_error")
        assert (await live.ask(CHAT, chat(max_tokens=5))).status == 200


async def test_a_flood_waits_here_and_not_inside_the_engine(start: Starter, model: Path) -> None:
    async with llama(model) as server, start(server.url, tenants=tenants(flood=1, light=1)) as live:
        flood = Flood.at(live, "flood", 24, stream=True, output_tokens=100)
        await answered(flood, more=10)
        [ledger] = live.engine.backends.values()
        target = live.gateway.pools[0].config.capacity.waiting_target
        for number in range(20):
            answers = flood.answers
            body = chat(f"{number}?", max_tokens=3, ignore_eos=True, stream=True)
            assert (await live.ask(CHAT, body, key="key-of-light")).status == 200
            assert ledger.sequences <= SLOTS + target
            assert await gauge(live, server, "requests_deferred") <= 2 * target  # it frees a slot after the answer
            # The flood's 24 would all be before it in the engine's own queue.
            assert flood.answers - answers <= 2 * SLOTS + target
        await flood.end()


async def test_a_crash_under_load_is_visible_and_another_engine_may_take_its_place(start: Starter, model: Path) -> None:
    async with llama(model) as first:
        async with start(first.url) as live:
            [name] = live.engine.backends
            body = chat(max_tokens=1500, ignore_eos=True, stream=True)
            asked = [asyncio.ensure_future(live.ask(CHAT, body)) for _ in range(SLOTS)]
            await until(lambda: live.engine.backends[name].sequences == SLOTS)
            await first.kill()
            for answer in await asyncio.gather(*asked):
                assert answer.status != 200 or b"[DONE]" not in answer.body
            await until(lambda: not live.engine.backends[name].healthy)
            async with llama(model, 2, port=first.port) as second:
                await until(lambda: live.engine.backends[name].healthy)
                assert live.engine.backends[name].slots.known() == 2
                assert (await live.ask(CHAT, chat(max_tokens=3))).status == 200
                await second.kill()
                await until(lambda: not live.engine.backends[name].healthy)
            async with simulated(port=first.port):
                await until(lambda: live.engine.backends[name].healthy)
                assert live.gateway.pools[0].backends[name].adapter.title == "vLLM"
                await until(lambda: live.engine.backends[name].kv.capacity_tokens is not None)


async def test_nothing_is_sent_where_tenants_would_share_a_cache_and_may_not(start: Starter, model: Path) -> None:
    async with llama(model) as server:
        pool = {"name": "pool", "isolate_caches": "require", "backends": [{"url": server.url}]}
        async with start(pools=[pool]) as live:
            [backend] = live.gateway.pools[0].backends.values()
            assert backend.health.healthy
            assert (await live.ask(CHAT, chat(max_tokens=3))).status == 503
            [engine] = (await live.get("/state", admin=True)).json["pools"][0]["backends"]
            assert engine["reason"] == "llama.cpp ignores cache_salt, and isolate_caches is `require`"


async def test_check_says_what_an_engine_is_and_cannot_tell(model: Path, tmp_path: Path) -> None:
    async with llama(model) as server:
        file = tmp_path / "config.yaml"
        file.write_text(f"pools: [{{name: a, backends: [{{url: '{server.url}', name: laptop}}]}}]\nopen_access: true\n")
        code, out, _ = await run("check", str(file), "--probe")
        assert code == 0
        assert f"pool a: laptop: llama.cpp: {SLOTS} slots of {CONTEXT:,} tokens; reports the output" in out
        assert "; serves simulated" in out
    code, out, _ = await run("check", str(file), "--probe")
    assert code == 1
    assert "pool a: laptop: probe: " in out
