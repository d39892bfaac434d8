"""Everything here runs on both event loops."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Mapping

import pytest
import uvloop

from backends.client.upstream import UpstreamConnections
from tests.backends.raw_server import Open


def pytest_asyncio_loop_factories() -> Mapping[str, Callable[[], asyncio.AbstractEventLoop]]:
    return {"asyncio": asyncio.SelectorEventLoop, "uvloop": uvloop.new_event_loop}


@pytest.fixture
async def open_pool() -> AsyncIterator[Open]:
    pools: list[UpstreamConnections] = []

    def make(url: str, **settings: float) -> UpstreamConnections:
        pool = UpstreamConnections("b1", url, **settings)  # type: ignore[arg-type]
        pools.append(pool)
        return pool

    yield make
    for pool in pools:
        await pool.close()
