"""Parser for chosen samples of a Prometheus text page: the classic format, tolerant of OpenMetrics."""

from __future__ import annotations

import math
import re
from collections.abc import Collection
from dataclasses import dataclass
from typing import Final

LINE_LENGTH_MAX: Final = 16_384
"""Longer lines are skipped."""
SAMPLES_MAX: Final = 1000
"""Samples read from one page; later ones are skipped."""
_REST: Final = re.compile(r'(?:\{((?:[^"}]++|"(?:[^"\\]|\\.)*+")*+)\})?[ \t]+(\S+)')
_LABEL: Final = re.compile(r'(?<![a-zA-Z0-9_])([a-zA-Z_][a-zA-Z0-9_]*+)\s*+=\s*+"((?:[^"\\]|\\.)*+)"')


@dataclass(frozen=True, slots=True)
class Sample:
    """A line of the page, with label values as written, without unescaping."""

    labels: dict[str, str]
    value: float


def lines_of(names: Collection[str]) -> re.Pattern[str]:
    """Return a pattern for the lines of these names, in which each '_' may be a ':' on the page."""
    alternatives = "|".join(sorted(name.replace("_", "[:_]") for name in names))
    return re.compile(rf"^({alternatives})(?=[{{ \t])([^\n]{{0,{LINE_LENGTH_MAX}}}+)$", re.MULTILINE)


def samples(text: str, lines: re.Pattern[str]) -> dict[str, list[Sample]]:
    """Return the samples on these lines by name, with '_'. Broken lines and NaN are skipped."""
    found: dict[str, list[Sample]] = {}
    left = SAMPLES_MAX
    for line in lines.finditer(text):
        match = _REST.match(line[2])
        if match is None:
            continue
        try:
            value = float(match[2])
        except ValueError:
            continue
        if math.isnan(value):
            continue
        labels = dict(_LABEL.findall(match[1] or ""))
        found.setdefault(line[1].replace(":", "_"), []).append(Sample(labels, value))
        left -= 1
        if not left:
            break
    return found
