"""How does a test wait for what must happen? Until it is so, for minutes if need be: no machine is that slow."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

WAIT_S = 900.0


async def until(condition: Callable[[], object]) -> None:
    """Let the loop run until something is true."""
    async with asyncio.timeout(WAIT_S):
        while not condition():  # noqa: ASYNC110 (what is waited for is state, which has no event)
            await asyncio.sleep(0.001)


async def eventually(condition: Callable[[], Awaitable[object]], again_s: float = 0.02) -> None:
    """Ask until the answer is true."""
    async with asyncio.timeout(WAIT_S):
        while not await condition():  # noqa: ASYNC110
            await asyncio.sleep(again_s)
