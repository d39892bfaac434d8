"""How much does the newest value count in a moving average?"""

from __future__ import annotations

from typing import Final

QUICK: Final = 0.1
"""Averages over about the last 10 values."""
USUAL: Final = QUICK / 2
"""Averages over about the last 20 values."""
STEADY: Final = QUICK / 5
"""Averages over about the last 50 values."""


class MovingAverage:
    """A moving average over about the last 50 values. The first 50 values have equal weight."""

    __slots__ = ("seen", "value")

    def __init__(self, value: float = 0.0, seen: int = 0) -> None:
        self.value = value
        self.seen = seen

    def learn(self, value: float) -> None:
        """Add a value."""
        self.seen += 1
        self.value += max(STEADY, 1.0 / self.seen) * (value - self.value)
