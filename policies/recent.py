"""Which entries of a table with a bound are forgotten? Those that were used least recently.

Of a table that all tenants share, those of the tenant with most entries.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Mapping
from itertools import islice
from typing import Any, Final, TypeVar

PART: Final = 100
"""Fraction of a full table that is forgotten at once is 1 / PART, so that the scan of all tenants is rare."""

K = TypeVar("K")
V = TypeVar("V")


def touch(table: OrderedDict[K, V], key: K, new: Callable[[], V], most: int) -> V:
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


def given_up(tables: Mapping[str, Mapping[K, V]], most: int) -> list[tuple[str, K]]:
    """Return the entries to forget, each with its tenant: the oldest `most / PART` entries of the largest tenant.

    If no tenant has that many, the oldest entry of each of that many tenants. No table may be empty. O(tenants).
    """
    count = max(1, most // PART)
    tenant = max(tables, key=lambda name: (len(tables[name]), name))
    if len(tables[tenant]) >= count:
        return [(tenant, key) for key in islice(tables[tenant], count)]
    return [(name, next(iter(own))) for name, own in islice(tables.items(), count)]
