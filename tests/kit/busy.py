"""A gateway whose engine is kept busy by one request, so that all others wait."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from tests.gateway.capture import OK, STREAM, Peer, Seen, Upstream
from tests.gateway.live import CHAT, Answer, Live, Starter, chat, until


class Busy:
    """The gateway, what waits before it, and the engine, which answers nothing until `release`."""

    def __init__(self, live: Live, engine: Upstream, release: asyncio.Event) -> None:
        self.live = live
        self.engine = engine
        self.release = release
        self.asked: list[asyncio.Task[Answer]] = []

    def ask(
        self, key: str = "k", content: str = "x", path: str = CHAT, said: dict[str, str] | None = None, **fields: Any
    ) -> asyncio.Task[Answer]:
        """`said`: header fields. `fields`: of the body."""
        body = chat(content, max_tokens=5, **fields)
        task = asyncio.ensure_future(self.live.ask(path, body, key=key, **(said or {})))
        self.asked.append(task)
        return task

    async def fill(self, count: int, key: str = "k", **fields: Any) -> list[asyncio.Task[Answer]]:
        """Ask so often, until all of that waits."""
        queued = self.live.engine.queued
        tasks = [self.ask(key, **fields) for _ in range(count)]
        await until(lambda: self.live.engine.queued == queued + count)
        return tasks


@asynccontextmanager
async def busy(start: Starter, **fields: Any) -> AsyncIterator[Busy]:
    """Start it; when the block ends, all that was asked is answered."""
    release = asyncio.Event()

    async def script(seen: Seen, peer: Peer) -> None:
        await release.wait()
        await peer.send(STREAM if seen.json.get("stream") else OK)

    async with Upstream(script) as engine, start(engine.url, **fields) as live:
        gate = Busy(live, engine, release)
        holder = asyncio.ensure_future(live.ask(CHAT, chat(n=128, max_tokens=1), key="holder"))
        await until(lambda: live.engine.dispatched)
        try:
            yield gate
        finally:
            release.set()
        await asyncio.gather(holder, *gate.asked)
