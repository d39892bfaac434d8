"""Which answers of a store come too late?"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable
from typing import TypeVar

T = TypeVar("T")


async def finish_in_time(work: Awaitable[T], limit_s: float, what: str = "answer") -> T:
    """Return the result of `work`. Cancel `work` and raise TimeoutError after `limit_s`. `what`: name of the result.

    The wait has two halves. A process that stood still for longer reads what has arrived meanwhile in the second half,
    so the answer of a store that was in time is not lost.
    """
    task = asyncio.ensure_future(work)
    try:
        for _ in range(2):
            await asyncio.wait({task}, timeout=limit_s / 2)
        if task.done():
            return task.result()
    finally:
        task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    raise TimeoutError(f"no {what} within {limit_s:g} s")
