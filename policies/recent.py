"""Which entries of a table with a bound are forgotten? Those that were used least recently."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

K = TypeVar("K")
V = TypeVar("V")


def used(table: OrderedDict[K, V], key: K, new: Callable[[], V], most: int) -> V:
    """Return the entry of this key, created if missing, and mark it as the latest of at most `most` entries."""
    entry = table.get(key)
    if entry is None:
        entry = table[key] = new()
        trim(table, most)
    else:
        table.move_to_end(key)
    return entry


def trim(table: OrderedDict[K, V], most: int) -> None:
    """Forget the oldest entries beyond `most`."""
    while len(table) > most:
        table.popitem(last=False)


def adopt(table: OrderedDict[K, Any], theirs: Mapping[K, Any], most: int) -> None:
    """Replace each entry that another table has from more observations (`seen`)."""
    for key, known in theirs.items():
        own = table.get(key)
        if own is None or own.seen < known.seen:
            table[key] = known
    trim(table, most)
