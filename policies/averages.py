"""How much does one value count in a moving average?"""

from __future__ import annotations

from typing import Final

QUICK: Final = 0.1
"""About the last ten count."""
USUAL: Final = 0.05
"""About the last twenty count."""
STEADY: Final = 0.02
"""About the last fifty count."""


class Mean:
    """A moving average over the last fifty values. The first values count alike."""

    __slots__ = ("seen", "value")

    def __init__(self) -> None:
        self.seen = 0
        self.value = 0.0

    def learn(self, value: float) -> None:
        """Count one more value."""
        self.seen += 1
        self.value += max(STEADY, 1.0 / self.seen) * (value - self.value)
