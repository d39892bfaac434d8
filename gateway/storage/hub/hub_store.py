"""The store of workers: shared state kept by their hub, without a server to install."""

from __future__ import annotations

import asyncio
import logging
import os
import secrets
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Final

from prometheus_client.metrics_core import Metric

from gateway.storage.hub.run_directory import RunDirectory
from gateway.storage.hub.wire import BROKEN, receive, send
from gateway.storage.in_time import finish_in_time
from gateway.storage.store import PoolIdentity
from gateway.storage.store_errors import StoreUnavailable
from gateway.telemetry.metric_families import single
from policies.replicas.schedule import DEADLINE_S

logger = logging.getLogger("fairgate")

RETRY_S: Final = 0.1
"""Interval of attempts to reach the hub, which cost the machine next to nothing."""
ASKED_MAX: Final = 256
"""Bound on unanswered questions. Only a hub that hangs has more."""


class HubStore:
    """A `Store` with one connection, on which many questions may be under way."""

    def __init__(self, run_directory: RunDirectory, pools: Sequence[PoolIdentity]) -> None:
        self.replica = secrets.token_hex(8)
        self.epoch_s = run_directory.epoch_s
        self.pools = pools
        """Pools of this gateway, which all workers read from one file."""
        self.fault: str | None = "the hub was not asked yet"
        self._path = run_directory.exchange
        self._connection: _Hub | None = None
        self._is_closed = False

    async def open(self) -> None:
        try:
            reader, writer = await asyncio.open_unix_connection(self._path)
        except OSError as error:
            self._log_fault(f"the hub cannot be reached: {os.strerror(error.errno) if error.errno else error}")
            raise StoreUnavailable(self.fault or "") from None
        self._connection = _Hub(reader, writer, self._lost)
        self._log_fault(None)

    async def run_once(self) -> None:
        if self._connection is not None:
            await asyncio.wait({self._connection.reading})
        await asyncio.sleep(RETRY_S)
        try:
            await self.open()
        except StoreUnavailable:
            pass  # `fault` reports it

    async def exchange(self, about: str, number: int, report: bytes) -> bytes:
        return await self._ask("exchange", self.replica, about, number, report) or b""

    async def leave(self, about: str) -> None:
        await self._ask("leave", self.replica, about)

    async def learned_state(self, pool: str) -> bytes | None:
        found: bytes | None = await self._ask("learned", pool)
        return found

    async def learn(self, pool: str, content: bytes) -> None:
        await self._ask("learn", pool, content)

    async def publish(self, pool: str, content: bytes) -> int:
        listeners: int = await self._ask("news", pool, content)
        return listeners

    async def subscribe(self, pool: str, received: Callable[[bytes], None]) -> None:
        hub = self._hub()
        hub.listeners.setdefault(pool, []).append(received)
        try:
            await asyncio.wait({hub.reading})
        finally:
            hub.listeners[pool].remove(received)

    def collect(self) -> Iterator[Metric]:
        yield single("fairgate_state_shared", self.fault is None)

    async def close(self) -> None:
        self._is_closed = True
        if self._connection is not None:
            self._connection.writer.close()

    def _hub(self) -> _Hub:
        if self._connection is None:
            raise StoreUnavailable(self.fault or "")
        return self._connection

    async def _ask(self, *question: Any) -> Any:
        try:
            answer = await self._hub().ask(*question)
        except StoreUnavailable as error:
            self._log_fault(str(error))
            raise
        self._log_fault(None)
        return answer

    def _lost(self) -> None:
        self._connection = None
        if not self._is_closed:
            self._log_fault("the hub has ended the connection")

    def _log_fault(self, fault: str | None) -> None:
        """Log when sharing ends and begins again."""
        before, self.fault = self.fault, fault
        if fault is None and before is not None:
            logger.debug("state is shared with the other workers")
        elif fault is not None and before is None:
            logger.warning("state is not shared, this worker goes on with what it knows: %s", fault)


class _Hub:
    """A worker's end of one connection, which lasts as long as `reading`."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, lost: Callable[[], None]) -> None:
        self.writer = writer
        self.reading = asyncio.create_task(self._read(reader))
        self.listeners: dict[str, list[Callable[[bytes], None]]] = {}
        self._lost = lost
        self._asked: dict[int, asyncio.Future[bytes | int | None]] = {}
        self._number = 0

    async def ask(self, *question: Any) -> bytes | int | None:
        """Ask and return the answer. Raise StoreUnavailable."""
        if len(self._asked) >= ASKED_MAX:
            raise StoreUnavailable(f"the hub has not answered {ASKED_MAX} questions")
        self._number += 1
        number = self._number
        answer: asyncio.Future[bytes | int | None] = asyncio.get_running_loop().create_future()
        self._asked[number] = answer
        try:
            send(self.writer, [number, *question])
            return await finish_in_time(answer, DEADLINE_S)
        except TimeoutError:
            raise StoreUnavailable(f"the hub has not answered within {DEADLINE_S:g} s") from None
        finally:
            del self._asked[number]

    async def _read(self, reader: asyncio.StreamReader) -> None:
        """Take what the hub sends until the connection ends."""
        try:
            while True:
                self._received(*await receive(reader))
        except BROKEN:
            self.writer.transport.abort()
        finally:
            for asked in self._asked.values():
                if not asked.done():
                    asked.set_exception(StoreUnavailable("the hub has ended the connection"))
            self._lost()

    def _received(self, number: Any, *rest: Any) -> None:
        if number:
            [answer] = rest
            if not isinstance(answer, bytes | int | None):
                raise ValueError("an answer is bytes, a number, or nothing")
            asked = self._asked.get(number)
            if asked is not None and not asked.done():
                asked.set_result(answer)
            return
        pool, content = rest
        for received in self.listeners.get(pool, ()):
            received(content)
