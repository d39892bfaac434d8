"""How is a long text read while others wait? By generators that yield after every window of it.

The caller of a generator decides when it goes on: `Readings` for a large body, `at_once` for a small one.
"""

from __future__ import annotations

from collections.abc import Generator
from typing import Final, TypeVar

T = TypeVar("T")
Slices = Generator[None, None, None]
WINDOW_BYTES: Final = 1 << 16
"""Read between two yields: a fraction of a millisecond, whatever it holds."""


def at_once(work: Generator[None, None, T]) -> T:
    """Do all of it now."""
    while True:
        try:
            next(work)
        except StopIteration as end:
            found: T = end.value
            return found


def find(body: bytes, wanted: bytes, at: int, end: int) -> Generator[None, None, int]:
    """Where is this first, between these bounds? -1: nowhere."""
    overlap = len(wanted) - 1
    while at < end:
        found = body.find(wanted, at, min(end, at + WINDOW_BYTES + overlap))
        if found >= 0:
            return found
        at += WINDOW_BYTES
        yield
    return -1
