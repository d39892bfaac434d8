"""A process that stands still, as on a machine that has too much to do."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any

STEPS = 20
"""Turns of the loop until a question is sent; an answer takes longer."""


async def stood_still(question: Coroutine[Any, Any, Any], for_s: float, *, steps: int = STEPS) -> Any:
    """Return the answer to a question, after whose sending (or as many `steps`) the process stands still."""
    loop = asyncio.get_running_loop()
    asking = loop.create_task(question)
    for _ in range(steps):
        await asyncio.sleep(0)
    until_s = loop.time() + for_s
    while loop.time() < until_s:
        pass
    return await asking
