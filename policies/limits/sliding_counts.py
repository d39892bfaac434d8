"""What did each member of a population do within the last window? Sliding counts.

A count slides over two periods as long as the window. The count of the previous period fades as the present one goes
on. So a count costs O(1) time and memory. It is exact if the previous period was evenly filled.
"""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any

from policies.request import Limit


class Count:
    """What was counted for one member in one period, and in the previous one."""

    __slots__ = ("before", "engine_ms", "members", "period", "reported", "requests", "starts", "tokens")

    def __init__(self, before: Count | None, period: int = 0) -> None:
        self.starts = self.requests = self.tokens = self.engine_ms = self.members = 0
        self.period = period
        self.reported: Any = None
        """What other gateways know of it. Written by the code that reports to them."""
        self.before = before
        if before is not None:
            before.before = None


NO_COUNT = Count(None)


class SlidingCounts:
    """What did each member of a population do within the last `window_s`?

    Bounded: a member that was silent for two windows is forgotten, and of more than `members_max` members in one period
    the half that did least. So a client that invents members is freed of nothing that another member did. A clock that
    jumps, in either direction, starts the counts anew.
    """

    def __init__(self, window_s: float, *, members_max: int = 200_000) -> None:
        self.window_s = window_s
        self._members_max = members_max
        self.period = -(1 << 62)
        """Number of the present period."""
        self._counts: dict[Hashable, Count] = {}
        self._before: dict[Hashable, Count] = {}
        self._left = 1.0
        """The fraction of the previous period's counts that still counts."""
        self.epoch_s = 0.0
        """How far the clock that divides time into periods is ahead of `now`."""
        self.changed: dict[Count, Hashable] | None = None
        """Counts that were changed, each with its member. The code that reports to other gateways takes them out.
        Bounded: the oldest changes are dropped. None: no one takes them."""

    def __len__(self) -> int:
        return len(self._counts) + len(self._before)

    def at(self, now: float) -> None:
        """Move to this time: begin a new period if it is due."""
        period, self._left = self._period_of(now)
        if period != self.period:
            self._before = self._counts if period == self.period + 1 else {}
            self._counts = {}
            self.period = period

    def of(self, member: Hashable) -> Count:
        """A member's count in this period, to add to."""
        count = self._counts.get(member)
        if count is None:
            if len(self._counts) >= self._members_max:
                self._forget_least()
            count = self._counts[member] = Count(self._before.get(member), self.period)
        return count

    def _forget_least(self) -> None:
        """Forget the half of the members that did least in this period: by requests and by tokens, as parts of all."""
        counts = self._counts
        requests = sum([count.requests for count in counts.values()]) or 1
        tokens = sum([count.tokens for count in counts.values()]) or 1
        most_first = sorted(
            counts.items(), key=lambda item: item[1].requests / requests + item[1].tokens / tokens, reverse=True
        )
        self._counts = dict(most_first[: len(counts) // 2])

    def sliding(self, member: Hashable, now: float) -> tuple[float, float, float]:
        """A member's starts, requests and tokens within the window. A question: `now` may be in the future."""
        count, before, left = self._seen(member, now)
        return (
            count.starts + left * before.starts,
            count.requests + left * before.requests,
            count.tokens + left * before.tokens,
        )

    def limit(self, name: str, measure: str, member: Hashable, more: float, limit: float, now: float) -> Limit:
        """How much of a limit has a member used that wants `more` of a measure?

        `reset_s` says when it may have that much; 0 if now. `measure` is "starts", "requests", "tokens" or
        "engine_ms". A question: `now` may be in the future.
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
            # The present count begins to fade when its period ends. A request for more than the whole limit waits until
            # the count is gone.
            reset_s = self.window_s * (left + 1.0 - max(0.0, room) / count) if count else self.window_s
        left_over = max(0, min(int(limit), int(limit - count - fading)))
        return Limit(name, int(limit), left_over, reset_s, self.window_s)

    def members(self, member: Hashable, now: float) -> int:
        """How many were counted as part of this member, in this period or the previous one?"""
        count, before, _ = self._seen(member, now)
        return max(count.members, before.members)

    def _seen(self, member: Hashable, now: float) -> tuple[Count, Count, float]:
        """Its counts in the period of `now` and in the previous one, and the fraction of the latter that still
        counts.
        """
        period, left = self._period_of(now)
        if period == self.period:
            return *self._of_both(member), left
        if period == self.period + 1:
            return NO_COUNT, self._counts.get(member, NO_COUNT), left
        return NO_COUNT, NO_COUNT, left

    def _period_of(self, now: float) -> tuple[int, float]:
        """The number of its period, and the fraction of the previous one that still counts."""
        period, into_s = divmod(now + self.epoch_s, self.window_s)
        return int(period), 1.0 - into_s / self.window_s

    def _of_both(self, member: Hashable) -> tuple[Count, Count]:
        """Its counts in this period and in the previous one."""
        count = self._counts.get(member)
        if count is not None:
            return count, count.before or NO_COUNT
        return NO_COUNT, self._before.get(member, NO_COUNT)

    def note_change(self, member: Hashable, count: Count) -> None:
        """Something was added to this count, or taken back. What was counted two periods ago counts no more."""
        if self.changed is not None and count.period >= self.period - 1:
            self.changed[count] = member
            if len(self.changed) > self._members_max:
                del self.changed[next(iter(self.changed))]

    def counted(self, member: Hashable) -> tuple[Count, Count, float]:
        """Its counts in this period and in the previous one, and the fraction of the latter that still counts."""
        count, before = self._of_both(member)
        return count, before, self._left
