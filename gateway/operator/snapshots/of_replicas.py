"""How does it stand at all replicas together? A gateway asks the others when somebody looks, and answers them.

Questions and answers go to all that listen on one channel of the store; while nobody looks, nothing is said. A replica
that does not answer in time is left out, and named once. A gateway whose store cannot be asked shows itself alone.
"""

from __future__ import annotations

import asyncio
import socket
from typing import TYPE_CHECKING, Final

import msgspec

from gateway.operator.snapshots.snapshot import (
    GatewayProcess,
    GatewaySnapshot,
    Gathered,
    decoded,
    encoded,
    ended,
    moved,
    snapshot_of,
)
from gateway.storage.store import ALL_POOLS, Store
from gateway.storage.store_errors import StoreError
from gateway.telemetry.background import Background
from gateway.telemetry.ends import End
from gateway.telemetry.recent_requests import ENDS_MAX

if TYPE_CHECKING:
    from gateway.config.model import Config
    from gateway.telemetry.recent_requests import RecentRequests

ANSWER_S: Final = 1.0
RETRY_S: Final = 1.0
ENDS_TOGETHER: Final = 4 * ENDS_MAX


class _ReplicaMessage(msgspec.Struct):
    """A question to all (`known`: how many ends of each replica the asking one has), or the answer to one of them."""

    replica: str
    known: dict[str, int]
    with_running: bool = False
    to: str = ""
    name: str = ""
    """How people call the replica that answers."""
    content: bytes = b""
    of: str = ""
    epoch_s: float = 0.0
    """By how much the common clock is ahead of its own."""


_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(_ReplicaMessage).decode


class Replicas:
    """All replicas, as one of them asks the others. A `SnapshotSource`."""

    def __init__(self, gateway: GatewayProcess, store: Store, background: Background, worker: str) -> None:
        """`worker`: which of this gateway's; "": it has one process."""
        self._worker = worker
        self._background = background
        self._gateway = gateway
        self._store = store
        self._gathered = Gathered(ENDS_TOGETHER)
        self._names: list[str] = []
        """Who answered the last question."""
        self._silent: set[str] = set()
        """Who has not answered in time, and nothing since: nobody waits for them again."""
        self._answers: dict[str, tuple[GatewaySnapshot, list[End], int]] = {}
        self._answered = asyncio.Event()
        self._turn = asyncio.Lock()

    @property
    def config(self) -> Config:
        return self._gateway.config

    @property
    def recent(self) -> RecentRequests:
        return self._gathered.recent

    async def listen(self) -> None:
        """To the questions and answers of others, until the way to the store is lost."""
        try:
            await self._store.subscribe(ALL_POOLS, self._take)
        except StoreError:
            pass  # the store says so
        await asyncio.sleep(RETRY_S)

    async def snapshot(self, *, with_running: bool = False, of: str = "") -> GatewaySnapshot:
        async with self._turn:
            known, recent = self._gathered.known, self._gateway.recent
            self._answers.clear()
            question = _ReplicaMessage(self._store.replica, dict(known), with_running=with_running, of=of)
            others = await self._publish(question) - 1
            try:
                async with asyncio.timeout(ANSWER_S):
                    while len(self._answers) < others - len(self._silent):
                        self._answered.clear()
                        await self._answered.wait()
            except TimeoutError:
                pass
            own = snapshot_of(self._gateway, with_running=with_running, of=of)
            answers = {
                self._name: (own, recent.latest_after(known[self._name]), recent.count),
                **self._answers,
            }
            silent = [name for name in self._names if name not in answers and others > 0]
            self._silent = self._silent.union(silent) if len(self._answers) < others else set()
            self._names = list(answers)
            return self._gathered.take([(name, *answer) for name, answer in answers.items()], silent)

    @property
    def _name(self) -> str:
        """How people find this process."""
        return f"{socket.gethostname()}:{self._gateway.port}{self._worker}"

    async def _publish(self, message: _ReplicaMessage) -> int:
        """How many listen; this gateway is one of them."""
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
            pass  # of another version: it is not among the gateways that are shown

    async def _answer(self, asked: _ReplicaMessage) -> None:
        gateway, store = self._gateway, self._store
        found, recent = snapshot_of(gateway, with_running=asked.with_running, of=asked.of), gateway.recent
        content = encoded(found, recent.latest_after(asked.known.get(self._name, 0)), recent.count)
        message = _ReplicaMessage(
            store.replica, {}, to=asked.replica, name=self._name, content=content, epoch_s=store.epoch_s
        )
        await self._publish(message)
