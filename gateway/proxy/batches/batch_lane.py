"""Which batches does this gateway drive, and what does each do next?

It drives what it has claimed, and takes over what a gateway has left that is gone. The lines of a batch are asked as
requests of its tenant, and what comes of each is written down, once.
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
from gateway.config.sections.usage import UsageConfig
from gateway.keys.issued import Follower
from gateway.proxy.batches import batch_tables as tables
from gateway.proxy.batches.batch_api import BatchApi
from gateway.proxy.batches.batch_objects import (
    Checks,
    Result,
    answered,
    files_of,
    json_of,
    not_asked,
    read_caller,
    read_line,
)
from gateway.proxy.batches.stored_request import BytesRoom, StoredRequest
from gateway.proxy.pipeline import Pipeline
from gateway.storage.store_errors import StoreError, StoreUnavailable
from gateway.telemetry.background import Background
from gateway.telemetry.metric_families import family, single
from gateway.usage.counts import UsageCounts
from gateway.usage.database import Database
from gateway.usage.thread import CLOSE_S, DatabaseThread

TURN_S: Final = 1.0
FORGET_S: Final = 60.0
BUSY: Final = (429, 503)
"""The request was refused and comes again, until its batch expires."""
SENDS_MAX: Final = 2
"""To engines that fail on one request: it may be what they fail on."""
AGAIN_S: Final = 1.0
PAUSE_S_MAX: Final = 60.0
"""It is doubled up to this while a request is refused, unless the refusal says more: many wait for one place."""
Found = TypeVar("Found")
Given = ParamSpec("Given")


class BatchLane:
    """Files and batches of one gateway, from now on until `stop` and `close`."""

    def __init__(
        self, usage: UsageConfig, config: Config, pipeline: Pipeline, follower: Follower | None, within: Background
    ) -> None:
        """`follower`: knows which keys are taken, once it has asked; None: the config does."""
        self.pipeline = pipeline
        self.limits = config.batches
        self.answer_bytes_max = min(config.limits.response_buffer_bytes_max, config.bounds.results_bytes)
        self.line_bytes_max = config.bounds.line_bytes
        self.lines = BytesRoom(config.bounds.lines_bytes)
        self.answers = BytesRoom(config.bounds.results_bytes)
        self.checking = asyncio.Lock()
        """One file at a time: the ids of all its lines are remembered."""
        self.database = DatabaseThread(usage)
        self.counts = UsageCounts(usage.users_max)
        self.items = Counter(completed=0, failed=0)
        """Requests of batches whose results this gateway has written, by outcome."""
        self.owner = secrets.token_hex(8)
        self._follower = follower
        self._woken = asyncio.Event()
        self._drivers: dict[str, tuple[BatchDriver, asyncio.Task[None]]] = {}
        self.tasks = Background(within)
        self._api = BatchApi(self.database, config, pipeline, self._woken.set)
        self.tasks.repeat(self._turn, "batches")
        self._forgot_s = float("-inf")
        self.tasks.repeat(self._forget, "files")

    async def _turn(self) -> None:
        """Renew the claims, and begin what is new."""
        with suppress(TimeoutError):
            async with asyncio.timeout(TURN_S):
                await self._woken.wait()
        self._woken.clear()
        if self._follower is not None and not self._follower.has_read:
            return
        now_s = int(time.time())
        owned = await self.database.do(tables.claim, self.owner, now_s)
        for batch in self._drivers.keys() - owned.keys():
            self._drivers[batch][1].cancel()  # it has ended, or another gateway has it
        for batch, (tenant, status) in owned.items():
            if batch in self._drivers and status == "cancelling":
                self._drivers[batch][0].cut()
            elif batch not in self._drivers:
                driver = BatchDriver(batch, tenant, self)
                self._drivers[batch] = driver, self.tasks.start(driver.run())
                self._drivers[batch][1].add_done_callback(partial(self._ended, batch))

    async def _forget(self) -> None:
        """Now and then forget what is too old. A turn is short, so a fault that has passed is no longer told."""
        await asyncio.sleep(TURN_S)
        if time.monotonic() - self._forgot_s < FORGET_S:
            return
        while old := await self.database.do(tables.forget, int(time.time()), self.limits.keep_days):
            for tenant, file in old:
                while await self.database.do_for(tenant, tables.delete_some, file):
                    pass
        self._forgot_s = time.monotonic()

    def _ended(self, batch: str, task: asyncio.Task[None]) -> None:
        del self._drivers[batch]

    def collect(self) -> Iterator[Metric]:
        yield single("fairgate_batches", len(self._drivers))
        yield family("fairgate_batch_items_total", [([outcome], count) for outcome, count in self.items.items()])

    async def stop(self) -> None:
        """Ask nothing more, and let others go on at once. Files and batches are still shown."""
        await self.tasks.stop()
        with suppress(StoreError, TimeoutError):
            async with asyncio.timeout(CLOSE_S):
                await self.database.do(tables.release, self.owner)

    async def close(self) -> None:
        await self._api.tasks.stop()
        await self.database.close(CLOSE_S)


class BatchDriver:
    """One batch, as long as its gateway has the claim: `run` it, `cut` it when it is cancelled."""

    def __init__(self, batch: str, tenant: str, lane: BatchLane) -> None:
        self._batch, self._tenant = batch, tenant
        self._driven = tables.DrivenBatch(batch, tenant, lane.owner)
        self._lane = lane
        self._files = files_of(batch)
        self._reading, self._writing = asyncio.Lock(), asyncio.Lock()
        self._unwritten: list[Result] = []
        self._time: asyncio.Timeout | None = None
        self._is_cancelled = False
        self._is_full = False
        """An answer had no room among what its tenant may keep."""
        self._has_long_answers = False
        """An answer found no room: from then on room is reserved before a line is asked, so none is cut again."""
        self._lines_bytes = 0
        """Of lines that were read and are not done."""

    async def run(self) -> None:
        """Until it has ended, or the gateway stops."""
        try:
            await self._run()
        finally:
            self._done_with(self._lines_bytes)

    async def _run(self) -> None:
        self._entry, caller = await self._do(tables.driven, self._batch)
        self._principal, self._fields = read_caller(caller)
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
        await self._do(tables.end, self._driven, _now_s(), status)

    def cut(self) -> None:
        """Its tenant wants no more of it."""
        self._is_cancelled = True
        if self._time is not None and not self._time.expired():
            self._time.reschedule(0)

    async def _do(
        self, work: Callable[Concatenate[Database, Given], Found], *given: Given.args, **named: Given.kwargs
    ) -> Found:
        """What the work returns, as soon as the database can be asked."""
        while True:
            try:
                return await self._lane.database.do_for(self._tenant, work, *given, **named)
            except StoreUnavailable:
                await asyncio.sleep(AGAIN_S)

    async def _pages(self, *less: str) -> AsyncIterator[list[tuple[int, bytes]]]:
        """The lines of its file that are not blank, but for the lines that these files have. Whoever has them is
        `_done_with` their bytes in the end."""
        file, last, lane = self._entry["input_file_id"], 0, self._lane
        while True:
            after, (last, size) = last, await self._do(tables.ahead, file, last, less)
            if not size:
                return
            size = min(size, lane.line_bytes_max)  # a line that was kept under a larger memory_max would wait for ever
            await lane.lines.take(self._tenant, size)
            self._lines_bytes += size
            page = [row for row in await self._do(tables.lines, file, after, last, less) if json_of(row[1])]
            self._done_with(size - sum([len(text) for _, text in page]))
            yield page

    def _done_with(self, size: int) -> None:
        """So many bytes of lines are in memory no longer."""
        self._lines_bytes -= size
        self._lane.lines.change(self._tenant, -size)

    async def _is_valid(self) -> bool:
        """Read all lines, and go on only if each of them can be asked, and its results have room."""
        lane, endpoint = self._lane, self._entry["endpoint"]
        async with lane.checking:
            why_not = partial(lane.pipeline.why_not, self._principal)
            checks = Checks(self._batch, endpoint, why_not)
            async for page in self._pages():
                checks.take(page)
                self._done_with(sum([len(text) for _, text in page]))
        if not checks.total:
            checks.fault(None, "empty_file", "the file has no requests", None)
        self._entry["request_counts"]["total"] = 0 if checks.faults else checks.total
        return await self._do(tables.begin, self._driven, _now_s(), checks, lane.limits)

    async def _rows(self) -> AsyncIterator[tuple[int, bytes]]:
        """The lines that are still to be asked."""
        async for page in self._pages(*self._files):
            for row in page:
                yield row

    async def _work(self, rows: AsyncIterator[tuple[int, bytes]]) -> None:
        """Ask one line after another."""
        while True:
            async with self._reading:
                row = await anext(rows, None)
            if row is None:
                return
            await self._answer(*row)
            self._done_with(len(row[1]))

    async def _answer(self, n: int, text: bytes) -> None:
        """Ask a line, however often it has to be asked, and write down what comes of it."""
        line, request_id, sends = read_line(text), f"{self._batch}-{n}", 0
        endpoint, body, lane, pause_s = self._entry["endpoint"], bytes(line.body), self._lane, AGAIN_S / 2
        instead = not_asked(request_id, line.custom_id, "no_room")
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
                    shown = answered(request_id, line.custom_id, status, answer)
                    asked.hold(len(shown))
                    del answer
                    await self._write(Result(n, shown, not 200 <= status < 300, asked.context, instead))
                    return
            finally:
                asked.close()
            pause_s = max(again_s, min(2 * pause_s, PAUSE_S_MAX))
            await asyncio.sleep(pause_s)
        await self._write(Result(n, instead, True))

    async def _write(self, *results: Result) -> None:
        """Write it down, together with what others have to write; to the end, also where nobody waits for it."""
        self._unwritten += results
        await asyncio.shield(self._lane.tasks.start(self._write_group(self._unwritten)))

    async def _write_group(self, group: list[Result]) -> None:
        async with self._writing:
            if group and group is self._unwritten:  # else somebody else has written it
                self._unwritten = []
                lane = self._lane
                bytes_max = lane.limits.stored_bytes_max
                noted = await self._do(tables.write, self._driven, _now_s(), group, lane.counts, bytes_max)
                lane.items.update(["failed" if one.is_error else "completed" for one in noted])
                self._is_full |= any(one.record is not None and not one.instead for one in noted)

    async def _leave_rest(self, status: str) -> None:
        """What was not answered is an error each."""
        await self._write()
        async for page in self._pages(*self._files):
            ids = [(n, read_line(text).custom_id) for n, text in page]
            rest = [Result(n, not_asked(f"{self._batch}-{n}", one, f"batch_{status}"), True) for n, one in ids]
            await self._write(*rest)
            self._done_with(sum([len(text) for _, text in page]))


def _now_s() -> int:
    return int(time.time())
