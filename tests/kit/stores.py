"""A Redis as a gateway opens it, and one that is only said to be there."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, closing, suppress
from typing import Any

from gateway.storage.redis.redis_store import RedisStore
from gateway.storage.store import PoolIdentity
from tests.redis_server import RedisServer

POOL = PoolIdentity("pool", "fairserve", ("http://a:1", "http://b:1"))


@asynccontextmanager
async def opened(url: str, *pools: PoolIdentity, **options: Any) -> AsyncIterator[RedisStore]:
    store = RedisStore(url, pools or (POOL,), **options)
    try:
        await store.open()
        yield store
    finally:
        await store.close()


def url(redis: RedisServer, user: str = "", scheme: str = "redis") -> str:
    return f"{scheme}://{user}127.0.0.1:{redis.port}/0"


@asynccontextmanager
async def scripted(version: str) -> AsyncIterator[str]:
    """A server that knows INFO, since none so old can be installed."""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with suppress(asyncio.IncompleteReadError, ConnectionError), closing(writer):
            while b"INFO" not in await reader.readuntil(b"server\r\n"):
                pass
            body = b"# Server\r\nredis_version:%s\r\nredis_mode:standalone\r\n" % version.encode()
            writer.write(b"$%d\r\n%s\r\n" % (len(body), body))
            await reader.read()

    with closing(await asyncio.start_server(serve, "127.0.0.1", 0)) as server:
        yield f"redis://127.0.0.1:{server.sockets[0].getsockname()[1]}"
