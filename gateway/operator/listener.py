"""What can an operator ask the gateway? /health, /ready, /metrics and /explain, on a listener of their own."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from aiohttp import web
from prometheus_client import CONTENT_TYPE_LATEST

from gateway.commands.explain import explain

if TYPE_CHECKING:
    from gateway.app import Gateway

__all__ = ["admin_app"]


def admin_app(gateway: Gateway) -> web.Application:
    """Never authenticated and never queued, so it listens on loopback unless the config says otherwise."""

    async def health(request: web.Request) -> web.Response:
        return web.json_response({"status": "ok"})

    async def ready(request: web.Request) -> web.Response:
        faults = gateway.not_ready()
        answer: dict[str, object] = {"ready": not faults, "why_not": faults}
        if (state := gateway.state()) is not None:
            answer["state"] = state  # a gateway on its own serves all the same
        return web.json_response(answer, status=503 if faults else 200)

    async def metrics(request: web.Request) -> web.Response:
        gateway.metrics.read_gauges(gateway.pools, gateway.shared.interactions)
        gateway.metrics.read_exchanges(gateway.exchanges)
        # Rendering takes long with many tenants: beside the loop, so that no stream waits for it.
        page = await asyncio.to_thread(gateway.metrics.render)
        return web.Response(body=page, headers={"content-type": CONTENT_TYPE_LATEST})

    async def explanation(request: web.Request) -> web.Response:
        request_id = request.match_info["id"]
        found = explain(gateway.pools, request_id)
        if found is None:
            error = "no decision on this request is remembered: it is not queued or running, and not among the last"
            return web.json_response({"request_id": request_id[:128], "error": error}, status=404)
        return web.json_response(found)

    app = web.Application()
    app.add_routes(
        [
            web.get("/health", health),
            web.get("/ready", ready),
            web.get("/metrics", metrics),
            web.get("/explain/{id}", explanation),
        ]
    )
    return app
