"""Which backend holds how much of this prompt's beginning? A bounded estimate of every engine's prefix cache.

A prompt is a chain of block hashes. Each hash stands for everything up to its block; the model and the cache salt are
part of the first. A prompt that is sent to a backend counts as cached there. The least recently used blocks are
forgotten first, and the end of a chain before its beginning. So a block is known only while all earlier blocks of its
chain are, and bisection finds a match.

Engines evict by their own rules. So the size of a backend's cache is learned from its answers. If an answer reports
clearly fewer cached tokens than expected, the estimated size shrinks by the blocks that were missed, or by a twentieth
if that is more, and the oldest blocks are forgotten. Otherwise the size grows if blocks were found. The missed blocks
themselves need not be forgotten, because the engine has just computed them again.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import Final

from policies.averages import USUAL

BLOCKS_MAX: Final = 65_536
"""Blocks remembered per backend. At 512 bytes of text a block they are about eight million tokens, more than most
caches hold."""
ALL_BLOCKS_MAX: Final = 16 * BLOCKS_MAX
BLOCKS_MIN: Final = 256
"""Least size that misses shrink a cache to: about one long prompt."""
CAUTION: Final = round(1 / USUAL)
"""A miss shrinks the estimated size by at least 1 / CAUTION. A hit adds one block, plus one for every CAUTION blocks
found."""

Prefix = tuple[int, ...]


def tokens_of_blocks(blocks: int, prefix: Prefix, prompt_tokens: int) -> int:
    """Return the prompt tokens in these leading blocks. At least the last token is always computed."""
    return min(blocks * prompt_tokens // len(prefix), prompt_tokens - 1) if blocks and prompt_tokens else 0


def blocks_of_tokens(tokens: int, prefix: Prefix, prompt_tokens: int) -> int:
    """Return the number of leading blocks that these prompt tokens reach, the last one counted as whole."""
    return min(-(-tokens * len(prefix) // prompt_tokens), len(prefix)) if prompt_tokens else 0


class _Cache:
    """The blocks that one backend is believed to hold, the least recently used first."""

    __slots__ = ("blocks", "limit", "prompt_tokens", "reports")

    def __init__(self) -> None:
        self.blocks: OrderedDict[int, None] = OrderedDict()
        self.limit = BLOCKS_MAX
        self.prompt_tokens = 0
        """Prompt tokens that the backend last reported to have processed since its start."""
        self.reports = False
        """The backend has reported cached tokens before. Only then does a report of none mean a miss."""

    def depth(self, prefix: Prefix) -> int:
        """Return the number of leading blocks that the backend holds."""
        low, high = 0, len(prefix)
        while low < high:
            middle = (low + high) // 2
            if prefix[middle] in self.blocks:
                low = middle + 1
            else:
                high = middle
        return low

    def trim(self) -> None:
        """Forget the oldest blocks beyond the limit."""
        while len(self.blocks) > self.limit:
            self.blocks.popitem(last=False)


class PrefixIndex:
    """The blocks of prompts that each backend is believed to hold. A match costs O(log blocks) per backend.

    Bounded: at most `blocks_max` blocks over all backends, in equal parts.
    """

    def __init__(self, *, blocks_max: int = ALL_BLOCKS_MAX) -> None:
        self._blocks_max = blocks_max
        self._caches: dict[str, _Cache] = {}
        self.version = 0
        """Number that grows whenever a result of `depth` may have changed."""

    def __len__(self) -> int:
        """Return the number of blocks remembered, over all backends."""
        return sum(len(cache.blocks) for cache in self._caches.values())

    def depth(self, prefix: Prefix, backend: str) -> int:
        """Return the number of leading blocks that this backend holds."""
        cache = self._caches.get(backend)
        return cache.depth(prefix) if cache is not None else 0

    def depths(self, prefix: Prefix) -> dict[str, int]:
        """Return the number of leading blocks of each backend that holds any of them."""
        if not prefix:
            return {}
        first = prefix[0]
        return {name: cache.depth(prefix) for name, cache in self._caches.items() if first in cache.blocks}

    def insert(self, prefix: Prefix, backend: str) -> None:
        """Count a prefix as cached at the backend to which its request goes. O(blocks)."""
        if not prefix:
            return
        cache = self._caches.get(backend)
        if cache is None:
            cache = self._caches[backend] = _Cache()
            self._divide()
        blocks = cache.blocks
        for block in reversed(prefix):  # from the end to the beginning, so that the end of a chain is forgotten first
            blocks[block] = None
            blocks.move_to_end(block)
        cache.trim()
        self.version += 1

    def forget(self, prefix: Prefix, backend: str, depth: int) -> None:
        """Forget the blocks after the first `depth`, which the backend never computed."""
        cache = self._caches.get(backend)
        if cache is not None:
            for block in prefix[depth:]:
                cache.blocks.pop(block, None)
            self.version += 1

    def forget_engine(self, backend: str) -> None:
        """Forget the blocks and the learned size of a backend that has restarted."""
        if self._caches.pop(backend, None) is not None:
            self.version += 1

    def counted(self, backend: str, prompt_tokens: int | None) -> None:
        """Note the prompt tokens that the backend has processed since its start; None counts as 0.

        A smaller number than before means a restart, so all of its blocks are forgotten.
        """
        cache = self._caches.get(backend)
        if cache is None:
            return
        if (prompt_tokens or 0) < cache.prompt_tokens:
            self.forget_engine(backend)
        else:
            cache.prompt_tokens = prompt_tokens or 0

    def learn_cache_size(self, backend: str, expected: int, found: int) -> None:
        """Learn the cache size of a backend that had `found` of `expected` leading blocks.

        Up to a quarter and one block less is not a miss, because the engine's blocks end at other places than ours.
        """
        cache = self._caches.get(backend)
        if cache is None:
            return
        cache.reports = cache.reports or found > 0
        if cache.reports and found < expected - 1 - expected // 4:
            known = len(cache.blocks)
            cache.limit = min(self._part, max(BLOCKS_MIN, known - max(expected - found, known // CAUTION)))
            cache.trim()
            self.version += 1
        elif found:
            cache.limit = min(self._part, cache.limit + 1 + found // CAUTION)

    def set(self, blocks_max: int) -> None:
        """Replace the limit of blocks over all backends."""
        self._blocks_max = blocks_max
        self._divide()

    @property
    def _part(self) -> int:
        """Blocks that may be remembered of each backend."""
        return min(BLOCKS_MAX, self._blocks_max // max(1, len(self._caches)))

    def _divide(self) -> None:
        for cache in self._caches.values():
            cache.limit = min(cache.limit, self._part)
            cache.trim()
