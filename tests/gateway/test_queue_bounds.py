"""The queue has bounds in requests, bytes and time, and a flood meets them alone."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from hashlib import sha256
from typing import Any

from gateway.config.memory_bounds import MEMORY_MAX, MEMORY_MAX_LEAST, bounds_of
from gateway.config.sections.keys import open_name
from tests.gateway.capture import Peer, Seen, Upstream, answer
from tests.gateway.live import Answer, Live, Starter, chat, until

OK = answer(b'{"usage":{"prompt_tokens":7,"completion_tokens":2}}')


class Held:
    """A gateway whose engine is kept busy by one request until `release`."""

    def __init__(self, live: Live, upstream: Upstream, release: asyncio.Event) -> None:
        self.live = live
        self.upstream = upstream
        self.release = release
        self.asked: list[asyncio.Task[Answer]] = []

    def ask(
        self, key: str, content: str = "x", path: str = "/v1/chat/completions", more: str = ""
    ) -> asyncio.Task[Answer]:
        """`more`: in a field that is no prompt."""
        task = asyncio.ensure_future(self.live.ask(path, chat(content, max_tokens=5, unheard_of=more), key=key))
        self.asked.append(task)
        return task

    async def fill(self, key: str, count: int, more: str = "") -> list[asyncio.Task[Answer]]:
        before = self.live.engine.queued
        tasks = [self.ask(key, more=more) for _ in range(count)]
        await until(lambda: self.live.engine.queued == before + count)
        return tasks


@asynccontextmanager
async def held(start: Starter, memory_max: int = MEMORY_MAX, **limits: Any) -> AsyncIterator[Held]:
    release = asyncio.Event()

    async def script(seen: Seen, peer: Peer) -> None:
        if seen.json.get("n"):
            await release.wait()
        await peer.send(OK)

    async with Upstream(script) as upstream, start(upstream.url, limits=limits, memory_max=memory_max) as live:
        holding = Held(live, upstream, release)
        holder = asyncio.ensure_future(live.ask("/v1/chat/completions", chat(n=128, max_tokens=1), key="holder"))
        await until(lambda: upstream.requests)
        try:
            yield holding
        finally:
            release.set()
        await asyncio.gather(holder, *holding.asked)
        await until(live.holds_nothing)


async def test_the_flood_is_told_to_slow_down_and_the_steady_tenant_gets_in(start: Starter) -> None:
    async with held(start, queue_requests_max=6) as gate:
        flood = [task for _ in range(6) for task in await gate.fill("flood", 1)]  # one after the other
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
        order = [seen.json["messages"][0]["content"] for seen in gate.upstream.requests]
        assert order[1:3].count("steady") == 1


async def _all(tasks: list[asyncio.Task[Answer]]) -> list[asyncio.Task[Answer]]:
    await asyncio.wait(tasks)
    return tasks


async def test_bytes_are_bounded_as_requests_are(start: Starter) -> None:
    async with held(start, memory_max=MEMORY_MAX_LEAST) as gate:
        most = bounds_of(MEMORY_MAX_LEAST, 1).queue_bytes
        await gate.fill("flood", 10, "x" * (most // 11))
        refused = await gate.ask("flood", more="x" * 1_000_000)
        assert (refused.status, refused.error["code"]) == (429, "queue_full")
        assert 0.9 * most < gate.live.engine.queued_bytes <= most
        await gate.fill("steady", 1)


async def test_who_waits_too_long_is_told_when_to_come_back(start: Starter) -> None:
    async with held(start, queue_wait_s_max=0.2) as gate:
        got = await gate.ask("k")
        assert (got.status, got.error["code"]) == (503, "queue_timeout")
        assert int(got.headers["retry-after"]) >= 1
        [line] = await gate.live.lines(1)
        assert (line["outcome"], line["reason"], line["tries"]) == ("refused", "queue_timeout", 0)
        assert line["queue_ms"] >= 200
        assert (line["tokens_in"], line["tokens_out"], line["backend"]) == (0, 0, "")
