"""How do the metrics pages of several workers become one? Equal series of the pages become one value.

Counters are added up, and so are gauges of what each worker holds by itself. A gauge of what all workers see alike
takes the largest or the smallest value, so that one worker in a bad state is enough to show it.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import inf
from typing import Final

from gateway.telemetry.metric_families import FAMILIES, LEAST, MOST, SUM

_OF_PROCESSES: Final = {"process_max_fds": LEAST, "process_start_time_seconds": LEAST}
"""Merge rules for process metrics of the client library; its other metrics are added up."""


class _MergedFamily:
    """The comment lines of one metric, and the values of its series by name and labels."""

    def __init__(self) -> None:
        self.comments: list[str] = []
        self.values: dict[str, float] = {}


def merged(pages: Sequence[str]) -> str:
    """Merge pages in the Prometheus text format without timestamps. Lines that do not parse are left out."""
    families: dict[str, _MergedFamily] = {}
    for page in pages:
        name, family, is_new = "", _MergedFamily(), False
        for line in page.splitlines():
            if line.startswith("# HELP "):
                name = line.split(" ", 3)[2]
                is_new = name not in families
                family = families.setdefault(name, _MergedFamily())
            if line.startswith("#"):
                if is_new:
                    family.comments.append(line)
                continue
            series, _, text = line.rpartition(" ")
            try:
                value = float(text)
            except ValueError:
                continue
            known = family.values.get(series)
            family.values[series] = value if known is None else _one(name, known, value)
    return "".join(
        f"{line}\n"
        for family in families.values()
        for line in (*family.comments, *(f"{series} {_text(value)}" for series, value in family.values.items()))
    )


def _one(name: str, known: float, value: float) -> float:
    family = FAMILIES.get(name)
    rule = family.merged if family is not None else _OF_PROCESSES.get(name, SUM)
    return max(known, value) if rule == MOST else min(known, value) if rule == LEAST else known + value


def _text(value: float) -> str:
    return "+Inf" if value == inf else "-Inf" if value == -inf else repr(value)
