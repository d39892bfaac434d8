"""How long does an engine take to start? Learned from earlier starts of a pool that had no engine in service.

A start begins when a request first waits while no engine is in service, because an autoscaler reacts then. The start
ends when an engine comes into service.
"""

from __future__ import annotations

from typing import Any

from policies.averages import QUICK
from policies.plain_data import rows


class ColdStartEstimator:
    """Estimator of a pool's cold-start time.

    A cold start lasts from the first request that finds no engine in service until an engine is in service.
    """

    def __init__(self) -> None:
        self.s_max = 0.0
        """Longest start that requests wait for; 0 if requests are refused at once when no engine is in service."""
        self._since_s = -1.0
        """Time at which the present start began; -1 if none is under way."""
        self._usual_s = self._deviation_s = 0.0
        self._starts = 0

    @property
    def usual_s(self) -> float:
        """Return the usual seconds of a start; `s_max` until one was seen."""
        return self._usual_s if self._starts else self.s_max

    def left_s(self, now: float) -> float:
        """Return the expected seconds until an engine is in service.

        A start near its usual end is expected to take the usual deviation longer, and a late start as much longer as
        it is late.
        """
        if self._since_s < 0.0 or not self.s_max:
            return 0.0
        elapsed_s = now - self._since_s
        return max(abs(self.usual_s - elapsed_s), self._deviation_s)

    def allowance_s(self) -> float:
        """Return how much longer a request may wait than with an engine in service."""
        return self.s_max if self._since_s >= 0.0 else 0.0

    def begin(self, now: float) -> bool:
        """Begin a start, unless one is under way that may still succeed. Return whether requests wait for it."""
        if self._since_s < 0.0 or now - self._since_s > self.s_max:
            self._since_s = now if self.s_max else -1.0
        return self.s_max > 0.0

    def complete(self, now: float) -> bool:
        """Learn from a start that ended, because an engine is in service. Return whether one was under way."""
        if self._since_s < 0.0:
            return False
        took_s, self._since_s = now - self._since_s, -1.0
        part = max(QUICK, 1.0 / (self._starts + 1))
        if self._starts:
            self._deviation_s += max(QUICK, 1.0 / self._starts) * (abs(took_s - self._usual_s) - self._deviation_s)
        self._usual_s += part * (took_s - self._usual_s)
        self._starts += 1
        return True

    # --- snapshots ---

    def snapshot(self) -> list[list[object]]:
        """Return one row of [usual seconds, their deviation, starts]."""
        return [[self._usual_s, self._deviation_s, self._starts]]

    def read(self, learned: object) -> list[list[Any]]:
        """Parse a snapshot for `adopt`. Raise ValueError if the snapshot is not valid."""
        return rows(learned, (float, float, int))

    def adopt(self, theirs: list[list[Any]]) -> None:
        """Replace the usual time if the snapshot has more starts."""
        for usual_s, deviation_s, starts in theirs:
            if starts > self._starts:
                self._usual_s, self._deviation_s, self._starts = float(usual_s), float(deviation_s), starts
