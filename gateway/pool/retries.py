"""May a request that an engine has had be sent to another one? Only while few are: retries must not become the load."""

from __future__ import annotations

from typing import Final

PER_REQUEST: Final = 0.1
AT_START: Final = 10.0
SAVED_MAX: Final = 100.0
"""What many requests without a retry save up: when an engine goes down, all that it had go to others at once."""


class RetryBudget:
    """Of a pool: at most a tenth of its requests, and a few before there were any."""

    __slots__ = ("_left",)

    def __init__(self) -> None:
        self._left = AT_START

    def sent(self) -> None:
        """A request was sent for the first time."""
        if self._left < SAVED_MAX:
            self._left += PER_REQUEST

    def take(self) -> bool:
        """Is there one left? Takes it."""
        if self._left < 1.0:
            return False
        self._left -= 1.0
        return True
