"""How full will a KV cache get if one more request starts now? A forecast over the dispatched requests.

Every sequence grows by one token per step until it ends. Occupancy rises until a sequence ends, and then falls. The
peak is therefore at one of the ends (as in LightLLM's admission check). For most answers only the distribution of the
length is known. The end is then equally likely at every step of a stretch of steps. Occupancy at a step is a sum over
many requests, so its mean plus one standard deviation is used. The margin against long answers therefore grows with the
square root of their number.
"""

from __future__ import annotations

from collections.abc import Iterable
from math import inf, sqrt
from operator import attrgetter, itemgetter
from typing import Final

__all__ = ["Growing", "KvForecast", "still_to_come"]


TOLERATED: Final = 0.1
"""Fraction of the capacity that may be unused before starts run further ahead to fill it."""
CATCHING_UP: Final = 0.5
"""Fraction of the unused capacity beyond that which may be filled at once. The rest is spread, so that a wave halves
each time."""
LATE: Final = 1.3
"""One in ten exponentially distributed lengths exceeds the mean by at least this many times the mean: ln 10 - 1."""
LOOKS: Final = 6
"""Where ends are spread, occupancy is also checked at 1/2, 1/4, ... 1/2^6 of the way to the last end."""


def still_to_come(expected: float, reserved: float, most: float, done: float) -> tuple[float, float]:
    """How many more tokens will an answer add? At least the first number, and up to the second number more.

    Similar answers take `expected` tokens on average, and nine of ten take at most `reserved`. This fits answers that
    end at random from some length on: an answer that has come that far still has the same mean ahead of it, whatever it
    has taken. An answer near its reserve may well outgrow it, and then adds a quarter of its length on average. It ends
    at `most` at the latest.
    """
    mean = max(0.0, reserved - expected) / LATE
    least = max(0.0, expected - mean - done)
    width = max(2 * mean, done / 2 - 2 * least)
    left = max(0.0, most - done)
    return min(least, left), min(width, max(0.0, left - least))


class Growing:
    """One request in the cache, in tokens. `grows`, `whole` and `spread` are per sequence."""

    __slots__ = ("age", "grows", "held", "sequences", "spread", "whole")

    def __init__(
        self, grows: float, held: float, sequences: int, whole: float, age: float, spread: float = 0.0
    ) -> None:
        self.grows = grows
        """What each sequence will add at least."""
        self.held = held
        """What it holds now, over all its sequences."""
        self.sequences = sequences
        self.whole = whole
        """What each sequence adds on average from its start to its end."""
        self.age = age
        """Time since its dispatch, in steps of the engine."""
        self.spread = spread
        """It may add any number of tokens from `grows` to `grows + spread`."""

    def work(self) -> float:
        """Token-steps from its start to its end."""
        at_start = self.held - self.sequences * (self.whole - self.grows - self.spread / 2)
        return self.whole * (at_start + self.sequences * self.whole / 2)

    def share_at(self, step: float) -> float:
        """Probability that it has not ended by this step."""
        if step <= self.grows:
            return 1.0
        return (self.grows + self.spread - step) / self.spread if step < self.grows + self.spread else 0.0


class _Stretch:
    """Up to the step `ends`: the mean of what is held, and its variance, as polynomials in the step."""

    __slots__ = ("ends", "h0", "h1", "h2", "v0", "v1", "v2")

    def __init__(self, ends: float, h0: float, h1: float, h2: float, v0: float, v1: float, v2: float) -> None:
        self.ends = ends
        self.h0, self.h1, self.h2 = h0, h1, h2
        self.v0, self.v1, self.v2 = v0, v1, v2


class KvForecast:
    """The dispatched requests of one backend, by when they end. Building it is O(n log n), each question O(n)."""

    def __init__(self, requests: Iterable[Growing]) -> None:
        self._youngest_first = sorted(requests, key=attrgetter("age"))
        self._stretches = _stretches(self._youngest_first)

    def peak_with(self, candidate: Growing, delay: float = 0.0, limit: float = inf) -> float:
        """Largest occupancy ahead, in tokens, if the candidate starts in `delay` steps and nothing starts after it.

        Requests that end before then make room for it. Above the `limit`, the first occupancy found is returned.
        """
        own_end = candidate.grows
        peak = 0.0
        is_counted = False
        for stretch in self._stretches:
            if stretch.ends < delay:
                continue
            if own_end <= stretch.ends and not is_counted:
                is_counted = True
                peak = max(peak, _level(stretch, candidate, own_end))
            peak = max(peak, _level(stretch, candidate, stretch.ends))
            if peak > limit:
                return peak
        return peak if is_counted else max(peak, candidate.held + candidate.sequences * own_end)

    def is_level_with(self, candidate: Growing, capacity_tokens: float) -> bool:
        """Would starts still be evenly spread if the candidate started now?

        Requests that start together end together. The cache is half empty at the start of such a wave and full at its
        end, and then the next wave starts together. With evenly spread starts the same cache holds more on average.

        A full cache gets through `capacity_tokens` token-steps per step. So within the last k steps, for every k, no
        more than k * `capacity_tokens` token-steps of work may have been started. Two amounts are allowed on top: the
        candidate itself, and part of what is missing in a cache that has become empty. Answers whose lengths differ by
        `spread` steps end that far apart, even if they start together.
        """
        work = candidate.work()
        level = sum([request.work() / max(request.whole, 1.0) for request in self._youngest_first]) / capacity_tokens
        missing = max(0.0, 1.0 - TOLERATED - level)
        ahead = work / capacity_tokens + candidate.whole * CATCHING_UP * missing + candidate.spread
        for request in self._youngest_first:
            if work > capacity_tokens * (request.age + ahead):
                return False
            work += request.work()
        return True


def _level(stretch: _Stretch, candidate: Growing, step: float) -> float:
    """Occupancy at this step: the mean plus one standard deviation."""
    share = candidate.share_at(step)
    held = stretch.h0 + (stretch.h1 + stretch.h2 * step) * step + share * (candidate.held + candidate.sequences * step)
    variance = stretch.v0 + (stretch.v1 + stretch.v2 * step) * step + share * (1.0 - share) * candidate.held**2
    return held + sqrt(max(0.0, variance))


def _stretches(requests: list[Growing]) -> list[_Stretch]:
    """The stretches of steps between two changes. A change is where a request ends, or where its end becomes
    possible.
    """
    h0 = h1 = h2 = v0 = v1 = v2 = last = 0.0
    changes: list[tuple[float, float, float, float, float, float, float]] = []
    for request in requests:
        held, sequences, begins, width = request.held, request.sequences, request.grows, request.spread
        h0, h1 = h0 + held, h1 + sequences
        if width < 1.0:
            changes.append((begins, -held, -sequences, 0.0, 0.0, 0.0, 0.0))
            last = max(last, begins)
            continue
        # The mean is (held + sequences * step) * p, where p is the probability of not having ended. It falls from 1 to
        # 0 over the width. The variance is held**2 * p * (1 - p).
        ends = begins + width
        m0, m1, m2 = held * ends / width, (sequences * ends - held) / width, -sequences / width
        q = (held / width) ** 2
        u0, u1, u2 = -q * begins * ends, q * (begins + ends), -q
        changes.append((begins, m0 - held, m1 - sequences, m2, u0, u1, u2))
        changes.append((ends, -m0, -m1, -m2, -u0, -u1, -u2))
        last = max(last, ends)
    changes += [(last / 2**look, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0) for look in range(1, LOOKS + 1)]
    changes.sort(key=itemgetter(0))
    stretches = []
    for step, m0, m1, m2, u0, u1, u2 in changes:
        stretches.append(_Stretch(step, h0, h1, h2, v0, v1, v2))
        h0, h1, h2 = h0 + m0, h1 + m1, h2 + m2
        v0, v1, v2 = v0 + u0, v1 + u1, v2 + u2
    return stretches
