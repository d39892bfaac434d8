"""The stream of server-sent events that the page shows, made once for all listeners.

Each event is the whole document of the state, so a page has all of it at once when it is opened. Nothing runs without
listeners. The pause between two events grows with their cost, so that the page takes about COST_MAX of a core. The
pause is PAUSE_S_MAX at most, so events that cost more than COST_MAX * PAUSE_S_MAX seconds take more.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator
from secrets import token_hex
from typing import Final

from aiohttp import web
from msgspec.json import encode

from gateway.operator.snapshots.snapshot import SnapshotSource
from gateway.operator.snapshots.state_document import state

LOOK_S: Final = 1.0
COST_MAX: Final = 0.01
PAUSE_S_MAX: Final = 10.0
LISTENERS_MAX: Final = 16
STALL_S: Final = 10.0
"""Seconds after which a listener that reads nothing is dropped."""
TASK: Final = "looks for the page"

logger = logging.getLogger("fairgate")


class Feed:
    """The stream of one gateway."""

    def __init__(self, source: SnapshotSource) -> None:
        self._source = source
        self._id = token_hex(8)
        self._event = b""
        """Latest event; empty without listeners."""
        self._spent_s = self._since_s = 0.0
        """CPU seconds of all events since `_since_s`."""
        self._changed = asyncio.Event()
        self._listeners = 0
        self._task: asyncio.Task[None] | None = None
        self._is_closed = False

    async def events(self, request: web.Request) -> web.StreamResponse:
        """Send events until the listener or the gateway goes."""
        if self._listeners >= LISTENERS_MAX or self._is_closed:
            error = "the gateway is shutting down" if self._is_closed else f"{LISTENERS_MAX} pages are open already"
            return web.json_response({"error": error}, status=503, headers={"retry-after": "5"})
        response = web.StreamResponse(
            headers={"content-type": "text/event-stream", "cache-control": "no-store", "x-accel-buffering": "no"}
        )
        self._listeners += 1
        try:
            await response.prepare(request)
            async for event in self._listen():
                async with asyncio.timeout(STALL_S):
                    await response.write(event)
        except (ConnectionError, TimeoutError):
            pass  # the listener has gone
        finally:
            self._listeners -= 1
            if not self._listeners:
                self._rest()
        return response

    async def close(self, _app: web.Application) -> None:
        """End all streams, since the gateway shuts down."""
        self._is_closed = True
        self._rest()

    def _rest(self) -> None:
        if self._task is not None:
            self._task.cancel()
            self._task, self._event = None, b""

    async def _listen(self) -> AsyncIterator[bytes]:
        if self._task is None:
            self._spent_s, self._since_s = 0.0, time.monotonic()
            self._task = asyncio.create_task(self._look(), name=TASK)
        task, sent = self._task, b""
        while not task.done():
            changed = self._changed
            if self._event is not sent:
                yield (sent := self._event)
            await changed.wait()

    async def _look(self) -> None:
        """Make one event after another until it is cancelled."""
        try:
            while True:
                cost_s = await self._look_once()
                self._spent_s += cost_s
                self._notify()
                await asyncio.sleep(min(max(LOOK_S, cost_s / COST_MAX), PAUSE_S_MAX))
        except Exception:  # The listeners see the end of their stream, and connect anew.
            logger.exception("what the page shows cannot be made")
        finally:
            self._notify()

    def _notify(self) -> None:
        changed, self._changed = self._changed, asyncio.Event()
        changed.set()

    async def _look_once(self) -> float:
        """Make the next event and return its approximate cost in CPU seconds."""
        source, config = self._source, self._source.config
        snapshot = await source.snapshot(with_running=True)
        begun_s = time.thread_time()
        document = state(snapshot, source.recent, config)
        of_page = {
            "id": self._id,
            "workers": config.workers,
            "port": snapshot.port,
            "tls": config.tls is not None,
            "counts_usage": config.usage is not None,
            "cost_cores": round(self._spent_s / max(1.0, time.monotonic() - self._since_s), 5),
        }
        cost_s = snapshot.cost_s + time.thread_time() - begun_s

        def made() -> tuple[bytes, float]:
            begun_s = time.thread_time()
            return b"event: state\ndata: " + encode(of_page | document()) + b"\n\n", time.thread_time() - begun_s

        self._event, made_s = await asyncio.to_thread(made)
        return cost_s + made_s
