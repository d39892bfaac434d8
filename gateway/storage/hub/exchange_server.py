"""The server of sync rounds between the workers of one gateway, in the hub: Redis's part for replicas on many machines.

The state is that of Redis's script (`script_store`), one for each pool and one for all pools. It lives as long as the
hub. After a restart of the hub, workers report their totals, as after a Redis that lost its data.
"""

from __future__ import annotations

import asyncio
import logging
import socket
import time
from typing import Annotated, Any, Final

import msgspec

from gateway.storage.hub.run_directory import RunDirectory
from gateway.storage.hub.script_store import ScriptStore
from gateway.storage.hub.wire import Frames
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
        self._server = await asyncio.get_running_loop().create_unix_server(lambda: _Worker(self), sock=listener)
        return self._server

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
                    other.send([0, pool, content])
                return len(self.connections)
        return None

    def gone(self, worker: _Worker) -> None:
        """Release a worker's grants at the end of its connection, which ends with the worker."""
        self.connections.discard(worker)
        for me, pool in worker.names:
            self.about(pool).leave(me)


class _Worker(Frames):
    """The hub's end of one connection."""

    def __init__(self, server: ExchangeServer) -> None:
        super().__init__()
        self.names: set[tuple[str, str]] = set()
        """Names under which the worker reported, and pools that it reported about."""
        self._server = server

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)
        if len(self._server.connections) >= self._server.connections_max:
            logger.warning("the hub refused a connection: the workers have too many open")
            transport.close()
            return
        self._server.connections.add(self)

    def connection_lost(self, error: Exception | None) -> None:
        if self in self._server.connections:
            self._server.gone(self)

    def received(self, value: list[Any]) -> None:
        number, what, *arguments = value
        answer = self._server.answer(self, what, arguments)
        if number:
            self.send([number, answer])
