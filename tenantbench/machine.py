"""The machine under the measurement: its CPU time, memory of process trees, and what makes two runs comparable."""

from __future__ import annotations

import contextlib
import os
import platform
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

CORES = sorted(os.sched_getaffinity(0))
CLIENT_CORES, GATEWAY_CORES = set(CORES[: len(CORES) // 2]) or set(CORES), set(CORES[len(CORES) // 2 :])
"""Clients and engine share one half of the cores and the gateway has the other one, so that neither slows the other."""
TICKS_PER_S = os.sysconf("SC_CLK_TCK")
PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")


def usage_of(roots: set[int]) -> tuple[float, int]:
    """Return CPU seconds and resident bytes of these processes and all below them."""
    rows: dict[int, tuple[int, float, int]] = {}
    for folder in Path("/proc").iterdir():
        if folder.name.isdigit():
            try:
                fields = (folder / "stat").read_text().rpartition(")")[2].split()
            except OSError:  # the process has ended
                continue
            ticks = sum(int(field) for field in fields[11:15])  # with children that were waited for
            rows[int(folder.name)] = int(fields[1]), ticks / TICKS_PER_S, int(fields[21]) * PAGE_BYTES
    tree, before = roots & set(rows), 0
    while len(tree) != before:
        before = len(tree)
        tree |= {pid for pid, (parent, _, _) in rows.items() if parent in tree}
    return sum(max(rows[pid][1], ran_s(pid)) for pid in tree), sum(rows[pid][2] for pid in tree)


def ran_s(pid: int) -> float:
    """Return the CPU time of a process's living threads, in which no tick is lost."""
    with contextlib.suppress(OSError):
        threads = Path(f"/proc/{pid}/task").iterdir()
        return sum(int((thread / "schedstat").read_text().split()[0]) for thread in threads) / 1e9
    return 0.0


@contextlib.contextmanager
def on_cores(cores: set[int]) -> Iterator[None]:
    """Start processes on these cores while the block runs."""
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, cores)
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)


def busy_cpu_s() -> float:
    """Return the CPU time of all cores since boot that was not idle; stolen time counts."""
    fields = Path("/proc/stat").read_text().splitlines()[0].split()[1:9]
    return sum(int(field) for i, field in enumerate(fields) if i not in (3, 4)) / TICKS_PER_S


class Watch:
    """CPU time of a gateway and of others, and the gateway's memory, since the watch began."""

    def __init__(self, gateway: set[int]) -> None:
        self._gateway = gateway
        self._begin_s, self._busy_s = time.monotonic(), busy_cpu_s()
        self._own_s = usage_of({os.getpid()})[0]
        self._gateway_s, self.rss_bytes = usage_of(gateway)

    def sample(self) -> None:
        self.rss_bytes = max(self.rss_bytes, usage_of(self._gateway)[1])

    def read(self) -> tuple[float, float]:
        """Return the gateway's CPU seconds, and the part of all cores that others used."""
        own_s = usage_of({os.getpid()})[0] - self._own_s
        cores_s = (time.monotonic() - self._begin_s) * (os.cpu_count() or 1)
        others = max(0.0, busy_cpu_s() - self._busy_s - own_s) / cores_s
        return usage_of(self._gateway)[0] - self._gateway_s, others


def comparability_set(**more: Any) -> dict[str, Any]:
    """Return everything that must be equal in two runs before one may be divided by the other."""
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    model = next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), "unknown")
    return {
        "cpu": model,
        "cores": os.cpu_count(),
        "gateway_cores": len(GATEWAY_CORES),
        "python": platform.python_version(),
        **more,
    }
