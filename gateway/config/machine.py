"""How many processes is `workers: auto`, and how much may each hold with `memory_max: auto`? What the machine gives."""

from __future__ import annotations

import os
from collections.abc import Mapping
from math import ceil
from pathlib import Path
from typing import Any, Final

from gateway.config.checks import fault
from gateway.config.memory_bounds import MEMORY_MAX_LEAST

AUTO: Final = "auto"
WORKERS_MAX: Final = 256
QUOTA: Final = Path("/sys/fs/cgroup/cpu.max")
MEMORY: Final = (Path("/sys/fs/cgroup/memory.max"), Path("/sys/fs/cgroup/memory/memory.limit_in_bytes"))
"""What a container may take, by the two versions of cgroups."""
MEMORY_OF_MACHINE: Final = 2 << 30
"""Where no container has a limit: room for 15,000 connections. Never more than half of what there is."""


def cores() -> int:
    """How many cores may this process use? In a container with a quota of CPU time: that quota in cores, rounded up."""
    count = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    try:
        quota_us, period_us = map(int, QUOTA.read_text(encoding="ascii").split())
    except (OSError, ValueError):  # no such file, or "max": no quota
        return count
    return max(1, min(count, ceil(quota_us / period_us)))


def memory_each(workers: int) -> int:
    """Bytes that each of so many processes may hold: the container's limit but an eighth, which is the kernel's."""
    machine = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    limits = [_number(path) for path in MEMORY]
    container = min([limit for limit in limits if limit is not None and limit < machine], default=None)
    whole = min(MEMORY_OF_MACHINE * workers, machine // 2) if container is None else container - container // 8
    return max(MEMORY_MAX_LEAST, whole // workers)


def _number(path: Path) -> int | None:
    try:
        return int(path.read_text(encoding="ascii"))
    except (OSError, ValueError):  # no such file, or "max": no limit
        return None


def with_auto(data: Any) -> Any:
    """The raw config with numbers in the place of `auto`. An engine inside the process (sim:) is one process's."""
    if not isinstance(data, Mapping):
        return data
    workers = data.get("workers", 1)
    if workers == AUTO:
        workers = 1 if "'sim:" in repr(data.get("pools")) else min(cores(), WORKERS_MAX)
        data = {**data, "workers": workers}
    if data.get("memory_max", AUTO) == AUTO:
        data = {**data, "memory_max": memory_each(workers if isinstance(workers, int) and workers > 0 else 1)}
    return data


def no_text(value: Any) -> Any:
    """As `with_auto` leaves it."""
    if isinstance(value, str):
        raise fault("should be a whole number without quotes, or auto")
    return value


def or_auto(schema: dict[str, Any]) -> None:
    """In the JSON schema: a number, or the word."""
    number = {name: schema.pop(name) for name in ("type", "minimum", "maximum")}
    schema["anyOf"] = [number, {"const": AUTO}]


def auto_by_default(schema: dict[str, Any]) -> None:
    """In the JSON schema: the same, where nothing is written."""
    or_auto(schema)
    schema["default"] = AUTO
