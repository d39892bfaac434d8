"""Which samples does a Prometheus text page hold under a few names? Classic text, tolerant of OpenMetrics."""

from __future__ import annotations

import math
import re
from collections.abc import Collection
from dataclasses import dataclass
from typing import Final

__all__ = ["Sample", "samples"]

_LINE: Final = re.compile(r'([a-zA-Z_:][a-zA-Z0-9_:]*)(?:\{((?:[^"}]|"(?:[^"\\]|\\.)*")*)\})?[ \t]+(\S+)')
_LABEL: Final = re.compile(r'([a-zA-Z_][a-zA-Z0-9_]*)\s*=\s*"((?:[^"\\]|\\.)*)"')


@dataclass(frozen=True, slots=True)
class Sample:
    """One line of the page; label values as written, without unescaping."""

    labels: dict[str, str]
    value: float


def samples(text: str, names: Collection[str]) -> dict[str, list[Sample]]:
    """The samples whose name, with ':' read as '_', is in `names`. Lines that are broken or NaN are passed over."""
    found: dict[str, list[Sample]] = {}
    for line in text.splitlines():
        if line.startswith("#"):
            continue
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
            found.setdefault(name, []).append(Sample(dict(_LABEL.findall(match[2] or "")), value))
    return found
