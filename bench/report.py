"""Numbers to tables and files."""

import json
import math
import os
import platform
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).resolve().parent / "results"
SHARED_CORES = (
    f"Machine: {os.cpu_count()} cores, shared by engine, proxy and load generator, so a proxy's cost also shows as "
    "lost throughput."
)


def quantile(values: Sequence[float], share: float) -> float:
    """The nearest-rank quantile; NaN of nothing."""
    ordered = sorted(values)
    return ordered[max(0, math.ceil(share * len(ordered)) - 1)] if ordered else math.nan


def median(values: Sequence[float]) -> float:
    """The middle value, or the mean of the two middle ones; NaN of nothing."""
    ordered = sorted(values)
    half = len(ordered) // 2
    if not ordered:
        return math.nan
    return ordered[half] if len(ordered) % 2 else (ordered[half - 1] + ordered[half]) / 2


def table(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A Markdown table; the first column to the left, the others to the right."""
    rule = ["---"] + ["---:"] * (len(heads) - 1)
    return "\n".join(f"| {' | '.join(row)} |" for row in [heads, rule, *rows])


def save(name: str, result: dict[str, Any]) -> Path:
    """Writes bench/results/NAME.json with the machine and the time."""
    RESULTS.mkdir(exist_ok=True)
    path = RESULTS / f"{name}.json"
    stamp = {"measured": datetime.now(UTC).isoformat(timespec="seconds"), "machine": machine()}
    path.write_text(json.dumps(stamp | result, indent=1) + "\n")
    return path


def load(name: str) -> dict[str, Any] | None:
    """Return what `save` wrote last under this name, or None."""
    path = RESULTS / f"{name}.json"
    return json.loads(path.read_text()) if path.exists() else None


def machine() -> str:
    """Cores and processor in one line."""
    model = platform.machine()
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            model = line.partition(":")[2].strip()
            break
    return f"{os.cpu_count()} cores, {model}, Python {platform.python_version()}"
