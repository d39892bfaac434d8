"""Who has presented too many wrong keys? Addresses whose further keys are not looked at for a while."""

from __future__ import annotations

from typing import Final

__all__ = ["FailedKeys"]

ADDRESSES_MAX: Final = 10_000
AT_ONCE_MAX: Final = 20
FORGIVEN_PER_S: Final = 0.2


class FailedKeys:
    """Wrong keys by address: so many at once, and after that one every few seconds."""

    __slots__ = ("_counts",)

    def __init__(self) -> None:
        self._counts: dict[str, tuple[float, float]] = {}
        """How many are not forgiven yet, and when that was so; who failed last stands last."""

    def __bool__(self) -> bool:
        return bool(self._counts)

    def add(self, address: str, now: float) -> None:
        count = self._count(address, now)
        self._counts.pop(address, None)
        if len(self._counts) >= ADDRESSES_MAX:
            del self._counts[next(iter(self._counts))]
        self._counts[address] = (min(count + 1.0, AT_ONCE_MAX + 1.0), now)

    def wait_s(self, address: str, now: float) -> float:
        """How long until a key from there is looked at again?"""
        return max(0.0, self._count(address, now) - AT_ONCE_MAX) / FORGIVEN_PER_S

    def _count(self, address: str, now: float) -> float:
        count, then = self._counts.get(address, (0.0, now))
        return max(0.0, count - (now - then) * FORGIVEN_PER_S)
