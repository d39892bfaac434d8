"""What does the page show just now? One stream of server-sent events, made once for all who look.

It consists of parts: each is sent when it has changed. What is cheap is looked at once a second, what is summed up over
the last minute once in a span. While nobody looks, nothing runs. The time between two looks grows with what they cost,
so that the page takes about COST_MAX of a core at most, however large the gateway is.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import deque
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from functools import partial
from secrets import token_hex
from typing import Any, Final

from aiohttp import web
from msgspec.json import encode

from gateway.operator.snapshots.snapshot import GatewaySnapshot, SnapshotSource
from gateway.operator.snapshots.spans import SPAN_S, Taken, point
from gateway.operator.snapshots.state_views import backends, queue, tenants
from gateway.telemetry.ends import End
from gateway.telemetry.recent_requests import WINDOW_S
from policies.admission.explanation import OF_OBSTACLE, OF_REFUSAL, OF_WAIT

LOOK_S: Final = 1.0
COST_MAX: Final = 0.005
PAUSE_S_MAX: Final = 10.0
LISTENERS_MAX: Final = 16
STALL_S: Final = 10.0
"""Who takes nothing for so long has gone."""
ENDS_LISTED: Final = 40
QUEUED_LISTED: Final = 20
TENANTS_DRAWN: Final = 24
TASK: Final = "looks for the page"
POINTS_MAX: Final = 120
_SHOWN_AS_IT_IS: Final = (
    "request_id", "pool", "tenant", "app", "model", "outcome", "reason", "backend", "prompt_tokens", "output_tokens",
)  # fmt: skip
"""Of an end."""
WORDS: Final = encode({"waits": OF_WAIT, "obstacles": OF_OBSTACLE, "refusals": OF_REFUSAL})

logger = logging.getLogger("fairgate")


@dataclass(slots=True)
class _Part:
    """One kind of event, as it was last."""

    data: bytes = b""
    serial: int = 0


class Feed:
    """One for each gateway."""

    def __init__(self, source: SnapshotSource) -> None:
        self._source = source
        self._id = token_hex(8)
        self._epoch_s = time.time() - time.monotonic()
        self._parts: dict[str, _Part] = {}
        self._points: deque[tuple[int, bytes]] = deque(maxlen=POINTS_MAX)
        """With the serial number of each."""
        self._pointed_s = 0.0
        """Until when points are there."""
        self._drawn: dict[str, list[str]] = {}
        """By pool, the tenants that are drawn over time."""
        self._spent_s = self._since_s = 0.0
        """CPU seconds of all looks but the first, and since when."""
        self._serial = 0
        self._changed = asyncio.Event()
        self._listeners = 0
        self._task: asyncio.Task[None] | None = None
        self._is_closed = False

    async def events(self, request: web.Request) -> web.StreamResponse:
        """Until the listener goes, or the gateway."""
        if self._listeners >= LISTENERS_MAX or self._is_closed:
            error = "the gateway is shutting down" if self._is_closed else f"{LISTENERS_MAX} pages are open already"
            return web.json_response({"error": error}, status=503, headers={"retry-after": "5"})
        response = web.StreamResponse(
            headers={"content-type": "text/event-stream", "cache-control": "no-store", "x-accel-buffering": "no"}
        )
        self._listeners += 1
        try:
            await response.prepare(request)
            async for events in self._listen():
                async with asyncio.timeout(STALL_S):
                    await response.write(events)
        except (ConnectionError, TimeoutError):
            pass  # it has gone
        finally:
            self._listeners -= 1
            if not self._listeners:
                self._rest()
        return response

    async def close(self, _app: web.Application) -> None:
        """The gateway goes: so do all streams."""
        self._is_closed = True
        self._rest()

    def _rest(self) -> None:
        if self._task is not None:
            self._task.cancel()
            self._task = None
            self._parts.clear()

    async def _listen(self) -> AsyncIterator[bytes]:
        if self._task is None:
            self._task = asyncio.create_task(self._look(), name=TASK)
        task, sent_serial = self._task, 0
        while not task.done():
            changed = self._changed
            events, sent_serial = self._since(sent_serial), self._serial
            if events:
                yield events
            await changed.wait()

    def _since(self, sent_serial: int) -> bytes:
        """What a listener has not got that has got everything up to this."""
        events = [_event(name, part.data) for name, part in self._parts.items() if part.serial > sent_serial]
        if points := [data for serial, data in self._points if serial > sent_serial]:
            events.append(_event("points", b"[" + b",".join(points) + b"]"))
        return b"".join(events)

    async def _look(self) -> None:
        """Again and again, while anybody looks."""
        owed_s = 0.0
        """CPU seconds beyond what the looks may take together; the first one, which sums up a minute, is free."""
        try:
            await self._look_once()
            self._spent_s, self._since_s = 0.0, time.monotonic()
            while True:
                self._notify()
                pause_s = min(max(LOOK_S, owed_s / COST_MAX - SPAN_S), PAUSE_S_MAX)
                await asyncio.sleep(pause_s)
                cost_s = await self._look_once()
                self._spent_s += cost_s
                owed_s = max(0.0, owed_s + cost_s - COST_MAX * pause_s)
        except Exception:
            logger.exception("what the page shows cannot be made")
        finally:
            self._notify()

    def _notify(self) -> None:
        changed, self._changed = self._changed, asyncio.Event()
        changed.set()

    async def _look_once(self) -> float:
        """Returns the CPU seconds that it cost, about."""
        now = time.monotonic()
        is_span = now - self._pointed_s >= SPAN_S
        source, snapshot = self._source, await self._source.snapshot(with_running=is_span)
        begun_s = time.thread_time() - snapshot.cost_s
        self._put("gateway", encode(self._of_gateway(snapshot)))  # first: by it the page knows of a restart
        self._put("words", WORDS)
        self._put("marks", encode([{**mark._asdict(), "at_s": self._epoch_s + mark.at_s} for mark in snapshot.marks]))
        self._put("queue", encode(queue(snapshot, QUEUED_LISTED)))
        self._put("backends", encode(backends(snapshot)))
        self._put("ended", encode([self._ended(end) for end in source.recent.latest(ENDS_LISTED)]))
        if not is_span:
            return time.thread_time() - begun_s
        ends, _ = source.recent.within(now, min(WINDOW_S, now - self._pointed_s))
        taken = [Taken(pool.pool, now, ends, pool.running, pool.waiting) for pool in snapshot.pools]
        sum_up = partial(self._sum_up, now, tenants(snapshot, source.recent, source.config.tenants), taken)
        cost_s = time.thread_time() - begun_s
        summed, points, summing_s = await asyncio.to_thread(sum_up)
        self._put("tenants", summed)
        self._serial += 1
        self._points.extend((self._serial, data) for data in points)
        return cost_s + summing_s

    def _sum_up(
        self, now: float, minute: Callable[[], dict[str, Any]], taken: list[Taken]
    ) -> tuple[bytes, list[bytes], float]:
        """Beside the loop, since it takes milliseconds: the tenants, the new points, the CPU seconds that it took."""
        begun_s = time.thread_time()
        summed = minute()
        self._draw_tenants(summed)
        points = self._points_until(now, taken)
        return encode(summed), points, time.thread_time() - begun_s

    def _put(self, name: str, data: bytes) -> None:
        part = self._parts.setdefault(name, _Part())
        if part.data != data:
            self._serial += 1
            part.data, part.serial = data, self._serial

    def _of_gateway(self, snapshot: GatewaySnapshot) -> dict[str, Any]:
        config = self._source.config
        return {
            "id": self._id,
            "at_s": round(time.time(), 1),
            "not_ready": snapshot.not_ready,
            "state": snapshot.state,
            "workers": config.workers,
            "port": snapshot.port,
            "tls": config.tls is not None,
            "models": {pool.pool: next(iter(pool.models), "") for pool in snapshot.pools},
            "cost_cores": round(self._spent_s / max(1.0, time.monotonic() - self._since_s), 5),
            "counts_usage": config.usage is not None,
        }

    def _ended(self, end: End) -> dict[str, Any]:
        return {
            **{name: getattr(end, name) for name in _SHOWN_AS_IT_IS},
            "ended_at_s": round(self._epoch_s + end.ended_s, 2),
            "queue_s": round(end.queue_s, 4),
            "waited_s": {str(obstacle): round(seconds, 4) for obstacle, seconds in end.waited_s.items()},
            "first_token_s": None if end.first_token_s is None else round(end.first_token_s, 4),
            "total_s": round(end.ended_s - end.dispatched_s + end.queue_s, 4),
        }

    def _draw_tenants(self, summed: dict[str, Any]) -> None:
        """A tenant that is drawn stays drawn while it has any traffic, so that the pictures keep their places."""
        for pool in summed["pools"]:
            received = {one["tenant"]: one["service_received"] for one in pool["tenants"]}
            stay = [name for name in self._drawn.get(pool["pool"], ()) if name in received]
            new = sorted((name for name in received if name not in stay), key=lambda name: -received[name])
            self._drawn[pool["pool"]] = (stay + new)[:TENANTS_DRAWN]

    def _points_until(self, now: float, taken: list[Taken]) -> list[bytes]:
        """Of every whole span since the last one that is known, or of the last minute."""
        if self._pointed_s < now - WINDOW_S:
            self._pointed_s = now - WINDOW_S
            self._points.clear()
        found = []
        while self._pointed_s + SPAN_S <= now:
            since_s, self._pointed_s = self._pointed_s, self._pointed_s + SPAN_S
            pools = [
                {"pool": each.pool, **point(each, since_s, self._pointed_s, self._drawn.get(each.pool, ()))}
                for each in taken
            ]
            found.append(encode({"at_s": round(self._epoch_s + self._pointed_s, 1), "pools": pools}))
        return found


def _event(name: str, data: bytes) -> bytes:
    return b"event: " + name.encode() + b"\ndata: " + data + b"\n\n"
