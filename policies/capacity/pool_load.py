"""How large are the engines of a pool together, and which of them is the least full?

Both answers are kept, and only engines that have changed since the last question are asked again.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Mapping, Sequence
from math import inf
from typing import Final

from policies.capacity.ledger import BackendLedger


class PoolLoad:
    """The size of each engine, and the engines in the order of their KV occupancy."""

    def __init__(self, backends: Mapping[str, BackendLedger]) -> None:
        self._backends: Final = backends
        self._sizes: dict[str, tuple[float, float]] = {}
        """Slots and KV tokens of each engine: 0 if it is out of service, inf if unknown."""
        self._sums = (inf, inf)
        self._fractions: dict[str, float] = {}
        self._ranks: list[tuple[float, str]] = []
        """Occupancy and name of each engine, the least full first."""
        self._resized = dict.fromkeys(backends)
        self._refilled = dict.fromkeys(backends)
        """Engines whose size or occupancy may have changed since the last question."""

    def changed(self, engine: str) -> None:
        """Note an event at this engine."""
        self._resized[engine] = self._refilled[engine] = None

    def grew(self, engine: str) -> None:
        """Note that a request at this engine holds more than before."""
        self._refilled[engine] = None

    def sum_sizes(self) -> tuple[float, float]:
        """Return the sums of slots and KV tokens over the engines in service; inf if an engine's are unknown."""
        is_known = True
        for name in self._resized:
            ledger, size = self._backends[name], (0.0, 0.0)
            if ledger.healthy:
                size = float(ledger.slots.known() or inf), float(ledger.kv.capacity_tokens or inf)
            is_known = is_known and self._sizes.get(name) == size
            self._sizes[name] = size
        self._resized.clear()
        if not is_known:
            sizes = self._sizes.values()
            self._sums = sum([slots for slots, _ in sizes]) or inf, sum([tokens for _, tokens in sizes]) or inf
        return self._sums

    def ranks(self) -> Sequence[tuple[float, str]]:
        """Return occupancy and name of each engine, the least full first."""
        for name in self._refilled:
            before = self._fractions.get(name)
            if before is not None:
                del self._ranks[bisect_left(self._ranks, (before, name))]
            fraction = self._fractions[name] = self._backends[name].kv_fraction()
            insort(self._ranks, (fraction, name))
        self._refilled.clear()
        return self._ranks
