"""The forecast of `policies.capacity.kv_forecast` made anew, end by end: what the kept one must say."""

from __future__ import annotations

from collections.abc import Iterable
from math import inf, sqrt
from operator import attrgetter, itemgetter

from policies.capacity.kv_forecast import Growing

CATCHING_UP, LOOKS, TOLERATED = 0.5, 6, 0.1


class _Stretch:
    """Up to the step `ends`: the mean of what is held, and its variance, as polynomials in the step."""

    __slots__ = ("ends", "h0", "h1", "h2", "v0", "v1", "v2")

    def __init__(self, ends: float, h0: float, h1: float, h2: float, v0: float, v1: float, v2: float) -> None:
        self.ends = ends
        self.h0, self.h1, self.h2 = h0, h1, h2
        self.v0, self.v1, self.v2 = v0, v1, v2


class ExactForecast:
    """The dispatched requests of one backend, by when they end."""

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
        q = ((held + sequences * begins / 2) / width) ** 2
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
