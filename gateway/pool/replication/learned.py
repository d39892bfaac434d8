"""Learned state shared by all gateways of a pool: one snapshot in the store that each gateway merges into.

For every population, the snapshot with the most observations wins. A new gateway starts from the snapshot.
"""

from __future__ import annotations

import asyncio
import logging

import msgspec

from gateway.storage.store import Store
from gateway.storage.store_errors import StoreUnavailable
from policies.admission import takeover
from policies.admission.engine import AdmissionEngine

logger = logging.getLogger("fairgate")

INTERVAL_S = 60.0
BYTES_MAX = 16 * 1024 * 1024


class LearnedSync:
    """A synchroniser of one engine with the store, one `turn` after another."""

    def __init__(self, store: Store, pool: str, engine: AdmissionEngine) -> None:
        self._store = store
        self.pool = pool
        self._engine = engine
        self._written = b""

    async def turn(self) -> None:
        try:
            await self._adopt()
            await self._write()
        except StoreUnavailable:
            pass  # the store logs the error; local state is kept
        await asyncio.sleep(INTERVAL_S)

    async def _adopt(self) -> None:
        content = await self._store.learned_state(self.pool)
        if content is None or content == self._written:
            return
        try:
            takeover.adopt(takeover.read(self._engine, msgspec.json.decode(content)))
        except (ValueError, RecursionError) as error:
            logger.warning(
                "pool %s: the shared learned state cannot be read (%s), and is replaced",
                self.pool,
                error,
            )

    async def _write(self) -> None:
        content = msgspec.json.encode(takeover.snapshot(self._engine))
        if content != self._written and len(content) <= BYTES_MAX:
            await self._store.learn(self.pool, content)
            self._written = content
