"""Who carries the news of prompts that were sent? One channel of Redis for each pool: said once, kept by nobody.

Each message goes to all gateways that listen; one that does not, misses it. A connection that fails is made again
after a second. What is lost meanwhile is no fault of the shared state, so it is no reason to be alone.
"""

from __future__ import annotations

import asyncio
import logging
from typing import Final

import msgspec
from redis.asyncio.connection import AbstractConnection

from gateway.pool.dispatcher import Dispatcher
from gateway.redis.connection import CONNECT_S, Lane
from gateway.redis.errors import StoreError, StoreRefused
from gateway.redis.store import RETRY_S, Store, pool_key
from policies.replicas.messages import News
from policies.replicas.prefixes import SharedPrefixes
from policies.replicas.schedule import INTERVAL_S

__all__ = ["NewsChannel"]

logger = logging.getLogger("fairgate")

_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(News).decode
SILENT_S: Final = 5.0
"""A connection on which nothing came for so long is asked whether it lives, and given up after as long again."""


class NewsChannel:
    """Tells the other gateways of a pool what this one sent, and hears them, until cancelled."""

    def __init__(self, store: Store, pool: str, dispatcher: Dispatcher) -> None:
        self.pool = pool
        self.told = self.heard = self.ignored = 0
        """Messages. What is told is heard as well."""
        engine = dispatcher.engine
        self._shared = SharedPrefixes(engine.policy, engine.backends, name=store.replica)
        self._store = store
        self._wakes = asyncio.Event()
        self._is_refused = False
        dispatcher.listeners.append(self._look)

    async def run(self) -> None:
        lane = self._store.lane()
        channel = pool_key(self.pool, f"news:{lane.database}")
        try:
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(self._tell(lane, channel))
                tasks.create_task(self._listen(lane, channel))
        finally:
            await lane.close()

    def _look(self) -> None:
        if self._shared.has_news:
            self._wakes.set()

    async def _tell(self, lane: Lane, channel: str) -> None:
        while True:
            await self._wakes.wait()
            self._wakes.clear()
            try:
                await lane.ask("PUBLISH", channel, _encode(self._shared.tell()))
                self.told += 1
            except StoreError as error:
                self._note(error)
            await asyncio.sleep(INTERVAL_S)

    async def _listen(self, lane: Lane, channel: str) -> None:
        while True:
            connection = lane.beside()
            try:
                await self._hear(connection, channel)
            except Exception as error:  # where an answer is garbage, redis-py raises whatever comes of it
                self._note(lane.failure(error))
            finally:
                await connection.disconnect(nowait=True)
            await asyncio.sleep(RETRY_S)

    async def _hear(self, connection: AbstractConnection, channel: str) -> None:
        async with asyncio.timeout(CONNECT_S):
            await connection.connect()  # type: ignore[no-untyped-call]
            await connection.send_command("SUBSCRIBE", channel)
        is_asked = False
        while True:
            try:
                async with asyncio.timeout(SILENT_S):
                    kind, *_, content = await connection.read_response(disconnect_on_error=False)
                is_asked = False
            except TimeoutError:
                if is_asked:
                    raise
                await connection.send_command("SUBSCRIBE", channel)
                is_asked = True
                continue
            if kind == b"message":
                self._take(content)

    def _take(self, content: bytes) -> None:
        try:
            is_heard = self._shared.hear(_decode(content))
        except msgspec.DecodeError:
            is_heard = False
        if is_heard:
            self.heard += 1
            return
        if not self.ignored:
            logger.warning("pool %s: news that make no sense are ignored; are all gateways of one version?", self.pool)
        self.ignored += 1

    def _note(self, error: StoreError) -> None:
        """What passes by itself is said by the store."""
        if isinstance(error, StoreRefused) and not self._is_refused:
            self._is_refused = True
            logger.warning("pool %s: what one gateway sends is not known at the others: %s", self.pool, error)
