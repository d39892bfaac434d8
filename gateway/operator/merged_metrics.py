"""How do the metrics pages of several workers become one? Equal series of the pages become one value.

Counters are added up, and so are gauges of what each worker holds by itself. A gauge of what all workers see alike
takes the largest or the smallest value, so that one worker in a bad state is enough to show it.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import Final

from prometheus_client.utils import floatToGoString

from gateway.telemetry.metric_families import FAMILIES, LEAST, MOST, SUM

as_text: Callable[[float], str] = floatToGoString
_OF_PROCESSES: Final = {"process_max_fds": LEAST, "process_start_time_seconds": LEAST}
"""Merge rules for process metrics of the client library; its other metrics are added up."""


def merged(pages: Sequence[str]) -> str:
    """Merge pages in the Prometheus text format without timestamps. Lines that do not parse are left out."""
    comments: defaultdict[str, dict[str, None]] = defaultdict(dict)
    values: defaultdict[str, dict[str, float]] = defaultdict(dict)
    for page in pages:
        name = ""
        for line in page.splitlines():
            if line.startswith("# HELP "):
                name = line.split(" ", 3)[2]
            if line.startswith("#"):
                comments[name][line] = None
                continue
            series, _, text = line.rpartition(" ")
            try:
                value = float(text)
            except ValueError:
                continue
            known = values[name].get(series)
            values[name][series] = value if known is None else _one(name, known, value)
    return "".join(
        f"{line}\n"
        for name, lines in comments.items()
        for line in (*lines, *(f"{series} {as_text(value)}" for series, value in values[name].items()))
    )


def _one(name: str, known: float, value: float) -> float:
    family = FAMILIES.get(name)
    rule = family.merged if family is not None else _OF_PROCESSES.get(name, SUM)
    return max(known, value) if rule == MOST else min(known, value) if rule == LEAST else known + value
