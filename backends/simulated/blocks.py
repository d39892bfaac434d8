"""Which KV blocks are held, shared, kept for reuse, or free?

A full block has a key that stands for everything up to its end, so two equal prefixes meet on the same keys. A block
without a key (not full, or a second copy) has one holder. Blocks that nobody holds are free; those with a key can still
be hit until the space is taken, the longest-unused first.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Sequence

BlockKey = int | tuple[int, int]
"""A prefix hash given by the caller, or (request serial, block index) for text that only its own request can repeat."""


class BlockPool:
    """Counts blocks and remembers keys; O(1) per block."""

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self._blank = capacity
        self._cached: OrderedDict[BlockKey, None] = OrderedDict()
        self._held: dict[BlockKey, int] = {}

    @property
    def free(self) -> int:
        """How many blocks can be taken? Those kept for reuse are among them."""
        return self._blank + len(self._cached)

    def match(self, keys: Iterable[BlockKey]) -> list[BlockKey]:
        """How much of this chain is still there? Stops at the first miss."""
        found: list[BlockKey] = []
        for key in keys:
            if key not in self._held and key not in self._cached:
                break
            found.append(key)
        return found

    def unheld(self, keys: Iterable[BlockKey]) -> int:
        """How many of these matched blocks are free now, so that adopting them uses up space?"""
        return sum(1 for key in keys if key not in self._held)

    def adopt(self, keys: Iterable[BlockKey]) -> None:
        """One more request holds these matched blocks."""
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
        """Give a key to a block just filled. False: another block has it, this one stays a private copy."""
        if key in self._held or key in self._cached:
            return False
        self._held[key] = 1
        return True

    def give_back(self, keys: Sequence[BlockKey], private: int) -> None:
        """A request lets go of its keyed blocks and of `private` others. The end of a chain is evicted first."""
        self._blank += private
        for key in reversed(keys):
            holders = self._held[key] - 1
            if holders:
                self._held[key] = holders
            else:
                del self._held[key]
                self._cached[key] = None
