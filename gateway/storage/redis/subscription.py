"""Who carries news by Redis? One channel for each pool, subscribed on a connection of its own."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Final

from redis.asyncio.connection import AbstractConnection

from gateway.storage.redis.redis_connection import CONNECT_S, RedisConnection

SILENT_S: Final = 5.0
"""A connection on which nothing came for so long is asked whether it lives, and given up after as long again."""


async def subscribe(lane: RedisConnection, channel: str, received: Callable[[bytes], None]) -> None:
    """What is published there, until cancelled. Raises StoreError when the connection ends."""
    connection = lane.beside()
    try:
        await _subscribe(connection, channel, received)
    except Exception as error:  # where an answer is garbage, redis-py raises whatever comes of it
        raise lane.failure(error) from error
    finally:
        await connection.disconnect(nowait=True)


async def _subscribe(connection: AbstractConnection, channel: str, received: Callable[[bytes], None]) -> None:
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
            received(content)
