"""Which entries are forgotten when a table that all tenants share is full? Those of the tenant with most entries."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import islice
from typing import Final, TypeVar

PART: Final = 100
"""Fraction of a full table that is forgotten at once is 1 / PART, so that the scan of all tenants is rare."""

K = TypeVar("K")
V = TypeVar("V")


def given_up(tables: Mapping[str, Mapping[K, V]], most: int) -> list[tuple[str, K]]:
    """Return the entries to forget, each with its tenant: the oldest `most / PART` entries of the largest tenant.

    If no tenant has that many, the oldest entry of each of that many tenants. No table may be empty. O(tenants).
    """
    count = max(1, most // PART)
    tenant = max(tables, key=lambda name: (len(tables[name]), name))
    if len(tables[tenant]) >= count:
        return [(tenant, key) for key in islice(tables[tenant], count)]
    return [(name, next(iter(own))) for name, own in islice(tables.items(), count)]
