"""The writer of usage: every half second it stores a batch, which counts once however often it is sent.

While the database cannot be reached, the last batch is sent again and again. New usage is added up in memory meanwhile:
one sum for each hour and key, so hours of usage are small.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
import time
from collections.abc import Iterator
from contextlib import suppress

from prometheus_client.metrics_core import Metric

from gateway.config.memory_bounds import MemoryBounds
from gateway.config.sections.services import UsageConfig
from gateway.storage.store_errors import StoreError, StoreUnavailable
from gateway.telemetry.metric_families import single
from gateway.telemetry.record import RequestRecord
from gateway.usage.counts import UsageCounts
from gateway.usage.thread import CLOSE_S, DatabaseThread
from gateway.usage.written import WRITERS_KEPT_S, UsageBatch, add_batch, forget, used_before
from policies.limits.quotas import Quotas

logger = logging.getLogger("fairgate")

FLUSH_S = 0.5
FORGET_S = 3600.0


class UsageRecorder:
    """Counter and writer of one gateway's usage. `open`, one `run_once` after another, then `close`."""

    def __init__(self, config: UsageConfig, quotas: Quotas | None, bounds: MemoryBounds) -> None:
        """Begin without counts. `quotas`: limits that resume from stored usage; None if there are none to resume."""
        self.counts = UsageCounts(config.users_max, bounds.size("sums") // 4, bounds.size("users"))
        # A quarter: twice this number may wait, and as many may be in the batch under way.
        self.database = DatabaseThread(config)
        self.fault: str | None = None
        self._config = config
        self._quotas = quotas
        self._writer = secrets.token_hex(8)
        self._numbered = self._written = self._lost = 0
        """Requests since the start: in batches, in written batches, and in written batches that were lost."""
        self._wrote_s = 0.0
        self._batch: UsageBatch | None = None
        """Batch that is not known to be written."""
        self._dropped_reported = 0
        self._forgot_s = float("-inf")
        self._has_gone_on = False
        self._flushing = asyncio.Lock()

    async def open(self) -> None:
        """Connect, and seed the limits with stored usage. Raise StoreRefused if the database cannot be used at all. A
        database that is unavailable is only noted as a fault.
        """
        try:
            await self._go_on()
        except StoreUnavailable as error:
            self._failed(str(error))

    def settled(self, record: RequestRecord) -> None:
        """Count an ended request, but for one of a stored batch, whose result carries its usage."""
        if not record.is_batch:
            self.counts.ended(record)

    def go_on_with(self, quotas: Quotas) -> None:
        """Seed limits that have counted nothing yet with counts that are in no batch.

        The next `flush` seeds them with stored usage.
        """
        self._quotas, self._has_gone_on = quotas, False
        quotas.go_on(self.counts.used(), time.monotonic())

    async def run_once(self) -> None:
        """Write after half a second."""
        await asyncio.sleep(FLUSH_S)
        await self.flush()

    async def flush(self) -> None:
        """Write all counts so far, after the batch that could not be written before. After a fault of the database they
        stay in memory.
        """
        async with self._flushing:
            self._report_dropped()
            try:
                while (batch := await self._next()) is not None:
                    self._find_lost(await self.database.do(add_batch, batch, int(time.time())))
                    self._batch, self._written = None, batch.number
                await self._forget()
            except StoreError as error:
                self._failed(str(error))
                return
            if self.fault is not None:
                logger.info("usage is written again: %s", self.database.place)
                self.fault = None

    async def close(self) -> None:
        """Write the rest within CLOSE_S, or log how many requests are lost."""
        with suppress(TimeoutError):
            async with asyncio.timeout(CLOSE_S):
                await self.flush()
        rest = [self.counts.take(), self._batch.sums if self._batch is not None else {}]
        self._batch = None
        if lost := sum(totals.requests for sums in rest for totals in sums.values()):
            logger.warning(
                "the usage of %d requests was not written (%s); their lines in the access log remain", lost, self.fault
            )
        await self.database.close(CLOSE_S)

    def collect(self) -> Iterator[Metric]:
        """Yield the metrics for the registry."""
        yield single("fairgate_usage_written", self.fault is None)
        waiting = len(self.counts) + (0 if self._batch is None else len(self._batch.sums))
        yield single("fairgate_usage_waiting_sums", waiting)
        yield single("fairgate_usage_requests_dropped_total", self.counts.requests_dropped + self._lost)

    async def _next(self) -> UsageBatch | None:
        """Return the batch to write, after the limits were seeded; None if there is nothing to write."""
        if self._batch is None:
            await self._go_on()
            if len(self.counts):
                sums = self.counts.take()
                self._numbered += max(1, sum(totals.requests for totals in sums.values()))
                self._batch = UsageBatch(self._writer, self._numbered, sums)
        return self._batch

    async def _go_on(self) -> None:
        """Seed the limits once with stored usage, before usage is stored that they have counted themselves."""
        if self._has_gone_on:
            return
        quotas = self._quotas
        found = await used_before(self.database, quotas, time.time())
        if quotas is self._quotas:  # otherwise new limits came meanwhile, and the next call reads for them
            self._has_gone_on = True
            if quotas is not None:
                quotas.go_on(found, time.monotonic())

    async def _forget(self) -> None:
        now = time.monotonic()
        if now - self._forgot_s >= FORGET_S:
            self._forgot_s = now
            await self.database.do(forget, int(time.time()), self._config.keep_days)

    def _find_lost(self, found: int) -> None:
        """Log a loss if the database knows of fewer requests than were written: an older copy replaced it."""
        idle_s, self._wrote_s = time.time() - self._wrote_s, time.time()
        if found < self._written and idle_s < WRITERS_KEPT_S:  # a writer idle for longer is deleted
            self._lost += self._written - found
            logger.warning(
                "the usage of %d requests is gone from %s: an older copy took its place; their lines in the access log"
                " remain", self._written - found, self.database.place,
            )  # fmt: skip

    def _failed(self, why: str) -> None:
        if self.fault is None:
            logger.warning("usage is not written, and kept in memory until it can be: %s", why)
        self.fault = why

    def _report_dropped(self) -> None:
        dropped = self.counts.requests_dropped - self._dropped_reported
        self._dropped_reported += dropped
        if dropped:
            logger.warning("no room for the usage of %d requests; their lines in the access log remain", dropped)
