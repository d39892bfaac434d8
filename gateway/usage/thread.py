"""Who waits for the database? A thread of its own, which does one piece of work after another; never the loop."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from concurrent.futures import Future
from queue import Full, Queue
from typing import Any, Concatenate, ParamSpec, TypeVar

from gateway.config.sections.usage import UsageConfig
from gateway.storage.store_errors import StoreUnavailable
from gateway.usage.database import Database, place_of

ANSWER_S = 6.0
"""Longer than a connection and a statement may take."""
CLOSE_S = 2.0
WAITING_MAX = 64
Found = TypeVar("Found")
Given = ParamSpec("Given")


class DatabaseThread:
    """Does with the database what the loop wants done. `close` ends it."""

    def __init__(self, config: UsageConfig, *, makes: bool = True) -> None:
        """`makes`: as for `Database`."""
        self.place = place_of(config)
        self._database = Database(config, makes=makes)
        self._work: Queue[tuple[Callable[[Database], Any], Future[Any]] | None] = Queue(WAITING_MAX)
        self._thread: threading.Thread | None = None

    @property
    def replaced(self) -> int:
        """How often the file was replaced or removed while it was open."""
        return self._database.replaced

    async def do(
        self, work: Callable[Concatenate[Database, Given], Found], *given: Given.args, **named: Given.kwargs
    ) -> Found:
        """What the work returns. Raises StoreUnavailable, also where it takes too long, or StoreRefused. Who stops
        waiting does not stop work that has begun."""
        done: Future[Found] = Future()
        try:
            self._work.put_nowait((lambda database: work(database, *given, **named), done))
        except Full:
            raise StoreUnavailable(f"{self.place}: {WAITING_MAX} others wait for it already") from None
        if self._thread is None:
            # A daemon: a disk that has stopped for good must not keep the process.
            self._thread = threading.Thread(target=self._run, name="usage", daemon=True)
            self._thread.start()
        try:
            async with asyncio.timeout(ANSWER_S):
                return await asyncio.wrap_future(done)
        except TimeoutError:
            raise StoreUnavailable(f"{self.place}: does not answer within {ANSWER_S:g} s") from None

    async def close(self, wait_s: float) -> None:
        """Let what waits be done, for at most so long, and disconnect."""
        if self._thread is None:
            return
        try:
            self._work.put_nowait(None)
        except Full:
            return
        await asyncio.to_thread(self._thread.join, wait_s)

    def _run(self) -> None:
        while (next_one := self._work.get()) is not None:
            work, done = next_one
            if not done.set_running_or_notify_cancel():
                continue
            try:
                done.set_result(work(self._database))
            except Exception as error:
                done.set_exception(error)
        self._database.close()
