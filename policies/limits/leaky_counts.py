"""Who does something too often? Leaky counts: so much at once, and after that so much per second.

Where `sliding_counts.py` answers what was done within a window, this answers when one more may be done, in one number
for each member.
"""

from __future__ import annotations

from typing import Final

MEMBERS_MAX: Final = 10_000


class LeakyCounts:
    """What did each member do that still counts? Bounded: who did nothing for longest is forgotten first."""

    __slots__ = ("_at_once_max", "_counts", "_members_max", "_per_s")

    def __init__(self, per_s: float, at_once_max: float, *, members_max: int = MEMBERS_MAX) -> None:
        """`at_once_max`: at least 1."""
        self._members_max = members_max
        self._per_s = per_s
        self._at_once_max = at_once_max
        self._counts: dict[str, tuple[float, float]] = {}
        """The count, and when it was that; who did something last stands last."""

    def __bool__(self) -> bool:
        return bool(self._counts)

    def take(self, member: str, now: float) -> float:
        """The member does it, and 0 is the answer; or it may not yet, and the answer is how long it has to wait."""
        count = self._count(member, now)
        if count + 1.0 > self._at_once_max:
            return self.wait_s(member, now)
        self._counts.pop(member, None)
        if len(self._counts) >= self._members_max:
            del self._counts[next(iter(self._counts))]
        self._counts[member] = (count + 1.0, now)
        return 0.0

    def wait_s(self, member: str, now: float) -> float:
        """How long until the member may do it again? 0: now."""
        return max(0.0, self._count(member, now) + 1.0 - self._at_once_max) / self._per_s

    def _count(self, member: str, now: float) -> float:
        count, then = self._counts.get(member, (0.0, now))
        return max(0.0, count - (now - then) * self._per_s)
