"""Tasks beside the requests, which last as long as their owner wants and report their faults.

A lasting task repeats a function. A run that fails does not end the task: its fault is logged once, listed at /ready as
long as it lasts, and counted. The next run begins a second later.
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
"""Seconds after which a run that has not ended clears the fault of the run before: some runs listen for hours."""


class OperationalError(Exception):
    """A fault whose message says what happened, and where. A traceback would not help an operator: none is logged."""


class Tasks:
    """The asyncio tasks of one owner, which start one by one and stop together, with their faults."""

    def __init__(self, within: Tasks | None = None) -> None:
        """Begin without tasks. `within`: the owner whose `faults` also list the faults of these tasks."""
        self.faults: dict[str, str] = {} if within is None else within.faults
        """Fault of each task whose last run failed."""
        self._failed: Counter[str] = Counter() if within is None else within._failed
        self._tasks: set[asyncio.Task[None]] = set()

    def start(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        """Run a coroutine until it ends, or until `stop`."""
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        task.add_done_callback(_report_fault)
        return task

    def repeat(self, run: Callable[[], Awaitable[None]], kind: str, of: str = "") -> asyncio.Task[None]:
        """Call `run` again and again until the task is cancelled, or `stop`. `of`: name of the task in its kind."""
        return self.start(self._repeat(run, kind, f"{kind} of {of}" if of else kind))

    async def stop(self) -> None:
        """Cancel all tasks, and wait for their ends."""
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def collect(self) -> Iterator[Metric]:
        """Yield the metrics for the registry."""
        rows = [([kind], count) for kind, count in list(self._failed.items())]
        yield family("fairgate_background_failures_total", rows)

    async def _repeat(self, run: Callable[[], Awaitable[None]], kind: str, name: str) -> None:
        self._failed[kind] += 0  # a zero before it fails, so that the first failure is a change, too
        try:
            while True:
                lasting = asyncio.get_running_loop().call_later(LASTING_S, self._goes_on, name)
                try:
                    await run()
                except Exception as error:  # a fault of one run ends no task
                    self._failed[kind] += 1
                    self._note_fault(name, error)
                    await asyncio.sleep(RETRY_S)
                else:
                    self._goes_on(name)
                finally:
                    lasting.cancel()
        finally:
            self.faults.pop(name, None)

    def _note_fault(self, name: str, error: Exception) -> None:
        """Note the fault of a run, and log the fault unless the run before failed, too."""
        trace = None if isinstance(error, OperationalError) else error
        if name not in self.faults:
            logger.error("background task '%s' failed, and is tried again: %s", name, error, exc_info=trace)
        self.faults[name] = str(error) if trace is None else f"{type(error).__name__}: see the log"

    def _goes_on(self, name: str) -> None:
        if self.faults.pop(name, None) is not None:
            logger.info("background task '%s' works again", name)


def _report_fault(task: asyncio.Task[None]) -> None:
    if not task.cancelled() and (fault := task.exception()) is not None:
        logger.error("a task of the background failed", exc_info=fault)
