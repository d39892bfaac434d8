"""What did each member of a population do within the last window? Sliding counts.

A count slides over two periods of the window: what was counted in the period before fades as the present one goes on.
So a count costs O(1) in time and memory, and is exact where the earlier period was even.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Any

from policies.request import Limit

__all__ = ["MEASURES", "NO_COUNT", "Count", "SlidingCounts"]


class Count:
    """What was counted of one member in one period, and in the one before it."""

    __slots__ = ("before", "members", "requests", "starts", "tokens", "told", "weight")

    def __init__(self, before: Count | None, weight: float) -> None:
        self.starts = self.requests = self.tokens = self.members = 0
        self.weight = weight
        self.told: Any = None
        """What other gateways have heard of it: kept by whoever tells them."""
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
        self.epoch_s = 0.0
        """By how much the clock by which periods begin is ahead of `now`. Whoever sets it calls `begin_anew`."""
        self.changed: dict[Count, tuple[Hashable, int]] | None = None
        """Counts that were added to, each with its member and period, for whoever takes them out of it. Bounded: the
        ones that changed longest ago are dropped. None: nobody does."""

    def __len__(self) -> int:
        return len(self._counts) + len(self._before)

    def at(self, now: float) -> None:
        """It is this time."""
        left = (self.ends_s - now) / self.window_s
        if 0.0 < left <= 1.0:
            self._left = left
            return
        period, into_s = divmod(now + self.epoch_s, self.window_s)
        self._left = 1.0 - into_s / self.window_s
        if period != self._period:
            self._before = self._counts if period == self._period + 1 else {}
            self._counts = {}
            self._period = period
            self.ends_s = (period + 1) * self.window_s - self.epoch_s

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

    def sliding(self, member: Hashable, now: float) -> tuple[float, float, float]:
        """Its starts, requests and tokens within the window. A question: it may be of a later time."""
        count, before, left = self._seen(member, now)
        return (
            count.starts + left * before.starts,
            count.requests + left * before.requests,
            count.tokens + left * before.tokens,
        )

    def limit(self, name: str, measure: str, member: Hashable, more: float, limit: float, now: float) -> Limit:
        """Where does a member stand that wants so much more of a measure? `reset_s`: when it may; 0 if it may now.

        `measure` is "starts", "requests" or "tokens". A question: it may be of a later time.
        """
        one, earlier, left = self._seen(member, now)
        count, before = getattr(one, measure), getattr(earlier, measure)
        fading = before * left
        room = limit - more
        if count + fading <= room:
            reset_s = 0.0
        elif count <= room:
            reset_s = self.window_s * (left - (room - count) / before)
        else:
            # The present count begins to fade when its period ends. More than the limit at once waits until it is gone.
            reset_s = self.window_s * (left + 1.0 - max(0.0, room) / count) if count else self.window_s
        return Limit(name, int(limit), max(0, min(int(limit), int(limit - count - fading))), reset_s)

    def members(self, member: Hashable) -> int:
        """How many were counted as being part of this member, in this period or the one before?"""
        return max(one.members for one in self._of_both(member))

    def _seen(self, member: Hashable, now: float) -> tuple[Count, Count, float]:
        """Its counts in the period of this time and in the one before, and the part of the latter that still counts."""
        left = (self.ends_s - now) / self.window_s
        if 0.0 < left <= 1.0:
            return *self._of_both(member), left
        period, into_s = divmod(now + self.epoch_s, self.window_s)
        left = 1.0 - into_s / self.window_s
        if period == self._period:
            return *self._of_both(member), left
        if period == self._period + 1:
            return NO_COUNT, self._counts.get(member, NO_COUNT), left
        return NO_COUNT, NO_COUNT, left

    def _of_both(self, member: Hashable) -> tuple[Count, Count]:
        """Its counts in this period and in the one before."""
        count = self._counts.get(member)
        if count is not None:
            return count, count.before or NO_COUNT
        return NO_COUNT, self._before.get(member, NO_COUNT)

    def begin_anew(self) -> None:
        """Periods begin by another clock from now on."""
        self.ends_s = float("-inf")

    def note_change(self, member: Hashable, count: Count) -> None:
        """Something was added to this count."""
        if self.changed is not None:
            self.changed[count] = (member, int(self._period))
            if len(self.changed) > self._members_max:
                del self.changed[next(iter(self.changed))]

    @property
    def period(self) -> int:
        """Number of the present period."""
        return int(self._period)

    def counted(self, member: Hashable) -> tuple[Count, Count, float]:
        """What was counted of it in this period and in the one before, and the part of the latter that still counts."""
        count, before = self._of_both(member)
        return count, before, self._left
