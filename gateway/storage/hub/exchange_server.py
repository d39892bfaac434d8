"""The server of sync rounds between the workers of one gateway, in the hub: Redis's part for replicas on many machines.

The state is that of Redis's script (`script_store`), one for each pool and one for all pools. It lives as long as the
hub. After a restart of the hub, workers report their totals, as after a Redis that lost its data.
"""

from __future__ import annotations

import asyncio
import logging
import socket
import time
from dataclasses import dataclass, field
from typing import Annotated, Any, Final

import msgspec

from gateway.storage.hub.run_directory import RunDirectory
from gateway.storage.hub.script_store import ScriptStore
from gateway.storage.hub.wire import BROKEN, receive, send
from gateway.storage.store import ALL_POOLS
from policies.replicas.messages import CountDelta, ReplicaReport

logger = logging.getLogger("fairgate")

CONNECTIONS_PER_WORKER: Final = 2
"""A worker's connection, and its predecessor's, which may not have ended yet."""
EARLIER: Final = "earlier"
"""Stands for an ended gateway. Names of workers are longer."""
POOLS_MAX: Final = 1_000

_Name = Annotated[str, msgspec.Meta(max_length=1024)]
_Number = Annotated[int, msgspec.Meta(ge=0, lt=1 << 53)]
_ARGUMENTS: Final[dict[str, Any]] = {
    "exchange": tuple[_Name, _Name, _Number, bytes],
    "leave": tuple[_Name, _Name],
    "learned": tuple[_Name],
    "learn": tuple[_Name, bytes],
    "news": tuple[_Name, bytes],
}


@dataclass(frozen=True, slots=True, eq=False)
class _Worker:
    """A connected worker."""

    writer: asyncio.StreamWriter
    names: set[tuple[str, str]] = field(default_factory=set)
    """Names under which the worker reported, and pools that it reported about."""


class ExchangeServer:
    """State that workers share, and their connections."""

    def __init__(self, run_directory: RunDirectory) -> None:
        self.connections: set[_Worker] = set()
        self.connections_max = CONNECTIONS_PER_WORKER * run_directory.workers
        self._epoch_s = run_directory.epoch_s
        self._exchanges: dict[str, ScriptStore] = {}
        self._learned: dict[str, bytes] = {}

    async def listen(self, listener: socket.socket) -> asyncio.Server:
        """Accept connections until the returned server is closed."""
        return await asyncio.start_unix_server(self.serve, sock=listener)

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Answer one worker until its connection ends, and release its grants."""
        if len(self.connections) >= self.connections_max:
            logger.warning("the hub refused a connection: the workers have too many open")
            writer.close()
            return
        worker = _Worker(writer)
        self.connections.add(worker)
        try:
            while True:
                number, what, *arguments = await receive(reader)
                answer = self.answer(worker, what, arguments)
                if number:
                    send(writer, [number, answer])
        except BROKEN:
            writer.transport.abort()
        finally:
            self.connections.discard(worker)
            for me, pool in worker.names:
                self.about(pool).leave(me)

    def about(self, pool: str) -> ScriptStore:
        """Return the shared state of one pool, or of all pools."""
        if pool not in self._exchanges:
            if len(self._exchanges) >= POOLS_MAX:
                raise ValueError("too many pools")
            self._exchanges[pool] = ScriptStore()
        return self._exchanges[pool]

    def count(self, tallies: list[CountDelta]) -> None:
        """Add counts from before this gateway's start."""
        report = ReplicaReport([], [], [], tallies, [], [], [], 0.0)
        exchange = self.about(ALL_POOLS)
        exchange.exchange(EARLIER, 1, msgspec.msgpack.encode(report), self.now_ms())
        exchange.leave(EARLIER)

    def now_ms(self) -> int:
        """Return the workers' common time."""
        return int((time.monotonic() + self._epoch_s) * 1000)

    def answer(self, worker: _Worker, what: str, arguments: list[Any]) -> Any:
        """Answer a worker's question. Raise ValueError or TypeError for an invalid one."""
        kinds = _ARGUMENTS.get(what)
        if kinds is None:
            raise ValueError(f"no answer to {what!r}")
        match what, msgspec.convert(arguments, kinds):
            case "exchange", (me, pool, number, content):
                view = self.about(pool).exchange(me, number, content, self.now_ms())
                worker.names.add((me, pool))
                return view
            case "leave", (me, pool):
                self.about(pool).leave(me)
            case "learned", (pool,):
                return self._learned.get(pool)
            case "learn", (pool, content):
                self.about(pool)
                self._learned[pool] = content
            case "news", (pool, content):
                for other in self.connections - {worker}:
                    send(other.writer, [0, pool, content])
                return len(self.connections)
        return None
