"""The interface to the state that replicas of a gateway share.

`storage/redis/` keeps the state in Redis, for replicas on many machines; `storage/hub/` in the hub, for the workers of
one gateway. Both keep equal state and answer sync rounds equally (docs/replicas.md).
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Final, Protocol

from prometheus_client.metrics_core import Metric

from gateway.storage.store_errors import StoreError

RETRY_S: Final = 1.0
"""Seconds after which a lost subscription is made again."""
ALL_POOLS = "*"
"""Stands for a pool's name in a report about all pools."""


@dataclass(frozen=True, slots=True)
class PoolIdentity:
    """Facts on which the replicas of one pool must agree: its policy, and at least one backend."""

    pool: str
    policy: str
    backends: tuple[str, ...]
    """URLs of the backends."""


class Store(Protocol):
    """Shared state of a gateway process. Call `open`, then `run_once` repeatedly in the background, then `close`.

    A request raises StoreUnavailable while the store is unreachable, and is never sent twice.
    """

    replica: str
    """Unique name of this process among the replicas."""
    epoch_s: float
    """Seconds by which the replicas' common clock is ahead of this process's monotonic clock."""
    pools: Sequence[PoolIdentity]
    """Pools of this gateway. The store adopts a new value by itself."""

    @property
    def fault(self) -> str | None:
        """Return why nothing is shared at present, or None."""

    async def open(self) -> None:
        """Join the other replicas. Raise StoreRefused or StoreUnavailable."""

    async def run_once(self) -> None:
        """Wait a little, then renew the membership, or try again to join."""

    async def exchange(self, about: str, number: int, report: bytes) -> bytes:
        """Send a report about one pool or ALL_POOLS, and return the reply. Both are MessagePack
        (`policies.replicas.messages`)."""

    async def leave(self, about: str) -> None:
        """Return this replica's grants about a pool at once."""

    async def learned_state(self, pool: str) -> bytes | None:
        """Return the shared learned state of a pool's apps, or None."""

    async def learn(self, pool: str, content: bytes) -> None:
        """Replace the shared learned state of a pool's apps."""

    async def publish(self, pool: str, content: bytes) -> int:
        """Send a message once to every listening replica of the pool. Return their number as far as known. Raise
        StoreError."""

    async def subscribe(self, pool: str, received: Callable[[bytes], None]) -> None:
        """Receive the messages of any replica of the pool, perhaps this one included, until cancelled. Raise StoreError
        at the end."""

    def collect(self) -> Iterator[Metric]:
        """Yield the metrics for the registry. Runs in another thread than the loop."""

    async def close(self) -> None:
        """Leave, so that others need not wait for this replica's expiry, and disconnect."""


async def listen(
    store: Store, channel: str, received: Callable[[bytes], None], lost: Callable[[StoreError], None] | None = None
) -> None:
    """Receive a channel's messages until the connection is lost, and wait. Only `lost` gets the error: the store itself
    logs its faults."""
    try:
        await store.subscribe(channel, received)
    except StoreError as error:
        if lost is not None:
            lost(error)
    await asyncio.sleep(RETRY_S)
