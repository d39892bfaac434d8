"""What does a tenant see of itself? Answers /fairgate/me and its page, for all processes of the gateway together.

The service that each tenant received and was due is summed up once for all clients that ask.
"""

from __future__ import annotations

import asyncio
import time
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import Final

from gateway.operator.operated import OperatedGateway
from gateway.operator.page.files import FOLDER, contents
from gateway.operator.self_service.own_document import Data, RecentService, own_document
from gateway.operator.snapshots.recent_sums import sums_of_pools
from gateway.operator.snapshots.snapshot import SnapshotSource
from gateway.proxy.background_handler import BackgroundHandler
from gateway.proxy.pipeline import Pipeline
from gateway.proxy.request_context import RequestContext
from gateway.request.routes import RouteKind
from gateway.storage.store_errors import StoreError
from gateway.usage.counts import OTHERS
from gateway.usage.thread import CLOSE_S, DatabaseThread
from gateway.usage.usage_report import read_tenant_usage

PAGE: Final = "/fairgate/me/page"
_OWN: Final = Path(__file__).parent / "page"
_FILES: Final = {PAGE: _OWN / "me.html", f"{PAGE}/me.js": _OWN / "me.js"} | {
    f"{PAGE}/{name}": FOLDER / name
    for name in ("page.css", "stream.js", "words.js", "requests.js", "usage.js", "icon.svg")
}
"""Files of the page of /fairgate/me, some of them the operator's. The files hold no data: the page asks for the key."""
RECENTLY_S: Final = 300.0
AGAIN_S: Final = 5.0
"""Seconds after which the sums of all tenants are computed anew."""


class SelfService:
    """The answers of one process to tenants that ask about their own standing. Call `close` at the end."""

    def __init__(self, gateway: OperatedGateway, pipeline: Pipeline) -> None:
        self._gateway = gateway
        self._source: SnapshotSource = gateway.replicas or gateway
        self._late = BackgroundHandler(pipeline, self._answer)
        self._turn = asyncio.Lock()
        self._recently: RecentService
        self._summed_s = float("-inf")
        usage = gateway.config.usage
        self._database = DatabaseThread(usage) if usage is not None else None
        pipeline.files = {
            path: ([(name.encode(), value.encode()) for name, value in fields.items()], body)
            for path, (fields, body) in contents(_FILES).items()
        }
        pipeline.late[RouteKind.ME] = self._late.begin

    async def close(self) -> None:
        await self._late.tasks.stop()
        if self._database is not None:
            await self._database.close(CLOSE_S)

    async def _answer(self, context: RequestContext) -> Data:
        principal, gateway = context.principal, self._gateway
        # In turn, so that the operator, who asks these processes too, waits for one of these answers at most.
        async with self._turn:
            if time.monotonic() - self._summed_s >= AGAIN_S:
                self._recently = await self._sum_up()
                self._summed_s = time.monotonic()
        usage = await self._usage(principal.tenant) or (None, None)
        minutes = self._source.recent.minutes_of(principal.tenant)
        return own_document(principal, gateway.pools, self._recently, minutes, *usage)

    async def _usage(self, tenant: str) -> tuple[Data, list[Data]] | None:
        usage = self._gateway.config.usage
        if self._database is None or usage is None or tenant == OTHERS:  # OTHERS sums up many tenants
            return None
        with suppress(StoreError):
            return await self._database.do(read_tenant_usage, tenant, usage.prices, datetime.now(UTC))
        return None

    async def _sum_up(self) -> RecentService:
        """Return what all tenants received lately."""
        snapshot = await self._source.snapshot()
        sums, window_s = sums_of_pools(snapshot, self._source.recent, RECENTLY_S)
        return RecentService(snapshot.pools, window_s, await asyncio.to_thread(sums))
