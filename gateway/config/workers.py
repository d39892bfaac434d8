"""How many processes is `workers: auto`? One for each core that this process may use."""

from __future__ import annotations

import os
from collections.abc import Mapping
from math import ceil
from pathlib import Path
from typing import Any, Final

from gateway.config.fields import fault

__all__ = ["AUTO", "WORKERS_MAX", "cores", "no_text", "or_auto", "with_workers"]

AUTO: Final = "auto"
WORKERS_MAX: Final = 256
QUOTA: Final = Path("/sys/fs/cgroup/cpu.max")


def cores() -> int:
    """Those that the system lets this process use; of a container with a quota of CPU time, so many as that is worth,
    rounded up."""
    count = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    try:
        quota_us, period_us = map(int, QUOTA.read_text(encoding="ascii").split())
    except (OSError, ValueError):  # no such file, or "max": no quota
        return count
    return max(1, min(count, ceil(quota_us / period_us)))


def with_workers(data: Any) -> Any:
    """The raw config with a number in the place of `auto`. An engine inside the process (sim:) is one process's."""
    if not isinstance(data, Mapping) or data.get("workers") != AUTO:
        return data
    return {**data, "workers": 1 if "'sim:" in repr(data.get("pools")) else min(cores(), WORKERS_MAX)}


def no_text(value: Any) -> Any:
    """As `with_workers` leaves it."""
    if isinstance(value, str):
        raise fault("should be a whole number without quotes, or auto")
    return value


def or_auto(schema: dict[str, Any]) -> None:
    """In the JSON schema: a number, or the word."""
    number = {name: schema.pop(name) for name in ("type", "minimum", "maximum")}
    schema["anyOf"] = [number, {"const": AUTO}]
