"""What do the engines of a configuration say of themselves?"""

from __future__ import annotations

import asyncio

import aiohttp

from gateway.config.model import Config
from gateway.pool.backend import Backend


async def probed(config: Config) -> tuple[list[str], bool]:
    """Ask every engine once, as the gateway does at its start. Returns a line for each, and whether all answered.

    A simulated engine inside the gateway's own process is not there yet, and is not asked.
    """
    configured = [(pool.name, each) for pool in config.pools for each in pool.backends if not each.simulated]
    async with aiohttp.ClientSession() as session:
        backends = [(pool, Backend(each, each.url, config)) for pool, each in configured]
        await asyncio.gather(*(backend.check(session) for _, backend in backends))
        lines = [f"pool {pool}: {backend.name}: {_description(backend)}" for pool, backend in backends]
        await asyncio.gather(*(backend.close() for _, backend in backends))
    return lines, all(backend.health.healthy for _, backend in backends)


def _description(backend: Backend) -> str:
    if not backend.health.healthy:
        return backend.health.reason
    return f"{backend.adapter.description()}; serves {', '.join(sorted(backend.models)) or 'no model'}"
