"""The driver of stored batches: which batches does this gateway drive, and what does each do next?

A gateway drives the batches that it has claimed, and takes over those of a gateway that is gone. Lines of a batch run
as requests of its tenant. Each result is written once.
"""

from __future__ import annotations

import asyncio
import secrets
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import suppress
from functools import partial
from typing import Concatenate, Final, ParamSpec, TypeVar

from prometheus_client.metrics_core import Metric

from gateway.config.model import Config
from gateway.config.sections.services import UsageConfig
from gateway.keys.issued import KeyReader
from gateway.proxy.batches import batch_objects as objects
from gateway.proxy.batches import batch_tables as tables
from gateway.proxy.batches.batch_api import BatchApi, now_s
from gateway.proxy.batches.stored_request import BytesRoom, StoredRequest
from gateway.proxy.pipeline import Pipeline
from gateway.storage.store_errors import StoreError, StoreUnavailable
from gateway.telemetry.background import Tasks
from gateway.telemetry.metric_families import family, single
from gateway.usage.counts import UsageCounts
from gateway.usage.database import Database
from gateway.usage.thread import CLOSE_S, DatabaseThread

TURN_S: Final = 1.0
FORGET_S: Final = 60.0
BUSY: Final = (429, 503)
"""Statuses of a refusal, after which the request is retried until its batch expires."""
SENDS_MAX: Final = 2
"""Engine failures after which a line ends with an error, since the line may be their cause."""
AGAIN_S: Final = 1.0
PAUSE_S_MAX: Final = 60.0
"""Upper bound of the retry backoff, unless `retry-after-ms` asks for longer."""
Found = TypeVar("Found")
Given = ParamSpec("Given")


class BatchLane:
    """The files and batches of one gateway, served until `stop` and `close`."""

    def __init__(
        self, usage: UsageConfig, config: Config, pipeline: Pipeline, follower: KeyReader | None, within: Tasks
    ) -> None:
        """Start to drive batches. `follower` knows the valid keys, once it has read them; without one the config
        does."""
        self.pipeline = pipeline
        self.limits = config.batches
        self.answer_bytes_max = min(config.limits.response_buffer_bytes_max, config.bounds.results_bytes)
        self.line_bytes_max = config.bounds.line_bytes
        self.lines = BytesRoom(config.bounds.lines_bytes)
        self.answers = BytesRoom(config.bounds.results_bytes)
        self.checking = asyncio.Lock()
        """Lock that lets one file be checked at a time, since the ids of all its lines are in memory."""
        self.database = DatabaseThread(usage)
        self.counts = UsageCounts(usage.users_max)
        self.items = Counter(completed=0, failed=0)
        self.owner = secrets.token_hex(8)
        self._follower = follower
        self._woken = asyncio.Event()
        self._drivers: dict[str, tuple[BatchDriver, asyncio.Task[None]]] = {}
        self.tasks = Tasks(within)
        self._api = BatchApi(self.database, config, pipeline, self._woken.set)
        self.tasks.repeat(self._turn, "batches")
        self.tasks.repeat(self._forget, "files")

    async def _turn(self) -> None:
        """Renew the claims, and start and end drivers accordingly."""
        with suppress(TimeoutError):
            async with asyncio.timeout(TURN_S):
                await self._woken.wait()
        self._woken.clear()
        if self._follower is not None and not self._follower.has_read:
            return
        owned = await self.database.do(tables.claim, self.owner, now_s())
        for batch in self._drivers.keys() - owned.keys():
            self._drivers[batch][1].cancel()  # the batch has ended, or another gateway drives it
        for batch, (tenant, status) in owned.items():
            if batch in self._drivers and status == "cancelling":
                self._drivers[batch][0].cut()
            elif batch not in self._drivers:
                driver = BatchDriver(batch, tenant, self)
                self._drivers[batch] = driver, self.tasks.start(driver.run())
                self._drivers[batch][1].add_done_callback(partial(self._ended, batch))

    async def _forget(self) -> None:
        """Delete old files and batches, and wait for a minute."""
        while old := await self.database.do(tables.forget, now_s(), self.limits.keep_days):
            for tenant, file in old:
                while await self.database.do_for(tenant, tables.delete_lines, file):
                    pass
        await asyncio.sleep(FORGET_S)

    def _ended(self, batch: str, task: asyncio.Task[None]) -> None:
        del self._drivers[batch]

    def collect(self) -> Iterator[Metric]:
        yield single("fairgate_batches", len(self._drivers))
        yield family("fairgate_batch_items_total", [([outcome], count) for outcome, count in self.items.items()])

    async def stop(self) -> None:
        """Stop driving, and release the claims. Files and batches are still shown."""
        await self.tasks.stop()
        with suppress(StoreError, TimeoutError):
            async with asyncio.timeout(CLOSE_S):
                await self.database.do(tables.release, self.owner)

    async def close(self) -> None:
        await self._api.tasks.stop()
        await self.database.close(CLOSE_S)


class BatchDriver:
    """The driver of one batch, while its gateway has the claim: `run` it, `cut` it when it is cancelled."""

    def __init__(self, batch: str, tenant: str, lane: BatchLane) -> None:
        self._batch, self._tenant = batch, tenant
        self._driven = tables.DrivenBatch(batch, tenant, lane.owner)
        self._lane = lane
        self._files = objects.files_of(batch)
        self._reading, self._writing = asyncio.Lock(), asyncio.Lock()
        self._unwritten: list[objects.LineResult] = []
        self._time: asyncio.Timeout | None = None
        self._is_cancelled = False
        self._is_full = False
        """Whether an answer exceeded the bytes that its tenant may store."""
        self._has_long_answers = False
        """Whether an answer has found no room. Later lines reserve room first, so only an answer above the bound is
        aborted."""
        self._lines_bytes = 0
        """Bytes of lines that were read and are not done."""

    async def run(self) -> None:
        """Drive the batch until it has ended, or the gateway stops."""
        try:
            await self._run()
        finally:
            self._done_with(self._lines_bytes)

    async def _run(self) -> None:
        self._entry, caller = await self._do(tables.driven, self._batch)
        self._principal, self._fields = objects.read_caller(caller)
        self._is_cancelled |= self._entry["status"] == "cancelling"
        status, left_s = "completed", self._entry["expires_at"] - time.time()
        try:
            async with asyncio.timeout(0 if self._is_cancelled else max(0, left_s)) as self._time:
                await asyncio.sleep(0)
                if self._entry["status"] == "validating" and not await self._is_valid():
                    return
                async with asyncio.TaskGroup() as group:
                    rows = self._rows()
                    for _ in range(self._lane.limits.running_max):
                        group.create_task(self._work(rows))
        except TimeoutError:
            status = "cancelled" if self._is_cancelled else "expired"
        finally:
            self._time = None
        self._done_with(self._lines_bytes)
        if self._entry["request_counts"]["total"]:
            await self._leave_rest(status)
        await self._do(tables.end, self._driven, now_s(), status)

    def cut(self) -> None:
        """End the batch, since its tenant cancels it."""
        self._is_cancelled = True
        if self._time is not None and not self._time.expired():
            self._time.reschedule(0)

    async def _do(
        self, work: Callable[Concatenate[Database, Given], Found], *given: Given.args, **named: Given.kwargs
    ) -> Found:
        """Return the result of the work, as soon as the database is available."""
        while True:
            try:
                return await self._lane.database.do_for(self._tenant, work, *given, **named)
            except StoreUnavailable:
                await asyncio.sleep(AGAIN_S)

    async def _pages(self, *less: str) -> AsyncIterator[list[tuple[int, bytes]]]:
        """Yield the file's lines that are not blank, without those that the files `less` have. The caller owes a
        `_done_with` for the bytes of each page."""
        file, last, lane = self._entry["input_file_id"], 0, self._lane
        while True:
            after, (last, size) = last, await self._do(tables.ahead, file, last, less)
            if not size:
                return
            size = min(size, lane.line_bytes_max)  # a line stored under a larger memory_max would wait forever
            await lane.lines.take(self._tenant, size)
            self._lines_bytes += size
            page = [row for row in await self._do(tables.lines, file, after, last, less) if objects.strip_line(row[1])]
            self._done_with(size - sum([len(text) for _, text in page]))
            yield page

    def _done_with(self, size: int) -> None:
        """Return the room of lines that are done."""
        self._lines_bytes -= size
        self._lane.lines.change(self._tenant, -size)

    async def _is_valid(self) -> bool:
        """Check all lines and begin the batch if each can be asked and its results have room. Return whether it
        begins."""
        lane, endpoint = self._lane, self._entry["endpoint"]
        async with lane.checking:
            model_error = partial(lane.pipeline.model_error, self._principal)
            checks = objects.LineChecker(self._batch, endpoint, model_error)
            async for page in self._pages():
                checks.take(page)
                self._done_with(sum([len(text) for _, text in page]))
        if not checks.total:
            checks.fault(None, "empty_file", "the file has no requests", None)
        self._entry["request_counts"]["total"] = 0 if checks.faults else checks.total
        return await self._do(tables.begin, self._driven, now_s(), checks, lane.limits)

    async def _rows(self) -> AsyncIterator[tuple[int, bytes]]:
        """Yield the lines without a result."""
        async for page in self._pages(*self._files):
            for row in page:
                yield row

    async def _work(self, rows: AsyncIterator[tuple[int, bytes]]) -> None:
        """Answer one line after another."""
        while True:
            async with self._reading:
                row = await anext(rows, None)
            if row is None:
                return
            await self._answer(*row)
            self._done_with(len(row[1]))

    async def _answer(self, n: int, text: bytes) -> None:
        """Run a line, with retries, and write its result."""
        line, request_id, sends = objects.read_line(text), f"{self._batch}-{n}", 0
        endpoint, body, lane, pause_s = self._entry["endpoint"], bytes(line.body), self._lane, AGAIN_S / 2
        instead = objects.not_asked(request_id, line.custom_id, "no_room")
        while not self._is_full:
            is_reserved, bytes_max = self._has_long_answers, lane.answer_bytes_max
            asked = StoredRequest(request_id, endpoint, self._fields, body, lane.answers, self._tenant, bytes_max)
            asked.context.sends = sends
            try:
                if is_reserved:
                    await asked.reserve()
                principal = lane.pipeline.keyring.present(self._principal)
                status, again_s, answer = await asked.answer(lane.pipeline, principal)
                if asked.is_cut and not is_reserved:
                    self._has_long_answers = True
                    continue
                if asked.is_cut:
                    sends = SENDS_MAX
                elif status >= 500 and status not in BUSY:
                    sends = max(sends + 1, asked.context.sends)
                if status not in BUSY and (status < 500 or sends >= SENDS_MAX):
                    shown = objects.answered(request_id, line.custom_id, status, answer)
                    asked.hold(len(shown))
                    del answer
                    await self._write(objects.LineResult(n, shown, not 200 <= status < 300, asked.context, instead))
                    return
            finally:
                asked.close()
            pause_s = max(again_s, min(2 * pause_s, PAUSE_S_MAX))
            await asyncio.sleep(pause_s)
        await self._write(objects.LineResult(n, instead, True))

    async def _write(self, *results: objects.LineResult) -> None:
        """Write results, together with those of other lines. The write is completed even if the caller is cancelled."""
        self._unwritten += results
        await asyncio.shield(self._lane.tasks.start(self._write_group(self._unwritten)))

    async def _write_group(self, group: list[objects.LineResult]) -> None:
        """Write a group of results in one transaction."""
        async with self._writing:
            if group and group is self._unwritten:  # otherwise another task has written it
                self._unwritten = []
                lane = self._lane
                bytes_max = lane.limits.stored_bytes_max
                noted = await self._do(tables.write, self._driven, now_s(), group, lane.counts, bytes_max)
                lane.items.update(["failed" if one.is_error else "completed" for one in noted])
                self._is_full |= any(one.record is not None and not one.instead for one in noted)

    async def _leave_rest(self, status: str) -> None:
        """Write an error for each line without a result."""
        await self._write()
        async for page in self._pages(*self._files):
            ids = [(n, objects.read_line(text).custom_id) for n, text in page]
            lines = [(n, objects.not_asked(f"{self._batch}-{n}", one, f"batch_{status}")) for n, one in ids]
            await self._write(*[objects.LineResult(n, line, True) for n, line in lines])
            self._done_with(sum([len(text) for _, text in page]))
