"""What can an operator ask the gateway? /health, /ready, /metrics, /explain, the views of the present and the page made
of them, usage and keys, on a listener of their own.
"""

from __future__ import annotations

import asyncio
from hmac import compare_digest
from ipaddress import ip_address
from typing import TYPE_CHECKING

from aiohttp import web
from aiohttp.typedefs import Handler, Middleware
from prometheus_client import CONTENT_TYPE_LATEST

from gateway.commands.explain import explain
from gateway.config.fields import is_loopback
from gateway.operator.changing import changing_routes
from gateway.operator.feed import Feed
from gateway.operator.keys import key_routes
from gateway.operator.page.files import PAGE_PATHS, page
from gateway.operator.present import tenants
from gateway.operator.usage import usage_routes
from gateway.operator.views import views

if TYPE_CHECKING:
    from gateway.app import Gateway

__all__ = ["admin_app"]


OPEN = frozenset(("/health", "/ready")) | PAGE_PATHS
"""Probes have no token, and learn nothing that a request would not show. The page itself asks whoever opens it."""


def admin_app(gateway: Gateway) -> web.Application:
    """Never queued. What it asks for is `admin_token`; without one it belongs on loopback, and answers there only those
    who call it by an address of this machine.
    """

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
        gateway.metrics.read_news(gateway.news)
        summed_up = tenants(gateway.pools, gateway.lately)

        def rendered() -> bytes:
            gateway.metrics.read_tenants(summed_up())
            return gateway.metrics.render()

        # Rendering takes long with many tenants: beside the loop, so that no stream waits for it.
        page = await asyncio.to_thread(rendered)
        return web.Response(body=page, headers={"content-type": CONTENT_TYPE_LATEST})

    async def explanation(request: web.Request) -> web.Response:
        request_id = request.match_info["id"]
        found = explain(gateway.pools, request_id)
        if found is None:
            error = "no decision on this request is remembered: it is not queued or running, and not among the last"
            return web.json_response({"request_id": request_id[:128], "error": error}, status=404)
        return web.json_response(found)

    feed = Feed(gateway)
    app = web.Application(middlewares=[_asks_for_token(gateway)])
    app.add_routes(
        [
            web.get("/health", health),
            web.get("/ready", ready),
            web.get("/metrics", metrics),
            web.get("/explain/{id}", explanation),
            web.get("/events", feed.events),
            *changing_routes(gateway),
            *key_routes(gateway),
            *usage_routes(gateway),
            *views(gateway),
            *page(),
        ]
    )
    app.on_shutdown.append(feed.close)
    return app


def _asks_for_token(gateway: Gateway) -> Middleware:
    """Lets pass who sends the token that is configured now, and anybody to what is open."""

    @web.middleware
    async def asks(request: web.Request, handler: Handler) -> web.StreamResponse:
        token = gateway.config.admin_token
        if token is None and _is_strangers(request):
            error = "call it by an IP address or localhost: without an admin_token, no other name is answered to here"
            return web.json_response({"error": error}, status=421)
        if token is None or request.path in OPEN:
            return await handler(request)
        scheme, _, given = request.headers.get("authorization", "").partition(" ")
        sent = given.strip().encode("utf-8", "surrogateescape")
        if scheme.lower() == "bearer" and compare_digest(sent, token.get_secret_value().encode()):
            return await handler(request)
        error = "send the config's admin_token as 'Authorization: Bearer TOKEN'; `fairgate explain` does with -c FILE"
        return web.json_response({"error": error}, status=401, headers={"www-authenticate": "Bearer"})

    return asks


def _is_strangers(request: web.Request) -> bool:
    """Has a web page made this request? A browser takes any name of its author's for this machine, if the name server
    says so (DNS rebinding), and lets the page read the answer. Such a page cannot choose an address as its name.
    """
    own = request.transport.get_extra_info("sockname") if request.transport is not None else None
    name = request.url.host or ""
    if not own or not is_loopback(own[0]) or is_loopback(name) or name.endswith(".localhost"):
        return False
    try:
        ip_address(name)
    except ValueError:
        return True
    return False
