"""Several servers of one kind at once, however many a test wants."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterable
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager
from typing import TypeVar

Server = TypeVar("Server")


@asynccontextmanager
async def together(servers: Iterable[AbstractAsyncContextManager[Server]]) -> AsyncIterator[list[Server]]:
    async with AsyncExitStack() as stack:
        yield [await stack.enter_async_context(each) for each in servers]
