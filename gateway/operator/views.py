"""What stands where just now? /health and /ready, /state and /config, as JSON."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from aiohttp import web

from gateway.operator.effective import effective
from gateway.operator.snapshots.snapshot import SnapshotSource
from gateway.operator.snapshots.state_document import state


async def health(request: web.Request) -> web.Response:
    """Is there a process at all?"""
    return web.json_response({"status": "ok"})


def ready(why_not: Sequence[str], state: str | None, faults: Sequence[str]) -> web.Response:
    """Should traffic come? A gateway whose state is not shared, or that has faults, serves all the same."""
    answer: dict[str, object] = {"ready": not why_not, "why_not": why_not}
    if state is not None:
        answer["state"] = state
    if faults:
        answer["faults"] = faults
    return web.json_response(answer, status=503 if why_not else 200)


def views(source: SnapshotSource) -> list[web.RouteDef]:
    """Never queued; each answer is bounded, and says how much it leaves out."""

    async def of_state(request: web.Request) -> web.Response:
        snapshot = await source.snapshot(with_running=True)
        return web.json_response(await asyncio.to_thread(state(snapshot, source.recent, source.config)))

    async def of_config(request: web.Request) -> web.Response:
        # Thousands of tenants take long: beside the loop, so that no stream waits for it.
        return web.json_response(await asyncio.to_thread(effective, source.config))

    return [web.get("/state", of_state), web.get("/config", of_config)]
