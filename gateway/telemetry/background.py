"""What runs beside the requests, for as long as its owner wants, and says so in the log when it fails.

Whatever goes on is repeated, turn by turn. A turn that fails ends nothing: it is said once in the log, at /ready for as
long as it lasts, and counted, and the next turn comes a second later.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Awaitable, Callable, Coroutine, Iterator
from typing import Any, Final

from prometheus_client.metrics_core import Metric

from gateway.telemetry.metric_families import family

logger = logging.getLogger("fairgate")

RETRY_S: Final = 1.0
LASTING_S: Final = 60.0
"""A turn that has gone on for so long has got past what the one before failed at: some listen for hours."""


class OperationalError(Exception):
    """Its message says all: what happened, and where. The place in the code would not help an operator."""


class Background:
    """The tasks of one owner."""

    def __init__(self, within: Background | None = None) -> None:
        """`within`: the owner whose `faults` also list the faults of these tasks."""
        self.faults: dict[str, str] = {} if within is None else within.faults
        """By task: why its last turn failed."""
        self._failed: Counter[str] = Counter() if within is None else within._failed
        """By kind of task: turns."""
        self._tasks: set[asyncio.Task[None]] = set()

    def start(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        """Run it until it ends, or until `stop`."""
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        task.add_done_callback(_report_fault)
        return task

    def repeat(self, turn: Callable[[], Awaitable[None]], kind: str, of: str = "") -> asyncio.Task[None]:
        """Again and again, until it is cancelled, or until `stop`. `of`: which task of its kind it is."""
        return self.start(self._repeat(turn, kind, f"{kind} of {of}" if of else kind))

    async def stop(self) -> None:
        """End all of them."""
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def collect(self) -> Iterator[Metric]:
        """As a registry of metrics asks for it."""
        rows = [([kind], count) for kind, count in list(self._failed.items())]
        yield family("fairgate_background_failures_total", rows)

    async def _repeat(self, turn: Callable[[], Awaitable[None]], kind: str, name: str) -> None:
        self._failed[kind] += 0  # known before it fails: the first failure is a change, too
        try:
            while True:
                lasting = asyncio.get_running_loop().call_later(LASTING_S, self._goes_on, name)
                try:
                    await turn()
                except Exception as error:  # a fault of one turn ends no task: it is counted, logged and tried again
                    self._failed[kind] += 1
                    is_logged = isinstance(error, OperationalError)
                    if name not in self.faults:
                        logger.error(
                            "%s failed, and is tried again: %s", name, error, exc_info=None if is_logged else error
                        )
                    self.faults[name] = str(error) if is_logged else f"{type(error).__name__}: see the log"
                    await asyncio.sleep(RETRY_S)
                else:
                    self._goes_on(name)
                finally:
                    lasting.cancel()
        finally:
            self.faults.pop(name, None)

    def _goes_on(self, name: str) -> None:
        if self.faults.pop(name, None) is not None:
            logger.info("%s goes on", name)


def _report_fault(task: asyncio.Task[None]) -> None:
    if not task.cancelled() and (fault := task.exception()) is not None:
        logger.error("a task of the background failed", exc_info=fault)
