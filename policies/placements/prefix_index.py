"""Which backend holds how much of this prompt's beginning? A bounded estimate of every engine's prefix cache.

A prompt is a chain of block hashes, each of which stands for everything up to its block (model and cache salt go into
the first). What is sent to a backend is taken to be in its cache from then on. The longest-unused blocks are forgotten
first, the end of a chain before its beginning, so a block is only known while those before it are, and a match is found
by bisection.

Engines evict as they like, so how much a backend keeps is not assumed but learned from what its answers report: fewer
cached tokens than expected, and as many of the oldest blocks are forgotten and the belief shrinks to what is left; as
many as expected, and it grows again. The blocks that were missed need not be forgotten: to answer, the engine has
just computed them anew.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import Final

__all__ = ["PrefixIndex", "blocks_of_tokens", "tokens_of_blocks"]

BLOCKS_MAX: Final = 65_536
"""Per backend. At 512 bytes of text a block this is about eight million tokens, more than most caches hold."""
BLOCKS_MIN: Final = 256
"""However wrong the estimates were, this much is remembered: about one long prompt."""
CAUTION: Final = 16
"""A miss takes at least one part in so many of the belief, a hit gives back one block for so many that were found."""

Prefix = tuple[int, ...]


def tokens_of_blocks(blocks: int, prefix: Prefix, prompt_tokens: int) -> int:
    """How many prompt tokens are these leading blocks? At least the last token is always computed."""
    return min(blocks * prompt_tokens // len(prefix), prompt_tokens - 1) if blocks and prompt_tokens else 0


def blocks_of_tokens(tokens: int, prefix: Prefix, prompt_tokens: int) -> int:
    """How many leading blocks are at least begun by so many prompt tokens?"""
    return min(-(-tokens * len(prefix) // prompt_tokens), len(prefix)) if prompt_tokens else 0


class _Cache:
    """What one backend is believed to hold, longest unused first."""

    __slots__ = ("blocks", "limit", "reports")

    def __init__(self, limit: int) -> None:
        self.blocks: OrderedDict[int, None] = OrderedDict()
        self.limit = limit
        self.reports = False
        """It has reported cached tokens: only then does it mean a miss when it reports none."""

    def trim(self) -> None:
        while len(self.blocks) > self.limit:
            self.blocks.popitem(last=False)


class PrefixIndex:
    """Leading blocks of a prompt that a backend is believed to hold. Matching is O(log blocks) per backend."""

    def __init__(self, *, blocks_max: int = BLOCKS_MAX) -> None:
        self._blocks_max = blocks_max
        self._caches: dict[str, _Cache] = {}
        self.version = 0
        """Changes whenever an answer of `depth` may have changed."""

    def __len__(self) -> int:
        """Blocks remembered, over all backends."""
        return sum(len(cache.blocks) for cache in self._caches.values())

    def depth(self, prefix: Prefix, backend: str) -> int:
        """How many leading blocks does this backend hold?"""
        cache = self._caches.get(backend)
        return _depth(prefix, cache.blocks) if cache is not None else 0

    def depths(self, prefix: Prefix) -> dict[str, int]:
        """The backends that hold any of it, and how many leading blocks each."""
        found = {name: _depth(prefix, cache.blocks) for name, cache in self._caches.items()}
        return {name: depth for name, depth in found.items() if depth}

    def insert(self, prefix: Prefix, backend: str) -> None:
        """A request that begins like this goes to this backend. O(blocks)."""
        if not prefix:
            return
        cache = self._caches.get(backend)
        if cache is None:
            cache = self._caches[backend] = _Cache(self._blocks_max)
        blocks = cache.blocks
        for block in reversed(prefix):  # its beginning last, so that the end of a chain is forgotten first
            blocks[block] = None
            blocks.move_to_end(block)
        cache.trim()
        self.version += 1

    def forget(self, prefix: Prefix, backend: str, depth: int) -> None:
        """The backend never computed what follows the first `depth` blocks."""
        cache = self._caches.get(backend)
        if cache is not None:
            for block in prefix[depth:]:
                cache.blocks.pop(block, None)
            self.version += 1

    def reported(self, backend: str, expected: int, found: int) -> None:
        """A backend answered: of `expected` leading blocks it had `found`.

        A quarter less is none: our blocks and the engine's do not end at the same places.
        """
        cache = self._caches.get(backend)
        if cache is None:
            return
        cache.reports = cache.reports or found > 0
        if cache.reports and found < expected - 1 - expected // 4:
            known = len(cache.blocks)
            cache.limit = max(BLOCKS_MIN, known - max(expected - found, known // CAUTION))
            cache.trim()
            self.version += 1
        elif found:
            cache.limit = min(self._blocks_max, cache.limit + 1 + found // CAUTION)


def _depth(prefix: Prefix, blocks: OrderedDict[int, None]) -> int:
    low, high = 0, len(prefix)
    while low < high:
        middle = (low + high) // 2
        if prefix[middle] in blocks:
            low = middle + 1
        else:
            high = middle
    return low
