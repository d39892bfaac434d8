"""The queue has bounds in requests, bytes and time, and a flood meets them alone."""

from __future__ import annotations

import asyncio
from hashlib import sha256

from gateway.config.memory_bounds import MEMORY_MAX_LEAST, bounds_of
from gateway.config.sections.keys import open_name
from tests.gateway.live import Answer, Starter
from tests.kit.busy import busy


async def test_the_flood_is_told_to_slow_down_and_the_steady_tenant_gets_in(start: Starter) -> None:
    async with busy(start, limits={"queue_requests_max": 6}) as gate:
        flood = [task for _ in range(6) for task in await gate.fill(1, "flood")]  # one after the other
        refused = await gate.ask("flood")
        assert (refused.status, refused.error["code"]) == (429, "queue_full")
        assert refused.error["type"] == "rate_limit_error"
        assert 1 <= int(refused.headers["retry-after"]) <= 60
        of_anthropic = await gate.ask("flood", path="/v1/messages")
        assert (of_anthropic.status, of_anthropic.json["type"]) == (429, "error")
        assert of_anthropic.error["type"] == "rate_limit_error"
        tenant = open_name(sha256(b"flood").digest())
        metrics = await gate.live.metrics()
        assert metrics["fairgate_queued_requests", "pool", tenant] == 6
        assert metrics["fairgate_queued_bytes", "pool"] == gate.live.engine.queued_bytes > 0
        assert metrics["fairgate_not_completed_total", "refused", "pool", "queue_full", tenant] == 2
        steady = gate.ask("steady", "steady")
        [given_up], _ = await asyncio.wait(flood, return_when=asyncio.FIRST_COMPLETED)
        assert given_up is flood[-1]
        assert given_up.result().status == 429
        assert gate.live.engine.queued == 6
        gate.release.set()
        assert (await steady).status == 200
        assert [task.result().status for task in await _all(flood)] == [200] * 5 + [429]
        order = [seen.json["messages"][0]["content"] for seen in gate.engine.requests]
        assert order[1:3].count("steady") == 1


async def _all(tasks: list[asyncio.Task[Answer]]) -> list[asyncio.Task[Answer]]:
    await asyncio.wait(tasks)
    return tasks


async def test_bytes_are_bounded_as_requests_are(start: Starter) -> None:
    async with busy(start, memory_max=MEMORY_MAX_LEAST) as gate:
        most = bounds_of(MEMORY_MAX_LEAST, 1).queue_bytes
        await gate.fill(10, "flood", unheard_of="x" * (most // 11))  # in a field that is no prompt
        refused = await gate.ask("flood", unheard_of="x" * 1_000_000)
        assert (refused.status, refused.error["code"]) == (429, "queue_full")
        assert 0.9 * most < gate.live.engine.queued_bytes <= most
        await gate.fill(1, "steady")


async def test_who_waits_too_long_is_told_when_to_come_back(start: Starter) -> None:
    async with busy(start, limits={"queue_wait_s_max": 0.2}) as gate:
        got = await gate.ask("k")
        assert (got.status, got.error["code"]) == (503, "queue_timeout")
        assert int(got.headers["retry-after"]) >= 1
        [line] = await gate.live.lines(1)
        assert (line["outcome"], line["reason"], line["tries"]) == ("refused", "queue_timeout", 0)
        assert line["queue_ms"] >= 200
        assert (line["tokens_in"], line["tokens_out"], line["backend"]) == (0, 0, "")
