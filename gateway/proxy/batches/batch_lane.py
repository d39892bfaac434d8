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
from gateway.proxy.batches.batch_objects import Checks, Result, answered, files_of, not_asked, read_caller, read_line
from gateway.proxy.batches.stored_request import StoredRequest
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
        self.answer_bytes_max = config.limits.response_buffer_bytes_max
        self.database = DatabaseThread(usage)
        self.counts = UsageCounts(usage.users_max)
        self.items = Counter(completed=0, failed=0)
        """Requests of batches whose results this gateway has written, by outcome."""
        self.owner = secrets.token_hex(8)
        self._follower = follower
        self._woken = asyncio.Event()
        self._drivers: dict[str, tuple[BatchDriver, asyncio.Task[None]]] = {}
        self._tasks = Background(within)
        self._forgot_s = float("-inf")
        self._api = BatchApi(self.database, config.batches, pipeline, self._woken.set)
        self._tasks.repeat(self._turn, "batches")

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
        for batch, status in owned.items():
            if batch in self._drivers and status == "cancelling":
                self._drivers[batch][0].cut()
            elif batch not in self._drivers:
                driver = BatchDriver(batch, self)
                self._drivers[batch] = driver, self._tasks.start(driver.run())
                self._drivers[batch][1].add_done_callback(partial(self._ended, batch))
        if time.monotonic() - self._forgot_s >= FORGET_S:
            self._forgot_s = time.monotonic()
            await self.database.do(tables.forget, now_s, self.limits.keep_days)

    def _ended(self, batch: str, task: asyncio.Task[None]) -> None:
        del self._drivers[batch]

    def collect(self) -> Iterator[Metric]:
        yield single("fairgate_batches", len(self._drivers))
        yield family("fairgate_batch_items_total", [([outcome], count) for outcome, count in self.items.items()])

    async def stop(self) -> None:
        """Ask nothing more, and let others go on at once. Files and batches are still shown."""
        await self._tasks.stop()
        with suppress(StoreError, TimeoutError):
            async with asyncio.timeout(CLOSE_S):
                await self.database.do(tables.release, self.owner)

    async def close(self) -> None:
        await self._api.tasks.stop()
        await self.database.close(CLOSE_S)


class BatchDriver:
    """One batch, as long as its gateway has the claim: `run` it, `cut` it when it is cancelled."""

    def __init__(self, batch: str, lane: BatchLane) -> None:
        self._batch = batch
        self._lane = lane
        self._files = files_of(batch)
        self._reading, self._writing = asyncio.Lock(), asyncio.Lock()
        self._unwritten: list[Result] = []
        self._time: asyncio.Timeout | None = None
        self._is_cancelled = False

    async def run(self) -> None:
        """Until it has ended, or the gateway stops."""
        self._entry, caller, kept_bytes = await self._do(tables.driven, self._batch)
        self._principal, self._fields = read_caller(caller)
        self._is_cancelled |= self._entry["status"] == "cancelling"
        self._bytes_left = self._lane.limits.stored_bytes_max - kept_bytes
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
        if self._entry["request_counts"]["total"]:
            await self._leave_rest(status)
        await self._do(tables.end, self._batch, self._lane.owner, _now_s(), self._principal.tenant, status)

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
                return await self._lane.database.do(work, *given, **named)
            except StoreUnavailable:
                await asyncio.sleep(AGAIN_S)

    async def _pages(self, *less: str) -> AsyncIterator[list[tuple[int, bytes]]]:
        """The lines of its file, but for the lines that these files have."""
        last = 0
        while page := await self._do(tables.page, self._entry["input_file_id"], last, less):
            yield page
            last = page[-1][0]

    async def _is_valid(self) -> bool:
        """Read all lines, and go on only if each of them can be asked."""
        checks = Checks(self._entry["endpoint"], partial(self._lane.pipeline.why_not, self._principal))
        async for page in self._pages():
            checks.take(page)
        if not checks.total:
            checks.fault(None, "empty_file", "the file has no requests", None)
        self._entry["request_counts"]["total"] = 0 if checks.faults else checks.total
        await self._do(tables.begin, self._batch, self._lane.owner, _now_s(), checks.total, checks.faults)
        return not checks.faults

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
            await self._write(await self._result(*row))

    async def _result(self, n: int, text: bytes) -> Result:
        """What comes of a line, however often it has to be asked."""
        line, request_id, sends = read_line(text), f"{self._batch}-{n}", 0
        endpoint, body, bytes_max = self._entry["endpoint"], bytes(line.body), self._lane.answer_bytes_max
        pause_s = AGAIN_S / 2
        while self._bytes_left > 0:
            asked = StoredRequest(request_id, endpoint, self._fields, body, bytes_max)
            asked.context.sends = sends
            principal = self._lane.pipeline.keyring.present(self._principal)
            status, again_s, answer = await asked.answer(self._lane.pipeline, principal)
            if status >= 500 and status not in BUSY:
                sends = max(sends + 1, asked.context.sends)
            if status not in BUSY and (status < 500 or sends >= SENDS_MAX):
                shown = answered(request_id, line.custom_id, status, answer)
                self._bytes_left -= len(shown)
                return Result(n, shown, not 200 <= status < 300, asked.context)
            pause_s = max(again_s, min(2 * pause_s, PAUSE_S_MAX))
            await asyncio.sleep(pause_s)
        why = "your files take all the bytes that you may keep; delete some"
        return Result(n, not_asked(request_id, line.custom_id, "no_room", why), True)

    async def _write(self, *results: Result) -> None:
        """Write it down, together with what others have to write."""
        group = self._unwritten
        group += results
        async with self._writing:
            if group and group is self._unwritten:  # else somebody else has written it
                self._unwritten = []
                lane = self._lane
                done = await self._do(tables.write, self._batch, lane.owner, _now_s(), group, lane.counts)
                lane.items.update(["failed" if one.is_error else "completed" for one in done])

    async def _leave_rest(self, status: str) -> None:
        """What was not answered is an error each."""
        await self._write()
        code, message = f"batch_{status}", f"the batch was {status} before this request had its answer"
        async for page in self._pages(*self._files):
            ids = [(n, read_line(text).custom_id) for n, text in page]
            rest = [Result(n, not_asked(f"{self._batch}-{n}", one, code, message), True) for n, one in ids]
            await self._write(*rest)


def _now_s() -> int:
    return int(time.time())
