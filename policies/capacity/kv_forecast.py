"""How full will a KV cache get if one more request starts now? Looks ahead over what is dispatched.

All sequences grow a token a step until they end. Occupancy therefore rises until one ends and falls when it does, so
its peak is at one of the ends (the form of LightLLM's admission check). Of most answers only their like is known: then
an end is as likely at any step of a stretch, what is held at a step is a sum over many, and it is taken as its mean and
one standard deviation. So what is held back against long answers grows with the root of their number.
"""

from __future__ import annotations

from collections.abc import Iterable
from math import inf, sqrt
from operator import attrgetter, itemgetter
from typing import Final

__all__ = ["Growing", "KvForecast", "still_to_come"]


AHEAD: Final = 0.2
"""How far starts may run ahead of an even spread, as a share of the distance between two of them."""
TOLERATED: Final = 0.1
"""Share of the capacity that may be missing before starts run further ahead to fill it."""
CATCHING_UP: Final = 0.5
"""How much of what is missing beyond that may start at once; the rest is spread, so that a wave halves each time."""
LATE: Final = 1.3
"""By how many times its mean does one in ten of what ends at random come later than the mean? ln 10 - 1."""
LOOKS: Final = 6
"""Where ends are spread, the way to the last one is also looked at after a half of it, a quarter, and so on."""


def still_to_come(expected: float, reserved: float, most: float, done: float) -> tuple[float, float]:
    """How many tokens will an answer still add? At least the first number; anywhere up to the second more.

    Its like take `expected` in the mean and nine of ten stay within `reserved`. That is as if they ended at random from
    some length on: whoever has come so far has as much to go, whatever is behind it. One that nears its reserve may
    well outgrow it, and adds a quarter of what it has taken, in the mean. It ends at `most` at the latest.
    """
    mean = max(0.0, reserved - expected) / LATE
    least = max(0.0, expected - mean - done)
    width = max(2 * mean, done / 2 - 2 * least)
    left = max(0.0, most - done)
    return min(least, left), min(width, max(0.0, left - least))


class Growing:
    """One request in the cache. Tokens; `grows`, `whole` and `spread` are per sequence."""

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
        """What each sequence adds from its start to its end, in the mean."""
        self.age = age
        """Since it was dispatched, in steps of the engine."""
        self.spread = spread
        """It may add anything up to so much more than `grows`."""

    def work(self) -> float:
        """Token-steps it takes from its start to its end."""
        at_start = self.held - self.sequences * (self.whole - self.grows - self.spread / 2)
        return self.whole * (at_start + self.sequences * self.whole / 2)

    def share_at(self, step: float) -> float:
        """How likely is it that it has not ended?"""
        if step <= self.grows:
            return 1.0
        return (self.grows + self.spread - step) / self.spread if step < self.grows + self.spread else 0.0


class _Stretch:
    """Until the step `ends`: what is held in the mean, and its variance, as polynomials of the step."""

    __slots__ = ("ends", "h0", "h1", "h2", "v0", "v1", "v2")

    def __init__(self, ends: float, h0: float, h1: float, h2: float, v0: float, v1: float, v2: float) -> None:
        self.ends = ends
        self.h0, self.h1, self.h2 = h0, h1, h2
        self.v0, self.v1, self.v2 = v0, v1, v2


class KvForecast:
    """What is dispatched to one backend, looked at from its ends. Building it is O(n log n), each question O(n)."""

    def __init__(self, requests: Iterable[Growing]) -> None:
        self._youngest_first = sorted(requests, key=attrgetter("age"))
        self._stretches = _stretches(self._youngest_first)

    def peak_with(self, candidate: Growing, delay: float = 0.0, limit: float = inf) -> float:
        """Largest occupancy ahead, in tokens, if the candidate starts in `delay` steps and nothing after it.

        What ends until then makes room for it. Beyond the `limit`, the first occupancy that is found.
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
        """Would starts still be spread evenly, if this one came now?

        Requests that start together end together: the cache is half empty at the start of such a wave and full at its
        end, and the next wave starts as one. Evenly spread, the same cache holds more at any time. A full cache gets
        through `capacity_tokens` token-steps a step, so within the last so many steps no more work may have been
        started than that, but for the candidate itself and, in a cache that has become empty, for part of what is
        missing. Answers that differ in length by `spread` steps end so far apart even if they start together.
        """
        work = candidate.work()
        level = sum([request.work() / max(request.whole, 1.0) for request in self._youngest_first]) / capacity_tokens
        missing = max(0.0, 1.0 - TOLERATED - level)
        ahead = work / capacity_tokens * (1.0 + AHEAD) + candidate.whole * CATCHING_UP * missing + candidate.spread
        for request in self._youngest_first:
            if work > capacity_tokens * (request.age + ahead):
                return False
            work += request.work()
        return True


def _level(stretch: _Stretch, candidate: Growing, step: float) -> float:
    """What is held at this step: the mean and a standard deviation."""
    share = candidate.share_at(step)
    held = stretch.h0 + (stretch.h1 + stretch.h2 * step) * step + share * (candidate.held + candidate.sequences * step)
    variance = stretch.v0 + (stretch.v1 + stretch.v2 * step) * step + share * (1.0 - share) * candidate.held**2
    return held + sqrt(max(0.0, variance))


def _stretches(requests: list[Growing]) -> list[_Stretch]:
    """From one step at which somebody ends, or may begin to, to the next."""
    h0 = h1 = h2 = v0 = v1 = v2 = last = 0.0
    changes: list[tuple[float, float, float, float, float, float, float]] = []
    for request in requests:
        held, sequences, begins, width = request.held, request.sequences, request.grows, request.spread
        h0, h1 = h0 + held, h1 + sequences
        if width < 1.0:
            changes.append((begins, -held, -sequences, 0.0, 0.0, 0.0, 0.0))
            last = max(last, begins)
            continue
        # (held + sequences * step) times the share that is left, which falls from 1 to 0 over the width; the variance
        # is held**2 * share * (1 - share).
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
