"""What did each member of a population do within the last window? Sliding counts.

A count slides over two periods of the window: what was counted in the period before fades as the present one goes on.
So a count costs O(1) in time and memory, and is exact where the earlier period was even.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from itertools import islice
from math import ceil

from policies.replicas.messages import Counted, Tally
from policies.request import Limit

__all__ = ["MEASURES", "NO_COUNT", "Count", "SlidingCounts", "hear"]


class Count:
    """What was counted of one member in one period, and in the one before it."""

    __slots__ = ("before", "last", "members", "requests", "starts", "tokens", "told", "weight")

    def __init__(self, before: Count | None, weight: float) -> None:
        self.starts = self.requests = self.tokens = self.members = 0
        self.told: tuple[int, int, int] | None = None
        """Starts, requests and tokens that other gateways have heard of, with what is reserved; None: nothing yet."""
        self.last: tuple[int, int, int] | None = None
        """What was counted when they were told."""
        self.weight = weight
        self.before = before
        if before is not None:
            before.before = None


NO_COUNT = Count(None, 1.0)
MEASURES = ("starts", "requests", "tokens")


class SlidingCounts:
    """What did each member of a population do within the last `window_s`?

    Bounded: members that were silent for two windows are forgotten; more than `members_max` in one period end it early.
    A clock that jumps, in either direction, begins anew.
    """

    def __init__(self, window_s: float, *, members_max: int = 200_000) -> None:
        self.window_s = window_s
        self.ends_s = float("-inf")
        """When the present period ends."""
        self._members_max = members_max
        self._period = float("-inf")
        self._counts: dict[Hashable, Count] = {}
        self._before: dict[Hashable, Count] = {}
        self._left = 1.0
        """The part of the counts before that has not faded."""
        self._name = ""
        self._epoch_s = 0.0
        self._untold: dict[Count, tuple[Hashable, int]] | None = None
        """Counts, of which member and period, that changed since other gateways heard of them; None: no others."""

    def __len__(self) -> int:
        return len(self._counts) + len(self._before)

    def at(self, now: float) -> None:
        """It is this time."""
        left = (self.ends_s - now) / self.window_s
        if 0.0 < left <= 1.0:
            self._left = left
            return
        period, into_s = divmod(now + self._epoch_s, self.window_s)
        self._left = 1.0 - into_s / self.window_s
        if period != self._period:
            self._before = self._counts if period == self._period + 1 else {}
            self._counts = {}
            self._period = period
            self.ends_s = (period + 1) * self.window_s - self._epoch_s

    def of(self, member: Hashable, weight: float, learn: Callable[[Count], None] | None = None) -> Count:
        """Its count in this period, to add to. `learn` hears what it did in the period before, the first time."""
        count = self._counts.get(member)
        if count is None:
            if len(self._counts) >= self._members_max:
                self._before, self._counts = self._counts, {}
            before = self._before.get(member)
            count = self._counts[member] = Count(before, weight)
            if before is not None and learn is not None:
                learn(before)
        return count

    def sliding(self, member: Hashable) -> tuple[float, float, float]:
        """Its starts, requests and tokens within the window."""
        left = self._left
        count, before = self._of_both(member)
        return (
            count.starts + left * before.starts,
            count.requests + left * before.requests,
            count.tokens + left * before.tokens,
        )

    def limit(self, name: str, measure: str, member: Hashable, more: float, limit: float) -> Limit:
        """Where does a member stand that wants so much more of a measure? `reset_s`: when it may; 0 if it may now.

        `measure` is "starts", "requests" or "tokens".
        """
        count, before = (getattr(one, measure) for one in self._of_both(member))
        fading = before * self._left
        room = limit - more
        if count + fading <= room:
            reset_s = 0.0
        elif count <= room:
            reset_s = self.window_s * (self._left - (room - count) / before)
        else:
            # The present count begins to fade when its period ends. More than the limit at once waits until it is gone.
            reset_s = self.window_s * (self._left + 1.0 - max(0.0, room) / count) if count else self.window_s
        return Limit(name, int(limit), max(0, min(int(limit), int(limit - count - fading))), reset_s)

    def own(self, member: Hashable, measure: str) -> tuple[float, float, bool]:
        """Of a measure: what was counted here beyond what was told; what all told, and whether that is known at all."""
        count, before = self._of_both(member)
        told = count.told[MEASURES.index(measure)] if count.told is not None else 0
        known = told + getattr(before, measure) * self._left
        return getattr(count, measure) - told, known, count.told is not None

    def members(self, member: Hashable) -> int:
        """How many were counted as being part of this member, in this period or the one before?"""
        return max(one.members for one in self._of_both(member))

    def _of_both(self, member: Hashable) -> tuple[Count, Count]:
        """Its counts in this period and in the one before."""
        count = self._counts.get(member)
        if count is not None:
            return count, count.before or NO_COUNT
        return NO_COUNT, self._before.get(member, NO_COUNT)

    # --- with other gateways ---

    def share(self, name: str, epoch_s: float) -> None:
        """From now on there may be others that count the same; `epoch_s`: by how much a common clock is ahead."""
        self._name, self._epoch_s = name, epoch_s
        self._untold = {}
        self.ends_s = float("-inf")

    def changed(self, member: Hashable, count: Count) -> None:
        """Something was counted: others are to hear of it. While nobody can be told, the oldest are given up first."""
        if self._untold is not None:
            self._untold[count] = (member, int(self._period))
            if len(self._untold) > self._members_max:
                del self._untold[next(iter(self._untold))]

    def tell(
        self, most: int, reserve: Callable[[Hashable, Count], tuple[int, int, int]] | None = None
    ) -> tuple[list[Count], list[Tally]]:
        """What was counted since the last time, of at most so many.

        `reserve`: how much is to be told as if it were counted, so that so much may be without asking? It is taken back
        when nothing is counted any more.
        """
        counts: list[Count] = []
        tallies: list[Tally] = []
        untold = self._untold or {}
        for count in list(islice(untold, most)):
            member, period = untold.pop(count)
            told = count.told or (0, 0, 0)
            now = (count.starts, count.requests, count.tokens)
            if reserve is not None and period == self._period and count.last != now:
                extra = reserve(member, count)
                if any(extra):
                    untold[count] = (member, period)
            else:
                extra = (0, 0, 0)
            count.last = now
            telling = (now[0] + extra[0], now[1] + extra[1], now[2] + extra[2])
            counts.append(count)
            starts, requests, tokens = telling[0] - told[0], telling[1] - told[1], telling[2] - told[2]
            name, ttl_s = f"{self._name}:{_joined(member)}", ceil(3 * self.window_s)
            tallies.append(Tally(name, period, ttl_s, starts, requests, tokens, told, count.told is None))
            count.told = telling
        return counts, tallies


def hear(counts: Sequence[Count], counted: Sequence[Counted]) -> None:
    """What all gateways together counted, as of what was told."""
    for count, (starts, requests, tokens, *before) in zip(counts, counted, strict=True):
        told = count.told or (0, 0, 0)
        more = (starts - told[0], requests - told[1], tokens - told[2])
        count.starts += more[0]
        count.requests += more[1]
        count.tokens += more[2]
        count.told = (starts, requests, tokens)
        if count.last is not None:
            count.last = (count.last[0] + more[0], count.last[1] + more[1], count.last[2] + more[2])
        if any(before):
            earlier = count.before = Count(None, count.weight)
            earlier.starts, earlier.requests, earlier.tokens = before


def _joined(member: Hashable) -> str:
    return "\x1f".join(member) if isinstance(member, tuple) else str(member)
