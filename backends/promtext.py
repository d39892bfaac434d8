"""Which samples does a Prometheus text page hold under a few names? Classic text, tolerant of OpenMetrics."""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from typing import Final

__all__ = ["Sample", "samples"]

_LINE: Final = re.compile(r'([a-zA-Z_:][a-zA-Z0-9_:]*)(?:\{((?:[^"}]|"(?:[^"\\]|\\.)*")*)\})?[ \t]+(\S+)')
_LABEL: Final = re.compile(r'(?<![a-zA-Z0-9_])([a-zA-Z_][a-zA-Z0-9_]*+)\s*+=\s*+"((?:[^"\\]|\\.)*)"')
SAMPLES_MAX: Final = 10_000
"""Of one page; those behind are passed over."""


@dataclass(frozen=True, slots=True)
class Sample:
    """One line of the page; label values as written, without unescaping."""

    labels: dict[str, str]
    value: float


def samples(text: str, names: Collection[str]) -> dict[str, list[Sample]]:
    """The samples whose name, with ':' read as '_', is in `names`. Lines that are broken or NaN are passed over."""
    found: dict[str, list[Sample]] = {}
    left = SAMPLES_MAX
    for line in _lines(text):
        if line.startswith("#"):
            continue
        if not left:
            break
        name = re.split(r"[{ \t]", line, maxsplit=1)[0].replace(":", "_")
        if name not in names:
            continue
        match = _LINE.match(line)
        if match is None:
            continue
        try:
            value = float(match[3])
        except ValueError:
            continue
        if not math.isnan(value):
            left -= 1
            found.setdefault(name, []).append(Sample(dict(_LABEL.findall(match[2] or "")), value))
    return found


def _lines(text: str) -> Iterator[str]:
    """One at a time: a list of them would be larger than the page."""
    at = 0
    while at < len(text):
        end = text.find("\n", at)
        if end < 0:
            end = len(text)
        yield text[at:end]
        at = end + 1
