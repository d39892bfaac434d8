"""Which entries are forgotten when a table that all tenants share is full? Those of the tenant that has most."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import islice
from typing import Final, TypeVar

PART: Final = 100
"""So many times is a full table forgotten in part until all of it is: so the look at all tenants is rare."""

K = TypeVar("K")
V = TypeVar("V")


def given_up(tables: Mapping[str, Mapping[K, V]], most: int) -> list[tuple[str, K]]:
    """A hundredth of `most` entries, each with its tenant: the oldest of the tenant that has most of them.

    Where no tenant has so many, the oldest one of each of as many tenants. `tables` has no empty one. O(tenants).
    """
    count = max(1, most // PART)
    tenant = max(tables, key=lambda name: (len(tables[name]), name))
    if len(tables[tenant]) >= count:
        return [(tenant, key) for key in islice(tables[tenant], count)]
    return [(name, next(iter(own))) for name, own in islice(tables.items(), count)]
