"""A pool of KV blocks: held, shared, cached for reuse, or free.

A full block has a key that stands for the whole text up to its end, so equal prefixes share keys. A block without a key
(not full, or a second copy) has one holder. Blocks without a holder are free. A free block with a key can be hit until
its space is taken, least recently used first.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Sequence

BlockKey = int | tuple[int, int]
"""A prefix hash given by the caller, or (request serial, block index) for text that only its own request can repeat."""


class BlockPool:
    """The KV blocks of a simulated engine: free, held, or cached under a key for reuse. O(1) per block."""

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self._blank = capacity
        self._cached: OrderedDict[BlockKey, None] = OrderedDict()
        self._held: dict[BlockKey, int] = {}

    @property
    def free(self) -> int:
        """Return the number of blocks that can be taken, cached ones included."""
        return self._blank + len(self._cached)

    def match(self, keys: Iterable[BlockKey]) -> list[BlockKey]:
        """Return the leading keys that are held or cached."""
        found: list[BlockKey] = []
        for key in keys:
            if key not in self._held and key not in self._cached:
                break
            found.append(key)
        return found

    def unheld(self, keys: Iterable[BlockKey]) -> int:
        """Return how many of these matched blocks are free now, so that adopting them uses up space."""
        return sum(1 for key in keys if key not in self._held)

    def adopt(self, keys: Iterable[BlockKey]) -> None:
        """Add a holder to each of these matched blocks."""
        for key in keys:
            holders = self._held.get(key, 0)
            if not holders:
                del self._cached[key]
            self._held[key] = holders + 1

    def take(self, count: int) -> None:
        """Take `count` blocks out of the free ones; the caller has compared with `free`."""
        evicted = count - self._blank
        if evicted <= 0:
            self._blank -= count
            return
        self._blank = 0
        for _ in range(evicted):
            self._cached.popitem(last=False)

    def name(self, key: BlockKey) -> bool:
        """Give a key to a full block. Return False if another block has the key, so that this one stays a private
        copy."""
        if key in self._held or key in self._cached:
            return False
        self._held[key] = 1
        return True

    def give_back(self, keys: Sequence[BlockKey], private: int) -> None:
        """Release a request's keyed blocks and `private` others. The end of a chain is evicted first."""
        self._blank += private
        for key in reversed(keys):
            holders = self._held[key] - 1
            if holders:
                self._held[key] = holders
            else:
                del self._held[key]
                self._cached[key] = None
