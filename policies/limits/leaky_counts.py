"""Who does something too often? Leaky buckets: a burst of limited size, then a limited rate per second.

`sliding_counts.py` says what was done within a window. A leaky count says when the next event is allowed, from one
number for each member.
"""

from __future__ import annotations

from typing import Final

MEMBERS_MAX: Final = 10_000


class LeakyCounts:
    """The events of each member that still count. Bounded: the member longest without an event is forgotten first."""

    __slots__ = ("_at_once_max", "_counts", "_members_max", "_per_s")

    def __init__(self, per_s: float, at_once_max: float, *, members_max: int = MEMBERS_MAX) -> None:
        """Allow `at_once_max` (at least 1) events at once, and `per_s` events a second after that."""
        self._members_max = members_max
        self._per_s = per_s
        self._at_once_max = at_once_max
        self._counts: dict[str, tuple[float, float]] = {}
        """Count of each member and the time of that count; the latest event comes last."""

    def __bool__(self) -> bool:
        return bool(self._counts)

    def take(self, member: str, now: float) -> float:
        """Count an event of the member and return 0.0, or return the seconds that the member has to wait."""
        count = self._count(member, now)
        if count + 1.0 > self._at_once_max:
            return self.wait_s(member, now)
        self._counts.pop(member, None)
        if len(self._counts) >= self._members_max:
            del self._counts[next(iter(self._counts))]
        self._counts[member] = (count + 1.0, now)
        return 0.0

    def wait_s(self, member: str, now: float) -> float:
        """Return the seconds until the next event of the member is allowed; 0.0 if it is allowed now."""
        return max(0.0, self._count(member, now) + 1.0 - self._at_once_max) / self._per_s

    def _count(self, member: str, now: float) -> float:
        count, then = self._counts.get(member, (0.0, now))
        return max(0.0, count - (now - then) * self._per_s)
