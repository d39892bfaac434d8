"""Routes that change a running gateway: POST /reload, /drain and /resume."""

from __future__ import annotations

from dataclasses import asdict
from functools import partial
from typing import Any

from aiohttp import web

from gateway.operator.operated import OperatedGateway


def changing_routes(gateway: OperatedGateway) -> list[web.RouteDef]:
    """Return the changing routes of the admin listener, whose guard checks the caller (`gateway.operator.guard`)."""

    async def reload(request: web.Request) -> web.Response:
        reloaded = await gateway.reloading.run()
        return web.json_response(asdict(reloaded), status=409 if reloaded.outcome == "refused" else 200)

    return [
        web.post("/reload", reload),
        web.post("/drain/{backend:.+}", partial(_drained, gateway, True)),
        web.post("/resume/{backend:.+}", partial(_drained, gateway, False)),
    ]


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
