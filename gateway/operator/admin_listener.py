"""What can an operator ask the gateway? /health, /ready, /metrics, /explain, the views of the current state and the
page that shows them, usage, and changes by POST /reload, /drain and /resume, all on a listener of their own.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Mapping, Sequence
from contextlib import closing
from dataclasses import asdict
from datetime import UTC, datetime
from functools import partial
from math import inf
from secrets import token_hex
from typing import Any, Final

from aiohttp import web
from aiohttp.http_exceptions import HttpProcessingError
from msgspec.json import encode
from prometheus_client import CONTENT_TYPE_LATEST, generate_latest

from gateway.operator.explain import explain
from gateway.operator.guard import guard
from gateway.operator.operated import OperatedGateway
from gateway.operator.page.files import page
from gateway.operator.pool_metrics import PoolGauges
from gateway.operator.snapshots.recent_sums import sums_of_pools
from gateway.operator.snapshots.snapshot import SnapshotSource, snapshot_of
from gateway.operator.snapshots.state_document import state
from gateway.storage.store_errors import StoreError
from gateway.usage.database import Database
from gateway.usage.usage_report import InvalidUsageQuery, UsageQuery, read

SHARED_S: Final = 1.0
"""Seconds for which pages share a document."""
SHARED_S_MAX: Final = 10.0
COST_MAX: Final = 0.01
"""Part of a core that documents for pages take, up to documents that cost COST_MAX * SHARED_S_MAX seconds each."""


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
    """Return the app of the admin listener of one process. Requests to the app are never queued.

    The guard asks for `admin_token`. Without a token the listener belongs on loopback, and there it answers only
    requests whose Host is an address of this machine.
    """
    app = web.Application(middlewares=[guard(lambda: gateway.config)])
    app.add_routes([*_routes(gateway), *page()])
    return app


def worker_app(gateway: OperatedGateway) -> web.Application:
    """Return the app by which a worker answers its hub, which asks all workers (`gateway.operator.of_workers`)."""
    app = web.Application()
    app.add_routes(_routes(gateway))
    return app


def _routes(gateway: OperatedGateway) -> list[web.RouteDef]:
    """Return the routes by which one process answers for itself."""
    gauges, reading_usage = PoolGauges(gateway.metrics), asyncio.Lock()

    async def readiness(request: web.Request) -> web.Response:
        return ready(gateway.not_ready(), gateway.store_state(), gateway.faults())

    async def metrics(request: web.Request) -> web.Response:
        gauges.read(gateway)
        sums, _ = sums_of_pools(snapshot_of(gateway), gateway.recent)

        def rendered() -> bytes:
            gauges.read_tenants(sums())
            return generate_latest(gateway.metrics.registry)

        # Rendering takes long with many tenants, so it runs in a thread and delays no stream.
        page = await asyncio.to_thread(rendered)
        return web.Response(body=page, headers={"content-type": CONTENT_TYPE_LATEST})

    async def explanation(request: web.Request) -> web.Response:
        request_id = request.match_info["id"]
        found = explain(gateway.pools, gateway.recent, request_id)
        if found is None:
            error = "no decision on this request is remembered: it does not wait, and is not among the last"
            return web.json_response({"request_id": request_id[:128], "error": error}, status=404)
        return web.json_response(found)

    async def reload(request: web.Request) -> web.Response:
        reloaded = await gateway.reloading.run()
        return web.json_response(asdict(reloaded), status=409 if reloaded.outcome == "refused" else 200)

    async def usage(request: web.Request) -> web.Response:
        async with reading_usage:
            return await asyncio.to_thread(_usage, gateway, request.query)

    return [
        web.get("/health", health),
        web.get("/ready", readiness),
        web.get("/metrics", metrics),
        web.get("/explain/{id}", explanation),
        web.get("/state", StateView(gateway.replicas or gateway).answer),
        web.post("/reload", reload),
        web.post("/drain/{backend:.+}", partial(_drained, gateway, True)),
        web.post("/resume/{backend:.+}", partial(_drained, gateway, False)),
        web.get("/usage", usage),
    ]


def _usage(gateway: OperatedGateway, asked: Mapping[str, str]) -> web.Response:
    """Answer as `fairgate usage --json`, by a connection of its own, so that a long answer does not delay writes."""
    config = gateway.config.usage
    if config is None:
        return web.json_response({"error": "the config has no `usage:`, so nothing is counted"}, status=404)
    names = [name for name in asked.get("by", "tenant").split(",") if name]
    try:
        query = UsageQuery(asked.get("since", "24h"), asked.get("until"), names, datetime.now(UTC))
        with closing(Database(config, makes=False)) as database:
            report = read(database, query, config.prices, around=gateway.config.around)
    except (InvalidUsageQuery, StoreError) as error:
        return web.json_response({"error": str(error)}, status=503 if isinstance(error, StoreError) else 400)
    return web.Response(text=report.as_json(), content_type="application/json")


async def _drained(gateway: OperatedGateway, drained: bool, request: web.Request) -> web.Response:
    """Drain a backend, or return it to service, and answer with its state."""
    name = request.match_info["backend"]
    for pool in gateway.pools:
        backend = pool.backends.get(name)
        if backend is None or backend.leaving:
            continue
        pool.drain(backend, drained)
        engine = pool.dispatcher.engine
        answer: dict[str, Any] = {
            "backend": name,
            "pool": pool.name,
            "drained": backend.drained,
            "in_service": backend.in_service,
            "running": len(engine.backends[name].leases),
            "waiting": engine.queued,
        }
        if not pool.is_healthy():
            answer["warning"] = f"no backend of pool {pool.name} is in service: what comes is refused, what waits waits"
        return web.json_response(answer)
    known = sorted(name for pool in gateway.pools for name in pool.backends)
    error = f"there is no backend {name[:200]!r}; there are: {', '.join(known)}"
    return web.json_response({"error": error}, status=404)


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

        def encoded() -> tuple[bytes, float]:
            begun_s = time.thread_time()
            return encode(of_gateway | document()), time.thread_time() - begun_s

        self._content, self._cost_s = await asyncio.to_thread(encoded)
        self._made_s = time.monotonic()
