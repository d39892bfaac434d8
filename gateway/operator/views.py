"""Routes that show the current state as JSON: /health and /ready, /state and /config."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from aiohttp import web

from gateway.operator.effective import effective
from gateway.operator.snapshots.snapshot import SnapshotSource
from gateway.operator.snapshots.state_document import state


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


def views(source: SnapshotSource) -> list[web.RouteDef]:
    """Return the routes of /state and /config. Each answer is bounded and says how much it leaves out."""

    async def of_state(request: web.Request) -> web.Response:
        snapshot = await source.snapshot(with_running=True)
        return web.json_response(await asyncio.to_thread(state(snapshot, source.recent, source.config)))

    async def of_config(request: web.Request) -> web.Response:
        # Thousands of tenants take long, so this runs in a thread and delays no stream.
        return web.json_response(await asyncio.to_thread(effective, source.config))

    return [web.get("/state", of_state), web.get("/config", of_config)]
