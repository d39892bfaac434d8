"""Engines that are down or stand still do not keep the gateway down, and it says what it waits for."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

import pytest

from backends.engines.vllm import VllmAdapter
from backends.health import StandstillDetector
from backends.simulated.engine_model import EngineModel, EngineRequest
from backends.simulated.simulated_server import render
from gateway.pool.backend import Backend
from tests.gateway.capture import Seen, Upstream, answer, replies
from tests.gateway.live import CHAT, MODEL, SMALL, Live, Simulated, Starter, chat, long_chat, simulated, until
from tests.gateway.load import tenants
from tests.kit.together import together
from tests.ports import free_port

pytestmark = pytest.mark.usefixtures("quick_probes")


def nobody() -> list[dict[str, str]]:
    """An engine that is not there."""
    return [{"url": f"http://127.0.0.1:{free_port()}"}]


@pytest.mark.parametrize("models", [[], [MODEL]], ids=["learned", "configured"])
async def test_what_is_down_at_the_start_or_goes_down_is_noticed_without_a_request(
    start: Starter, models: list[str]
) -> None:
    port = free_port()
    pools = [{"name": "p", "models": models, "backends": [{"url": f"http://127.0.0.1:{port}", "name": "gpu-1"}]}]
    async with start(pools=pools) as live:

        async def is_refused() -> None:
            ready = await live.get("/ready", admin=True)
            assert (ready.status, ready.json["ready"]) == (503, False)
            [why] = ready.json["why_not"]
            assert "gpu-1" in why
            assert "probe" in why
            assert (await live.get("/health", admin=True)).status == 200
            for path in (CHAT, "/tokenize"):
                got = await live.ask(path, chat())
                assert (got.status, got.error["code"]) == (503, "no_backend")
                assert int(got.headers["retry-after"]) >= 1
            assert live.holds_nothing()

        await is_refused()
        async with simulated(port=port):
            await until(lambda: not live.gateway.not_ready())
            assert (await live.get("/ready", admin=True)).json == {"ready": True, "why_not": []}
            assert (await live.ask(CHAT, chat(max_tokens=3))).status == 200
        await until(live.gateway.not_ready)
        await is_refused()


@asynccontextmanager
async def all_gone(start: Starter, count: int, **pool: Any) -> AsyncIterator[tuple[Live, list[Any], list[Simulated]]]:
    """Yield a gateway whose engines are all gone, what was asked of it before and after that, and the engines."""
    async with together([simulated() for _ in range(count)]) as engines:
        backends = [{"url": sim.url} for sim in engines]
        async with start(pools=[{"name": "p", "backends": backends, **pool}]) as live:
            running = [asyncio.ensure_future(live.ask(CHAT, long_chat(n=8))) for _ in range(count)]
            await until(lambda: live.engine.dispatched == count)
            asked = [live.ask(CHAT, chat(max_tokens=3), key=f"k{number}") for number in range(40)]
            waiting = [asyncio.ensure_future(each) for each in asked]
            await until(lambda: live.engine.queued >= 20)
            for sim in engines:
                await sim.server.stop()
            await asyncio.gather(*running)
            await until(lambda: not live.engine.is_served)
            waiting.append(asyncio.ensure_future(live.ask(CHAT, chat(max_tokens=3))))
            yield live, waiting, engines
            await until(live.holds_nothing)


@pytest.mark.parametrize("count", [1, 2])
async def test_when_the_last_engine_goes_what_waits_is_refused_as_what_comes(start: Starter, count: int) -> None:
    """Not held for as long as a request may wait, and not told that an engine failed on it."""
    async with all_gone(start, count) as (_, waiting, _):
        got = await asyncio.gather(*waiting)
        ends = {(each.status, each.error["code"]) for each in got if each.status != 200}
        assert ends <= {(503, "no_backend"), (502, "backend_failed")}
        assert got[-1].error["code"] == "no_backend"
        assert sum(each.error["code"] == "no_backend" for each in got if each.status != 200) > 20
        assert all("retry-after" in each.headers for each in got if each.status == 503)


FROM_NOTHING = {"start_s_max": 600, "models": [MODEL]}


async def test_without_an_engine_requests_wait_are_told_and_go_in_order(start: Starter) -> None:
    port = free_port()
    pool = {"name": "p", "backends": [{"url": f"http://127.0.0.1:{port}"}], **FROM_NOTHING}
    async with start(pools=[pool], tenants=tenants(flood=1, light=1), limits={"waiting_comment_s": 0.1}) as live:
        assert live.gateway.not_ready() == [], "else no request would come, and nobody start an engine"
        flood = [asyncio.ensure_future(live.ask(CHAT, chat(max_tokens=3), key="key-of-flood")) for _ in range(60)]
        await until(lambda: live.engine.queued == 60)
        light = asyncio.ensure_future(live.ask(CHAT, chat(max_tokens=3), key="key-of-light"))
        await until(lambda: live.engine.queued == 61)
        async with live.post(CHAT, chat(max_tokens=3, stream=True), key="key-of-light") as stream:
            comment = (await stream.content.readuntil(b"\n\n")).decode()
            assert re.fullmatch(r": waiting, between .* and .* minutes.*, behind \d+ requests?\n\n", comment)
            metrics = await live.metrics()
            assert metrics["fairgate_wanted_requests", "p"] == 62
            assert metrics["fairgate_wanted_tokens", "p"] >= 62
            assert metrics["fairgate_start_seconds", "p"] == 600
            refused = await live.ask(CHAT, chat(), key="key-of-light", x_fairgate_wait_s_max="5")
            assert (refused.status, refused.error["code"]) == (429, "wait_too_long")
            async with simulated(port=port):
                assert b"[DONE]" in await stream.read()
                first = await light
                answers = [first, *await asyncio.gather(*flood)]
        assert {answer.status for answer in answers} == {200}
        assert float(first.headers["x-fairgate-expected-wait-s"]) == pytest.approx(600, abs=60)
        served = [line for line in await live.lines(63) if line["outcome"] == "completed" and not line["stream"]]
        [light_ms] = [line["queue_ms"] for line in served if line["tenant"] == "light"]
        assert light_ms < max(line["queue_ms"] for line in served if line["tenant"] == "flood")
        metrics = await live.metrics()
        assert metrics["fairgate_start_seconds", "p"] < 600
        assert metrics["fairgate_wanted_requests", "p"] == metrics["fairgate_wanted_tokens", "p"] == 0
        assert live.holds_nothing()


@pytest.mark.parametrize("count", [1, 2])
async def test_when_the_last_engine_goes_what_waits_is_held_for_the_next_one(start: Starter, count: int) -> None:
    async with all_gone(start, count, **FROM_NOTHING) as (live, waiting, engines):
        await until(lambda: live.engine.requests.cold_start.allowance_s())
        async with simulated(port=engines[0].port):
            got = await asyncio.gather(*waiting)
        # Before their end was noticed, the engines may have had some in their hands.
        assert got[-1].status == 200
        assert sum(each.status == 200 for each in got) > 20


async def test_one_pool_down_does_not_touch_the_other(start: Starter) -> None:
    async with simulated(models=("up",)) as sim:
        pools = [
            {"name": "down", "models": ["down"], "backends": nobody()},
            {"name": "up", "models": ["up"], "backends": [{"url": sim.url}]},
        ]
        async with start(pools=pools) as live:
            up = await live.ask("/v1/completions", {"model": "up", "prompt": "x", "max_tokens": 2})
            down = await live.ask("/v1/completions", {"model": "down", "prompt": "x", "max_tokens": 2})
            assert (up.status, down.status) == (200, 503)
            assert "down" in " ".join((await live.get("/ready", admin=True)).json["why_not"])
            passed = await live.ask("/tokenize", {"prompt": "x"})  # names no model: any engine in service will do
            assert passed.status == 200


@pytest.mark.parametrize("count", [1, 2])
async def test_an_engine_whose_list_of_models_fails_is_asked_all_the_same(
    start: Starter, monkeypatch: pytest.MonkeyPatch, count: int
) -> None:
    """The engine is in service, and knows whether it has a model. Of two such pools nothing says which is meant."""
    has_list = False

    def control_plane(seen: Seen, context_tokens: int) -> bytes:
        if b"/v1/models" in seen.line and has_list:
            return answer(json.dumps({"data": [{"id": MODEL}]}).encode())
        return answer(b"", status=b"200 OK" if b"/health" in seen.line else b"500 Internal Server Error")

    monkeypatch.setattr("tests.gateway.capture._control_plane", control_plane)
    async with Upstream(replies(answer(b"{}"))) as one, Upstream(replies(answer(b"{}"))) as other:
        urls = [one.url, other.url][:count]
        pools = [{"name": url[-5:], "backends": [{"url": url, "engine": "vllm"}]} for url in urls]
        async with start(pools=pools) as live:
            assert live.gateway.not_ready() == []
            got = await live.ask(CHAT, chat())
            assert (got.status, len(one.requests)) == ((200, 1) if count == 1 else (503, 0))
            assert (await live.ask(CHAT, chat(model="x" * 1000))).status == 503
            unnamed = await live.ask(CHAT, {"messages": []})
            assert unnamed.status == (503 if count == 1 else 400), "no limit of a model would hold"
            has_list = True
            await until(lambda: MODEL in live.gateway.pools[0].models())
            assert (await live.ask(CHAT, chat())).status == 200
            models = [line["model"] for line in await live.lines(4) if line["outcome"] == "completed"]
            assert models == ["", MODEL][count - 1 :], "a name that no engine has listed is no label"
            assert live.holds_nothing()


# --- an engine that says it is well, has requests and makes no step ---


LIMIT_S = 0.05


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


def test_what_only_waits_inside_it_is_a_standstill_too() -> None:
    """As vLLM does that defers requests until none can run."""
    page = b"vllm:num_requests_running 0\nvllm:num_requests_waiting %d\nvllm:generation_tokens_total 7\n"
    standstill = StandstillDetector(10.0)
    for second in range(20):
        found = VllmAdapter().snapshot((page % (1 + second)).decode(), float(second))
        assert found is not None
        standstill.read(found)
        assert (standstill.fault(0.0) is None) is (second < 10), "those that come and wait are no step"
        assert standstill.fault(second - 9.0) is None, "nothing of ours was there for so long"


@pytest.mark.parametrize("batched_tokens", [512, 2048])
def test_a_long_prompt_is_none(batched_tokens: int) -> None:
    profile = replace(SMALL, max_num_batched_tokens=batched_tokens, max_model_len=16_000, per_prefill_token_s=1e-2)
    engine, standstill, now = EngineModel(profile), StandstillDetector(2 * batched_tokens * 1e-2), 0.0
    engine.submit(EngineRequest("long", prompt_tokens=15_000, output_tokens=3))
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
