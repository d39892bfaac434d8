"""Fairness index and percentiles."""

from __future__ import annotations

from collections.abc import Collection
from math import ceil


def jain(values: Collection[float]) -> float:
    """Return Jain's index of fairness: 1 when all are equal or all have nothing, 1/n when one has everything."""
    squares = sum(value * value for value in values)
    return sum(values) ** 2 / (len(values) * squares) if squares else 1.0


def quantiles(values: Collection[float], *parts: int) -> dict[str, float] | None:
    """Return the percentiles p50, p95 or others of these values by their names; None for no values."""
    ordered = sorted(values)
    return {f"p{part}": percentile(ordered, part / 100) for part in parts} if ordered else None


def percentile(values: Collection[float], share: float) -> float:
    """Return the nearest-rank percentile of `share` (0 to 1), one of the values."""
    ordered = sorted(values)
    return ordered[max(0, ceil(share * len(ordered)) - 1)]
