"""Who used how much? /usage of the admin listener, with the answer of `fairgate usage --json`."""

from __future__ import annotations

import asyncio
from contextlib import closing
from datetime import UTC, datetime

from aiohttp import web

from gateway.operator.operated import OperatedGateway
from gateway.storage.store_errors import StoreError
from gateway.usage.database import Database
from gateway.usage.usage_report import InvalidUsageQuery, UsageQuery, read


def usage_routes(gateway: OperatedGateway) -> list[web.RouteDef]:
    one_at_a_time = asyncio.Lock()

    async def usage(request: web.Request) -> web.Response:
        config = gateway.config.usage
        if config is None:
            return web.json_response({"error": "the config has no `usage:`, so nothing is counted"}, status=404)
        asked = request.query
        names = [name for name in asked.get("by", "tenant").split(",") if name]
        try:
            query = UsageQuery(asked.get("since", "24h"), asked.get("until"), names, datetime.now(UTC))
            async with one_at_a_time:
                answer = await asyncio.to_thread(answered, query)
        except InvalidUsageQuery as error:
            return web.json_response({"error": str(error)}, status=400)
        except StoreError as error:
            return web.json_response({"error": str(error)}, status=503)
        return web.Response(text=answer, content_type="application/json")

    def answered(query: UsageQuery) -> str:
        """Read the report by a connection of its own, so that a long answer does not delay writes."""
        config = gateway.config.usage
        assert config is not None
        with closing(Database(config, makes=False)) as database:
            return read(database, query, config.prices, around=gateway.config.around).as_json()

    return [web.get("/usage", usage)]
