"""What can an operator ask the gateway? /health, /ready and /metrics, on a listener of their own."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from aiohttp import web
from prometheus_client import CONTENT_TYPE_LATEST

if TYPE_CHECKING:
    from gateway.app import Gateway

__all__ = ["admin_app"]


def admin_app(gateway: Gateway) -> web.Application:
    """Never authenticated and never queued, so it listens on loopback unless the config says otherwise."""

    async def health(request: web.Request) -> web.Response:
        return web.json_response({"status": "ok"})

    async def ready(request: web.Request) -> web.Response:
        faults = gateway.not_ready()
        return web.json_response({"ready": not faults, "why_not": faults}, status=503 if faults else 200)

    async def metrics(request: web.Request) -> web.Response:
        gateway.metrics.read_gauges(gateway.pools)
        # Rendering takes long with many tenants: beside the loop, so that no stream waits for it.
        page = await asyncio.to_thread(gateway.metrics.render)
        return web.Response(body=page, headers={"content-type": CONTENT_TYPE_LATEST})

    app = web.Application()
    app.add_routes([web.get("/health", health), web.get("/ready", ready), web.get("/metrics", metrics)])
    return app
