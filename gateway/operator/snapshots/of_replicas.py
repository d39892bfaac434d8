"""A snapshot of all replicas together: on request a gateway asks the others, and it answers their questions.

Questions and answers go to all listeners on one channel of the store. Nothing is sent unless a snapshot is asked for. A
replica that does not answer in time is left out, and named once. Without its store, a gateway shows itself.
"""

from __future__ import annotations

import asyncio
import socket
from contextlib import suppress
from typing import TYPE_CHECKING, Final

import msgspec

from gateway.operator.snapshots.snapshot import (
    NO_ANSWER,
    GatewayProcess,
    GatewaySnapshot,
    ReplicaAnswer,
    snapshot_of,
    together,
)
from gateway.storage.store import ALL_POOLS, Store, listen
from gateway.storage.store_errors import StoreError
from gateway.telemetry.background import Tasks
from gateway.telemetry.recent_requests import ENDS_MAX, RecentRequests

if TYPE_CHECKING:
    from gateway.config.model import Config

ANSWER_S: Final = 1.0


class _ReplicaMessage(msgspec.Struct):
    """A question to all replicas, or the answer to one of them. `known`: the asker's number of ends of each replica."""

    replica: str
    known: dict[str, int] = {}
    to: str = ""
    answer: bytes = b""
    """The `ReplicaAnswer`, which only the asker decodes."""


encode: Final = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(_ReplicaMessage).decode
decode_answer: Final = msgspec.msgpack.Decoder(ReplicaAnswer).decode


class Replicas:
    """A `SnapshotSource` that asks all replicas."""

    def __init__(self, gateway: GatewayProcess, store: Store, background: Tasks, worker: str) -> None:
        """Begin without answers. `worker`: name among those of its machine; "" if the gateway has one process."""
        self._worker = worker
        self._background = background
        self._gateway = gateway
        self._store = store
        self.recent = RecentRequests(gateway.config.bounds.size("ends"))
        self._known: dict[str, int] = {}
        """Number of ends that are known here, by replica that answers or is silent."""
        self._names: list[str] = []
        """Names of the replicas that answered the last question."""
        self._silent: set[str] = set()
        """Names of the replicas whose answer was missed; nobody waits for them until they answer again."""
        self._answers: dict[str, ReplicaAnswer] = {}
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
            self._answers.clear()
            others = await self._publish(_ReplicaMessage(self._store.replica, self._known)) - 1
            with suppress(TimeoutError):
                async with asyncio.timeout(ANSWER_S):
                    while len(self._answers) < others - len(self._silent):
                        self._answered.clear()
                        await self._answered.wait()
            answers = {self._name: self._own_answer(self._known), **self._answers}
            silent = [name for name in self._names if name not in answers and others > 0]
            self._silent = self._silent.union(silent) if len(self._answers) < others else set()
            self._names = list(answers)
            return self._merged(answers, silent)

    def _merged(self, answers: dict[str, ReplicaAnswer], silent: list[str]) -> GatewaySnapshot:
        """Merge the answers, the own one first. `silent`: replicas that did not answer."""
        counts = {name: one.ends_count for name, one in answers.items()}
        self._known = {name: count for name, count in self._known.items() if name in self._silent} | counts
        ends = [end for one in answers.values() for end in one.ends]
        self.recent.add_reported(sorted(ends, key=lambda end: end.ended_s))
        whole = together([(name, one.snapshot) for name, one in answers.items()])
        whole.not_ready += [f"{name}: {NO_ANSWER}" for name in silent]
        return whole

    @property
    def _name(self) -> str:
        """Host, port and worker of this process, for people. Where all are workers of one machine, the worker alone."""
        host = "" if self.config.state.redis_url is None else f"{socket.gethostname()}:{self._gateway.port}"
        return f"{host} {self._worker}".strip()

    async def _publish(self, message: _ReplicaMessage) -> int:
        """Send a message, and return the number of listeners, this gateway included; 0 if the store cannot be asked."""
        try:
            return await self._store.publish(ALL_POOLS, encode(message))
        except StoreError:
            return 0

    def _take(self, content: bytes) -> None:
        with suppress(ValueError):  # The message of another version: its gateway is not shown.
            message = _decode(content)
            if message.replica == self._store.replica:
                return
            if not message.to:
                self._background.start(self._answer(message))
            elif message.to == self._store.replica:
                answer = decode_answer(message.answer)
                answer.move(self._store.epoch_s)
                self._silent.discard(answer.name)
                self._answers[answer.name] = answer
                self._answered.set()

    def _own_answer(self, known: dict[str, int]) -> ReplicaAnswer:
        recent, name = self._gateway.recent, self._name
        ends = recent.latest_after(known.get(name, 0))
        return ReplicaAnswer(name, self._store.epoch_s, snapshot_of(self._gateway), ends, recent.count)

    async def _answer(self, asked: _ReplicaMessage) -> None:
        answer = self._own_answer(asked.known)
        answer.ends = answer.ends[-ENDS_MAX:]
        await self._publish(_ReplicaMessage(self._store.replica, to=asked.replica, answer=encode(answer)))
