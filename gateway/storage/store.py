"""What do the replicas of a gateway share, and how is it asked? The one interface of every place where that is kept.

`storage/redis/` keeps it in a Redis, for replicas on many machines; `storage/hub/` in the hub, for the workers of one
gateway. What is kept, and what comes of an exchange, is the same (docs/replicas.md).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

ALL_POOLS = "*"
"""Stands for the name of a pool in a report about all pools."""


@dataclass(frozen=True, slots=True)
class Deployment:
    """What the replicas of one pool must agree on: its policy, and at least one backend."""

    pool: str
    policy: str
    backends: tuple[str, ...]
    """Their urls."""


class Store(Protocol):
    """The shared state of one gateway process. `open`, `turn` after `turn` in the background, then `close`.

    What asks raises StoreUnavailable where the store cannot be asked now, and never tries twice.
    """

    replica: str
    """The name of this process among the replicas; no other ever has it."""
    epoch_s: float
    """By how much the clock that all replicas have in common is ahead of the monotonic one of this process."""
    pools: Sequence[Deployment]
    """May be others at any time: the store takes them over by itself."""

    @property
    def fault(self) -> str | None:
        """Why is nothing shared at present? None: everything is."""

    async def open(self) -> None:
        """Join the other replicas. Raises StoreRefused or StoreUnavailable."""

    async def turn(self) -> None:
        """Wait a little, then stay one of them; if it could not be opened, try again."""

    async def exchange(self, about: str, number: int, report: bytes) -> bytes:
        """Send a report about one pool or ALL_POOLS; returns the reply. Both are MessagePack
        (`policies.replicas.messages`)."""

    async def leave(self, about: str) -> None:
        """Give back at once what is this replica's own there."""

    async def learned(self, pool: str) -> bytes | None:
        """What all replicas of the pool have learned of its apps. None: nothing yet."""

    async def learn(self, pool: str, content: bytes) -> None:
        """Keep this in its place."""

    async def publish(self, pool: str, content: bytes) -> int:
        """Say something to every replica of the pool that listens, once. How many do, if that is known. Raises
        StoreError."""

    async def subscribe(self, pool: str, received: Callable[[bytes], None]) -> None:
        """Listen to what any replica of the pool says, its own perhaps included, until cancelled. Raises StoreError
        when that ends."""

    async def close(self) -> None:
        """Leave, so that others need not wait until this replica is forgotten, and disconnect."""
