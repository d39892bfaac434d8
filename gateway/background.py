"""What runs beside the requests, for as long as its owner wants, and says so in the log when it fails."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Coroutine
from typing import Any

__all__ = ["Background", "report_fault"]

logger = logging.getLogger("fairgate")


class Background:
    """The tasks of one owner."""

    def __init__(self) -> None:
        self._tasks: set[asyncio.Task[None]] = set()

    def start(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        """Run it until it ends, or until `stop`."""
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        task.add_done_callback(report_fault)
        return task

    async def stop(self) -> None:
        """End all of them."""
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def report_fault(task: asyncio.Task[None]) -> None:
    """Say in the log that it failed, if it did."""
    if not task.cancelled() and (fault := task.exception()) is not None:
        logger.error("a task of the background failed", exc_info=fault)
