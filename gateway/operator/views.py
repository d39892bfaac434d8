"""Routes that show the current state as JSON: /health, /ready and /state."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from math import inf
from secrets import token_hex
from typing import Final

from aiohttp import web
from msgspec.json import encode

from gateway.operator.snapshots.snapshot import SnapshotSource
from gateway.operator.snapshots.state_document import state

SHARED_S: Final = 1.0
"""Seconds for which pages share a document."""
SHARED_S_MAX: Final = 10.0
COST_MAX: Final = 0.01
"""Part of a core that documents for pages take, up to documents that cost COST_MAX * SHARED_S_MAX seconds each."""


async def health(request: web.Request) -> web.Response:
    """Answer that the process runs."""
    return web.json_response({"status": "ok"})


def ready(why_not: Sequence[str], state: str | None, faults: Sequence[str]) -> web.Response:
    """Answer whether traffic should come. A gateway with faults, or whose state is not shared, is ready nonetheless."""
    answer: dict[str, object] = {"ready": not why_not, "why_not": why_not}
    if state is not None:
        answer["state"] = state
    if faults:
        answer["faults"] = faults
    return web.json_response(answer, status=503 if why_not else 200)


class StateView:
    """The handler of /state, which makes a new document for each request. Requests with `?shared`, as pages send them,
    share one document for `SHARED_S` to `SHARED_S_MAX` seconds."""

    def __init__(self, source: SnapshotSource) -> None:
        self._source = source
        self._id = token_hex(8)
        self._turn = asyncio.Lock()
        self._content = b""
        self._made_s = -inf
        self._cost_s = 0.0
        """CPU seconds that the document took."""

    async def answer(self, request: web.Request) -> web.Response:
        async with self._turn:
            shared_s = max(SHARED_S, min(self._cost_s / COST_MAX, SHARED_S_MAX)) if "shared" in request.query else 0.0
            if time.monotonic() - self._made_s >= shared_s:
                await self._make()
        return web.Response(body=self._content, content_type="application/json")

    async def _make(self) -> None:
        source, config = self._source, self._source.config
        snapshot = await source.snapshot()
        document = state(snapshot, source.recent, config)
        of_gateway = {
            "id": self._id,
            "workers": config.workers,
            "port": snapshot.port,
            "tls": config.tls is not None,
            "counts_usage": config.usage is not None,
        }

        def made() -> tuple[bytes, float]:
            begun_s = time.thread_time()
            return encode(of_gateway | document()), time.thread_time() - begun_s

        self._content, self._cost_s = await asyncio.to_thread(made)
        self._made_s = time.monotonic()
