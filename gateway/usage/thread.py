"""A thread that works with the database, one piece after another, so that the loop never waits for it.

Owners of work, such as tenants, take turns, so a tenant with many downloads delays each other owner by one piece.
"""

from __future__ import annotations

import asyncio
import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, Concatenate, ParamSpec, TypeVar

from gateway.config.sections.services import UsageConfig
from gateway.storage.store_errors import StoreUnavailable
from gateway.usage.database import Database, place_of

ANSWER_S = 6.0
"""Seconds that an answer may take. Longer than a connection or a statement may take, but not than both together."""
CLOSE_S = 2.0
WAITING_MAX = 64
"""Limit on the waiting pieces of work of one owner."""
Found = TypeVar("Found")
Given = ParamSpec("Given")


class DatabaseThread:
    """A runner of database work for the loop. `close` ends it."""

    def __init__(self, config: UsageConfig) -> None:
        """Set up the database; the first work starts the thread."""
        self.place = place_of(config)
        self._database = Database(config)
        self._waiting: dict[str, deque[tuple[Callable[[Database], Any], Future[Any]]]] = {}
        """Waiting work by owner, in the order of their turns."""
        self._changed = threading.Condition()
        self._is_closing = False
        self._thread: threading.Thread | None = None

    async def do(
        self, work: Callable[Concatenate[Database, Given], Found], *given: Given.args, **named: Given.kwargs
    ) -> Found:
        """Do the gateway's own work, and return its result. Raises as `do_for` does."""
        return await self.do_for("", work, *given, **named)

    async def do_for(
        self, owner: str, work: Callable[Concatenate[Database, Given], Found], *given: Given.args, **named: Given.kwargs
    ) -> Found:
        """Do the work of this owner, such as a tenant, and return its result.

        Raise StoreUnavailable, also if the work takes longer than ANSWER_S, or StoreRefused. A caller that stops
        waiting does not stop work that has begun.
        """
        done: Future[Found] = Future()
        with self._changed:
            line = self._waiting.get(owner) or deque()
            if self._is_closing or len(line) >= WAITING_MAX:
                raise StoreUnavailable(f"{self.place}: {len(line)} others wait for it already, or it is closed")
            self._waiting[owner] = line
            line.append((lambda database: work(database, *given, **named), done))
            self._changed.notify()
        if self._thread is None:
            # A daemon thread, since a disk that hangs must not keep the process.
            self._thread = threading.Thread(target=self._run, name="usage", daemon=True)
            self._thread.start()
        try:
            async with asyncio.timeout(ANSWER_S):
                return await asyncio.wrap_future(done)
        except TimeoutError:
            raise StoreUnavailable(f"{self.place}: does not answer within {ANSWER_S:g} s") from None

    async def close(self, wait_s: float) -> None:
        """Let waiting work finish for at most `wait_s`, and disconnect."""
        if self._thread is None:
            return
        with self._changed:
            self._is_closing = True
            self._changed.notify()
        await asyncio.to_thread(self._thread.join, wait_s)

    def _run(self) -> None:
        while (next_one := self._next()) is not None:
            work, done = next_one
            if not done.set_running_or_notify_cancel():
                continue
            try:
                done.set_result(work(self._database))
            except Exception as error:  # raised in `do_for`
                done.set_exception(error)
        self._database.close()

    def _next(self) -> tuple[Callable[[Database], Any], Future[Any]] | None:
        """Wait for a piece of work and take it; its owner's turn is then last. None if closed and no work waits."""
        with self._changed:
            self._changed.wait_for(lambda: self._waiting or self._is_closing)
            for owner, line in self._waiting.items():
                del self._waiting[owner]
                if len(line) > 1:
                    self._waiting[owner] = line
                return line.popleft()
            return None
