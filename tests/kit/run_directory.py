"""The hub's exchange, in this process."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from gateway.process.supervisor import open_unix_listener
from gateway.storage.hub.exchange_server import ExchangeServer
from gateway.storage.hub.run_directory import RunDirectory

WORKERS = 2


def hang_up(server: ExchangeServer) -> None:
    """Close the connections of all workers."""
    for worker in list(server.connections):
        worker.writer.close()


@asynccontextmanager
async def run_directory() -> AsyncIterator[tuple[RunDirectory, ExchangeServer]]:
    """The hub's exchange, in this process."""
    found = RunDirectory.made(WORKERS)
    server = ExchangeServer(found)
    listening = await server.listen(open_unix_listener(found.exchange))
    try:
        yield found, server
    finally:
        listening.close()
        hang_up(server)
        found.end()
