"""Snapshots of learned statistics, as plain data that JSON can represent. Reading one checks each row."""

from __future__ import annotations

from typing import Any, Final, Protocol

ROWS_MAX = 100_000
"""Rows of one table. Every table that is written is smaller."""
NUMBER_MAX: Final = 1 << 53
"""Largest number that is accepted. No real count reaches it, and a float cannot count by ones beyond it."""


class LearnedState(Protocol):
    """Learned statistics that survive a restart."""

    def snapshot(self) -> object:
        """Return the statistics as plain data."""

    def read(self, learned: object) -> Any:
        """Parse a snapshot for `adopt`. Raise ValueError if the snapshot is not valid."""

    def adopt(self, theirs: Any) -> None:
        """Replace each statistic for which the snapshot has more observations."""


def rows(learned: object, kinds: tuple[type, ...]) -> list[list[Any]]:
    """Return the rows of a table, each with one value per kind: str, int or float. Numbers are from 0 to `NUMBER_MAX`.

    Raise ValueError, which names the row, for any other data.
    """
    if not isinstance(learned, list) or len(learned) > ROWS_MAX:
        raise ValueError(f"a list of at most {ROWS_MAX} rows is expected")
    for number, row in enumerate(learned):
        if not isinstance(row, list) or len(row) != len(kinds):
            raise ValueError(f"row {number}: {len(kinds)} values are expected")
        for kind, value in zip(kinds, row, strict=True):
            if not _is_of(kind, value):
                raise ValueError(f"row {number}: {value!r:.60} is not a {kind.__name__} that could have been learned")
    return learned


def fields(learned: object, *names: str) -> list[Any]:
    """Return the values of an object under these names. Raise ValueError if one is missing."""
    if not isinstance(learned, dict):
        raise ValueError("an object is expected")
    missing = [name for name in names if name not in learned]
    if missing:
        raise ValueError(f"{', '.join(missing)} is missing")
    return [learned[name] for name in names]


def _is_of(kind: type, value: object) -> bool:
    if kind is str:
        return isinstance(value, str)
    if isinstance(value, bool) or not isinstance(value, int if kind is int else (int, float)):
        return False
    return bool(0 <= value <= NUMBER_MAX)  # False for NaN
