"""What can an operator ask the gateway? /health, /ready, /metrics, /explain, the views of the current state and the
page that shows them, and usage, all on a listener of their own.
"""

from __future__ import annotations

import asyncio
import logging

from aiohttp import web
from aiohttp.http_exceptions import HttpProcessingError
from prometheus_client import CONTENT_TYPE_LATEST

from gateway.operator.actions import changing_routes
from gateway.operator.explain import explain
from gateway.operator.guard import guard
from gateway.operator.operated import OperatedGateway
from gateway.operator.page.files import page
from gateway.operator.pool_metrics import PoolGauges
from gateway.operator.snapshots.snapshot import encoded, snapshot_of
from gateway.operator.snapshots.state_document import state
from gateway.operator.usage_routes import usage_routes
from gateway.operator.views import StateView, health, ready


class _DropClientErrors(logging.Filter):
    """A log filter that drops errors of the client: a request that is not HTTP, or that breaks off."""

    def filter(self, record: logging.LogRecord) -> bool:
        error = record.exc_info[1] if record.exc_info else None
        return not isinstance(error, HttpProcessingError | web.RequestPayloadError | ConnectionError)


def admin_runner(app: web.Application) -> web.AppRunner:
    """Return a runner that serves an app on the admin listener."""
    logger = logging.getLogger("fairgate.admin")
    logger.filters = [_DropClientErrors()]
    return web.AppRunner(app, access_log=None, logger=logger)


def admin_app(gateway: OperatedGateway) -> web.Application:
    """Return the app of the admin listener of one process. Its requests are never queued.

    The guard asks for `admin_token`. Without a token the listener belongs on loopback, and there it answers only
    requests whose Host is an address of this machine.
    """
    app = web.Application(middlewares=[guard(lambda: gateway.config)])
    app.add_routes([*_routes(gateway), web.get("/state", StateView(gateway.replicas or gateway).answer), *page()])
    return app


def worker_app(gateway: OperatedGateway) -> web.Application:
    """Return the app by which a worker answers its hub, which asks all workers (`gateway.operator.of_workers`)."""

    async def snapshot(request: web.Request) -> web.Response:
        """Return a snapshot (of all replicas, if there are several), and the ended requests after the first `ends`,
        which the hub already has."""
        source = gateway.replicas or gateway
        found = await source.snapshot()
        recent = source.recent
        return web.Response(body=encoded(found, recent.latest_after(int(request.query["ends"])), recent.count))

    app = web.Application()
    app.add_routes([*_routes(gateway), web.get("/snapshot", snapshot)])
    return app


def _routes(gateway: OperatedGateway) -> list[web.RouteDef]:
    """Return the routes by which one process answers for itself."""
    gauges = PoolGauges(gateway.metrics)

    async def readiness(request: web.Request) -> web.Response:
        return ready(gateway.not_ready(), gateway.state(), gateway.faults())

    async def metrics(request: web.Request) -> web.Response:
        gauges.read(gateway)
        summed_up = state(snapshot_of(gateway), gateway.recent)

        def rendered() -> bytes:
            gauges.read_tenants(summed_up())
            return gateway.metrics.render()

        # Rendering takes long with many tenants, so it runs in a thread and delays no stream.
        page = await asyncio.to_thread(rendered)
        return web.Response(body=page, headers={"content-type": CONTENT_TYPE_LATEST})

    async def explanation(request: web.Request) -> web.Response:
        request_id = request.match_info["id"]
        found = explain(gateway.pools, gateway.recent, request_id)
        if found is None:
            error = "no decision on this request is remembered: it is not queued or running, and not among the last"
            return web.json_response({"request_id": request_id[:128], "error": error}, status=404)
        return web.json_response(found)

    return [
        web.get("/health", health),
        web.get("/ready", readiness),
        web.get("/metrics", metrics),
        web.get("/explain/{id}", explanation),
        *changing_routes(gateway),
        *usage_routes(gateway),
    ]
