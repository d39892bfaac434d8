"""What was learned, as plain data that JSON can represent. It is checked row by row when it is read back."""

from __future__ import annotations

from typing import Any, Final, Protocol

ROWS_MAX = 100_000
"""More than is ever written."""
NUMBER_MAX: Final = 1 << 53
"""More than is ever counted. Beyond it a float no longer counts by ones, and far beyond it no float has room."""


class Learned(Protocol):
    """What a restart should not lose."""

    def snapshot(self) -> object:
        """What was learned, as plain data."""

    def read(self, learned: object) -> Any:
        """What `adopt` takes of a snapshot. ValueError if it is not valid."""

    def adopt(self, theirs: Any) -> None:
        """Take over from a snapshot what was seen more of there."""


def rows(learned: object, kinds: tuple[type, ...]) -> list[list[Any]]:
    """The rows of a table, each with one value per kind: str, int or float. Numbers are from 0 to `NUMBER_MAX`.

    ValueError, naming the row, if the data is anything else.
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
    """The values under these names. ValueError if one is missing."""
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
    return bool(0 <= value <= NUMBER_MAX)  # not so of what is not a number
