"""A budget of retries at other engines, so that retries never become the load."""

from __future__ import annotations

from typing import Final

PER_REQUEST: Final = 0.1
AT_START: Final = 10.0
SAVED_MAX: Final = 100.0
"""Most saved retries: when an engine goes down, all of its requests go to others at once."""


class RetryBudget:
    """The retry budget of a pool: a tenth of its requests, and a few at the start."""

    __slots__ = ("_left",)

    def __init__(self) -> None:
        self._left = AT_START

    def sent(self) -> None:
        """Count the first dispatch of a request."""
        if self._left < SAVED_MAX:
            self._left += PER_REQUEST

    def take(self) -> bool:
        """Spend one retry. Return False if the budget is empty."""
        if self._left < 1.0:
            return False
        self._left -= 1.0
        return True
