"""A snapshot of all replicas together: on request a gateway asks the others, and it answers their questions.

Questions and answers go to all listeners on one channel of the store. Nothing is sent unless a snapshot is asked for. A
replica that does not answer in time is left out, and named once. Without its store, a gateway shows itself.
"""

from __future__ import annotations

import asyncio
import socket
from typing import TYPE_CHECKING, Final

import msgspec

from gateway.operator.snapshots.snapshot import (
    GatewayProcess,
    GatewaySnapshot,
    SnapshotMerger,
    decoded,
    encoded,
    ended,
    moved,
    snapshot_of,
)
from gateway.storage.store import ALL_POOLS, Store, listen
from gateway.storage.store_errors import StoreError
from gateway.telemetry.background import Tasks
from gateway.telemetry.ends import EndedRequest
from gateway.telemetry.recent_requests import ENDS_MAX

if TYPE_CHECKING:
    from gateway.config.model import Config

ANSWER_S: Final = 1.0


class _ReplicaMessage(msgspec.Struct):
    """A question to all replicas, or the answer to one of them. `known`: the asker's number of ends of each replica."""

    replica: str
    known: dict[str, int]
    to: str = ""
    name: str = ""
    """Host and port of the replica that answers."""
    content: bytes = b""
    epoch_s: float = 0.0
    """Seconds by which the common clock is ahead of the monotonic clock of the replica that answers."""


_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(_ReplicaMessage).decode


class Replicas:
    """A `SnapshotSource` that asks all replicas."""

    def __init__(self, gateway: GatewayProcess, store: Store, background: Tasks, worker: str) -> None:
        """Begin without answers. `worker`: name among those of its machine; "" if the gateway has one process."""
        self._worker = worker
        self._background = background
        self._gateway = gateway
        self._store = store
        self._gathered = SnapshotMerger(gateway.config.bounds.size("ends"))
        self.recent = self._gathered.recent
        self._names: list[str] = []
        """Names of the replicas that answered the last question."""
        self._silent: set[str] = set()
        """Names of the replicas whose answer was missed; nobody waits for them until they answer again."""
        self._answers: dict[str, tuple[GatewaySnapshot, list[EndedRequest], int]] = {}
        self._answered = asyncio.Event()
        self._turn = asyncio.Lock()

    @property
    def config(self) -> Config:
        return self._gateway.config

    async def listen(self) -> None:
        """Receive questions and answers of other replicas until the connection to the store is lost."""
        await listen(self._store, ALL_POOLS, self._take)

    async def snapshot(self) -> GatewaySnapshot:
        async with self._turn:
            known, recent = self._gathered.known, self._gateway.recent
            self._answers.clear()
            question = _ReplicaMessage(self._store.replica, dict(known))
            others = await self._publish(question) - 1
            try:
                async with asyncio.timeout(ANSWER_S):
                    while len(self._answers) < others - len(self._silent):
                        self._answered.clear()
                        await self._answered.wait()
            except TimeoutError:
                pass
            own = snapshot_of(self._gateway)
            answers = {self._name: (own, recent.latest_after(known[self._name]), recent.count), **self._answers}
            silent = [name for name in self._names if name not in answers and others > 0]
            self._silent = self._silent.union(silent) if len(self._answers) < others else set()
            self._names = list(answers)
            return self._gathered.take([(name, *answer) for name, answer in answers.items()], silent)

    @property
    def _name(self) -> str:
        """Host, port and worker of this process, for people. Where all are workers of one machine, the worker alone."""
        host = "" if self.config.state.redis_url is None else f"{socket.gethostname()}:{self._gateway.port}"
        return f"{host} {self._worker}".strip()

    async def _publish(self, message: _ReplicaMessage) -> int:
        """Send a message, and return the number of listeners, this gateway included; 0 if the store cannot be asked."""
        try:
            return await self._store.publish(ALL_POOLS, _encode(message))
        except StoreError:
            return 0

    def _take(self, content: bytes) -> None:
        try:
            message = _decode(content)
            if message.replica == self._store.replica:
                return
            if not message.to:
                self._background.start(self._answer(message))
            elif message.to == self._store.replica:
                by_s = message.epoch_s - self._store.epoch_s
                self._silent.discard(message.name)
                found, ends, count = decoded(message.content)
                self._answers[message.name] = (moved(found, by_s), [ended(end, by_s) for end in ends], count)
                self._answered.set()
        except ValueError:
            pass  # The message of another version: its gateway is not shown.

    async def _answer(self, asked: _ReplicaMessage) -> None:
        gateway, store = self._gateway, self._store
        found, recent = snapshot_of(gateway), gateway.recent
        ends = recent.latest_after(asked.known.get(self._name, 0))[-ENDS_MAX:]
        content = encoded(found, ends, recent.count)
        message = _ReplicaMessage(
            store.replica, {}, to=asked.replica, name=self._name, content=content, epoch_s=store.epoch_s
        )
        await self._publish(message)
