"""An engine that says it is well, has requests and makes no step gets no others, until it makes one or has none."""

from __future__ import annotations

import asyncio
import re
from dataclasses import replace
from typing import Any

import pytest

from backends.engines.vllm import VllmAdapter
from backends.health import Standstill
from backends.simulated.engine_model import EngineModel, EngineRequest
from backends.simulated.simulated_server import render
from gateway.pool.backend import Backend
from tests.gateway.live import MODEL, SMALL, Live, Starter, chat, long_chat, simulated, until

CHAT = "/v1/chat/completions"
LIMIT_S = 0.05


@pytest.fixture(autouse=True)
def _probe_often(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gateway.pool.pool.PROBE_INTERVAL_S", 0.02)


def backends(live: Live, limit_s: float = LIMIT_S) -> list[Backend]:
    found = list(live.gateway.pools[0].backends.values())
    for backend in found:
        backend.standstill.limit_s = limit_s
    return found


@pytest.mark.parametrize(("stream", "steps"), [(False, True), (True, False)], ids=["steps", "stream"])
async def test_it_is_out_of_service_until_it_goes_on_and_others_take_what_comes(
    start: Starter, stream: bool, steps: bool
) -> None:
    async with simulated() as sim, simulated() as well:
        pools = [{"name": "pool", "backends": [{"url": each.url, "steps": steps} for each in (sim, well)]}]
        async with start(pools=pools) as live:
            [pool] = live.gateway.pools
            backend, other = backends(live)
            pool.drain(other, True)
            asked = asyncio.create_task(live.ask(CHAT, {**long_chat(), "stream": stream, "max_tokens": 500}))
            await until(lambda: sim.server.gauges.running)
            sim.faults.is_still = True
            await until(live.gateway.not_ready)
            assert "makes no step, and has requests for" in backend.why_not
            assert (await live.get("/ready", admin=True)).status == 503
            assert (await live.metrics())["fairgate_backend_up", backend.name, "pool"] == 0
            got = await live.ask(CHAT, chat())
            assert (got.status, got.error["code"]) == (503, "no_backend")
            assert len(live.engine.backends[backend.name].leases) == 1, "what it has is its own"
            pool.drain(other, False)
            answers = await asyncio.gather(*(live.ask(CHAT, chat(str(n), max_tokens=3)) for n in range(5)))
            assert [each.status for each in answers] == [200] * 5
            sim.faults.is_still = False
            await until(lambda: backend.in_service)
            assert (await asked).status == 200
            asked = asyncio.create_task(live.ask(CHAT, long_chat()))
            await until(lambda: sim.server.gauges.running or well.server.gauges.running)
            still = sim if sim.server.gauges.running else well
            still.faults.is_still = True
            await until(lambda: backend.in_service + other.in_service == 1)
            asked.cancel()
            # It may have recovered by what it has no more: nobody finds out who does not try.
            await until(lambda: backend.in_service and other.in_service)


async def test_what_the_engine_defers_keeps_nothing_back(start: Starter, monkeypatch: pytest.MonkeyPatch) -> None:
    """Adapters, grammars and transfers are waited for, and not KV."""

    def deferring(*args: Any) -> bytes:
        page = render(*args)
        return re.sub(rb'(num_requests_waiting{[^}]*}|reason="deferred"}) [0-9.]+', rb"\1 50", page)

    monkeypatch.setattr("backends.simulated.simulated_server.render", deferring)
    async with simulated() as sim, start(sim.url) as live:
        runs = asyncio.create_task(live.ask(CHAT, long_chat()))
        [ledger] = live.engine.backends.values()
        await until(lambda: ledger.has_gauges() and ledger.leases and not ledger.starting)
        assert (await live.ask(CHAT, chat(max_tokens=3))).status == 200
        assert not runs.done()
        assert sim.server.scrapes
        runs.cancel()


def test_what_only_waits_inside_it_is_a_standstill_too() -> None:
    """As vLLM does that defers requests until none can run."""
    page = b"vllm:num_requests_running 0\nvllm:num_requests_waiting %d\nvllm:generation_tokens_total 7\n"
    standstill = Standstill(10.0)
    for second in range(20):
        found = VllmAdapter().snapshot((page % (1 + second)).decode(), float(second))
        assert found is not None
        standstill.read(found)
        assert (standstill.fault(0.0) is None) is (second < 10), "those that come and wait are no step"
        assert standstill.fault(second - 9.0) is None, "nothing of ours was there for so long"


@pytest.mark.parametrize("batched_tokens", [512, 2048])
def test_a_long_prompt_is_none(batched_tokens: int) -> None:
    profile = replace(SMALL, max_num_batched_tokens=batched_tokens, max_model_len=16_000, per_prefill_token_s=1e-2)
    engine, standstill, now = EngineModel(profile), Standstill(2 * batched_tokens * 1e-2), 0.0
    engine.submit(EngineRequest("long", prompt_tokens=15_000, output_tokens=3), now)
    steps = 0
    while engine.has_work:
        now += engine.step(now).duration_s
        steps += 1
        page = render(profile, MODEL, engine.gauges(now)).decode()
        found = VllmAdapter().snapshot(page, now)
        assert found is not None
        standstill.read(found)
        assert standstill.fault(0.0) is None
    assert steps > 7
