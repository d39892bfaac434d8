"""The values of `auto`: number of workers and memory of each, by the limits of the machine or container."""

from __future__ import annotations

import os
from collections.abc import Mapping
from math import ceil
from pathlib import Path
from typing import Annotated, Any, Final

from pydantic import BeforeValidator

from gateway.config.checks import fault
from gateway.config.memory_bounds import MEMORY_MAX_LEAST

AUTO: Final = "auto"
WORKERS_MAX: Final = 256
QUOTA: Final = Path("/sys/fs/cgroup/cpu.max")
MEMORY: Final = (Path("/sys/fs/cgroup/memory.max"), Path("/sys/fs/cgroup/memory/memory.limit_in_bytes"))
"""Files with a container's memory limit, by the two versions of cgroups."""
MEMORY_OF_MACHINE: Final = 2 << 30
"""Memory without a container's limit: room for 15,000 connections, and at most half of the machine."""


def cores() -> int:
    """Return the cores that this process may use: in a container with a CPU quota, the quota, rounded up."""
    count = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    try:
        quota_us, period_us = map(int, QUOTA.read_text(encoding="ascii").split())
    except (OSError, ValueError):  # no such file, or "max" for no quota
        return count
    return max(1, min(count, ceil(quota_us / period_us)))


def memory_each(workers: int) -> int:
    """Return the memory bound in bytes of each of `workers` processes.

    The processes share the container's limit less an eighth for the kernel. Without a limit, each process has 2 GiB,
    and all together half of the machine at most.
    """
    machine = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    limits = [_read_number(path) for path in MEMORY]
    container = min([limit for limit in limits if limit is not None and limit < machine], default=None)
    whole = min(MEMORY_OF_MACHINE * workers, machine // 2) if container is None else container - container // 8
    return max(MEMORY_MAX_LEAST, whole // workers)


def _read_number(path: Path) -> int | None:
    try:
        return int(path.read_text(encoding="ascii"))
    except (OSError, ValueError):  # no such file, or "max" for no limit
        return None


def with_auto(data: Any) -> Any:
    """Replace `auto` in the raw config by numbers. A simulated engine (sim:) belongs to one process."""
    if not isinstance(data, Mapping):
        return data
    workers = data.get("workers", 1)
    if workers == AUTO:
        workers = 1 if "'sim:" in repr(data.get("pools")) else min(cores(), WORKERS_MAX)
        data = {**data, "workers": workers}
    if data.get("memory_max", AUTO) == AUTO:
        data = {**data, "memory_max": memory_each(workers if isinstance(workers, int) and workers > 0 else 1)}
    return data


def _no_text(value: Any) -> Any:
    """Refuse text, which `with_auto` has replaced where valid."""
    if isinstance(value, str):
        raise fault("should be a whole number without quotes, or auto")
    return value


NumberOrAuto = Annotated[int, BeforeValidator(_no_text)]


def or_auto(schema: dict[str, Any]) -> None:
    """Allow a number or "auto" in the JSON schema."""
    number = {name: schema.pop(name) for name in ("type", "minimum", "maximum")}
    schema["anyOf"] = [number, {"const": AUTO}]


def auto_by_default(schema: dict[str, Any]) -> None:
    """Allow a number or "auto" in the JSON schema, with "auto" as the default."""
    or_auto(schema)
    schema["default"] = AUTO
