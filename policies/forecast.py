"""How full will a KV cache get if one more request starts now? Looks ahead over what is dispatched.

All sequences grow a token a step until they end. Occupancy therefore rises until one ends and falls when it does, so
its peak is at one of the ends (the form of LightLLM's admission check).
"""

from __future__ import annotations

from collections.abc import Iterable
from math import sqrt
from operator import attrgetter
from typing import NamedTuple

__all__ = ["Growing", "KvForecast"]


AHEAD = 0.2
"""How far starts may run ahead of an even spread, as a share of the distance between two of them."""
TOLERATED = 0.1
"""Share of the capacity that may be missing before starts run further ahead to fill it."""
CATCHING_UP = 0.5
"""How much of what is missing beyond that may start at once; the rest is spread, so that a wave halves each time."""


class Growing(NamedTuple):
    """One request in the cache. Tokens; `grows` and `whole` are per sequence."""

    grows: float
    """What each sequence is still expected to add."""
    held: float
    """What it holds now, over all its sequences."""
    sequences: int
    whole: float
    """What each sequence adds from its start to its end."""
    age: float
    """Since it was dispatched, in steps of the engine."""
    margin: float = 0.0
    """What it may add beyond that, over all its sequences: to a high quantile of its like."""

    def work(self) -> float:
        """Token-steps it takes from its start to its end."""
        at_start = self.held - self.sequences * (self.whole - self.grows)
        return self.whole * (at_start + self.sequences * self.whole / 2)


class KvForecast:
    """What is dispatched to one backend, looked at from its ends. Building it is O(n log n), each question O(n)."""

    def __init__(self, requests: Iterable[Growing]) -> None:
        self._latest_first = sorted(requests, reverse=True)

    def peak_with(self, candidate: Growing, delay: float = 0.0) -> float:
        """Largest occupancy ahead, in tokens, if the candidate starts in `delay` steps and nothing after it.

        What ends until then makes room for it.
        """
        peak = held = variance = 0.0
        sequences = 0
        is_counted = False
        for request in self._latest_first:
            if request.grows < delay:
                break
            if not is_counted and candidate.grows >= request.grows:
                is_counted = True
                held, sequences = held + candidate.held, sequences + candidate.sequences
                variance += candidate.margin**2
                peak = max(peak, held + candidate.grows * sequences + sqrt(variance))
            held, sequences = held + request.held, sequences + request.sequences
            variance += request.margin**2
            peak = max(peak, held + request.grows * sequences + sqrt(variance))
        if not is_counted:
            held, sequences = held + candidate.held, sequences + candidate.sequences
            peak = max(peak, held + candidate.grows * sequences + sqrt(variance + candidate.margin**2))
        return peak

    def is_level_with(self, candidate: Growing, capacity_tokens: float, spread: float = 0.0) -> bool:
        """Would starts still be spread evenly, if this one came now?

        Requests that start together end together: the cache is half empty at the start of such a wave and full at its
        end, and the next wave starts as one. Evenly spread, the same cache holds more at any time. A full cache gets
        through `capacity_tokens` token-steps a step, so within the last so many steps no more work may have been
        started than that, but for the candidate itself and, in a cache that has become empty, for part of what is
        missing. Answers that differ in length by `spread` steps end so far apart even if they start together.
        """
        work = candidate.work()
        level = sum(request.work() / max(request.whole, 1.0) for request in self._latest_first) / capacity_tokens
        missing = max(0.0, 1.0 - TOLERATED - level)
        ahead = work / capacity_tokens * (1.0 + AHEAD) + candidate.whole * CATCHING_UP * missing + spread
        for request in sorted(self._latest_first, key=attrgetter("age")):
            if work > capacity_tokens * (request.age + ahead):
                return False
            work += request.work()
        return True
