"""Two gateways with one Redis before the same engines."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any, NamedTuple

from backends.simulated.engine_profiles import EngineProfile
from tests.gateway.live import SMALL, Live, Simulated, Starter, simulated
from tests.redis_server import RedisServer


class Pair(NamedTuple):
    """Two gateways, their Redis and their engines."""

    redis: RedisServer
    engines: list[Simulated]
    first: Live
    second: Live

    def holds_nothing(self) -> bool:
        return all(live.holds_nothing() for live in (self.first, self.second)) and all(
            engine.is_idle() for engine in self.engines
        )


@asynccontextmanager
async def pair(start: Starter, engines: int = 1, profile: EngineProfile = SMALL, **fields: Any) -> AsyncIterator[Pair]:
    """Run both until the end of the block; `fields` are of their configs."""
    async with AsyncExitStack() as stack:
        redis = await stack.enter_async_context(RedisServer())
        sims = [await stack.enter_async_context(simulated(profile)) for _ in range(engines)]
        urls = [sim.url for sim in sims]
        lives = [await stack.enter_async_context(start(*urls, state=redis.url, **fields)) for _ in range(2)]
        yield Pair(redis, sims, *lives)
