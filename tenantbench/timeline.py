"""Sets of intervals, and service over time."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable
from itertools import accumulate
from statistics import linear_regression

Interval = tuple[float, float]


def union(intervals: Iterable[Interval], gap_s: float = 0.0) -> list[Interval]:
    """Return disjoint intervals in order; those nearer than `gap_s` become one."""
    merged: list[Interval] = []
    for begin, end in sorted(intervals):
        if end <= begin:
            continue
        if merged and begin - merged[-1][1] <= gap_s:
            merged[-1] = (merged[-1][0], max(end, merged[-1][1]))
        else:
            merged.append((begin, end))
    return merged


def intersection(first: list[Interval], second: list[Interval]) -> list[Interval]:
    """Return the times in both of two unions."""
    both, i, j = [], 0, 0
    while i < len(first) and j < len(second):
        begin, end = max(first[i][0], second[j][0]), min(first[i][1], second[j][1])
        if begin < end:
            both.append((begin, end))
        if first[i][1] < second[j][1]:
            i += 1
        else:
            j += 1
    return both


def length(intervals: Iterable[Interval]) -> float:
    return sum(end - begin for begin, end in intervals)


class Service:
    """Cumulative service of one tenant."""

    def __init__(self, steps: list[tuple[float, float]]) -> None:
        """`steps`: times in order, and the service that ended then."""
        self.times = [time for time, _ in steps]
        self._sums = [0.0, *accumulate(amount for _, amount in steps)]

    def until(self, time: float) -> float:
        return self._sums[bisect_right(self.times, time)]

    def within(self, interval: Interval) -> float:
        return self.until(interval[1]) - self.until(interval[0])


def slope(points: list[tuple[float, float]]) -> float:
    """Return the slope of the least-squares line."""
    return linear_regression(*zip(*points, strict=True)).slope if len(points) > 1 else 0.0


def percentile(values: Iterable[float], part: float) -> float | None:
    """Return the nearest-rank percentile."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(part * len(ordered)))] if ordered else None
