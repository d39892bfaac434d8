"""The machine under the measurement: its CPU time, memory of process trees, and what makes two runs comparable."""

from __future__ import annotations

import os
import platform
import time
from pathlib import Path
from typing import Any

TICKS_PER_S = os.sysconf("SC_CLK_TCK")
PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")


class ProcessTable:
    """CPU time and memory of all processes at one moment."""

    def __init__(self) -> None:
        self._rows: dict[int, tuple[int, float, int]] = {}
        for folder in Path("/proc").iterdir():
            if folder.name.isdigit():
                try:
                    fields = (folder / "stat").read_text().rpartition(")")[2].split()
                except OSError:  # the process has ended
                    continue
                ticks = sum(int(field) for field in fields[11:15])  # with children that were waited for
                self._rows[int(folder.name)] = int(fields[1]), ticks / TICKS_PER_S, int(fields[21]) * PAGE_BYTES

    def trees(self, roots: set[int]) -> set[int]:
        """Return these processes and all below them."""
        found, before = set(roots), 0
        while len(found) != before:
            before = len(found)
            found |= {pid for pid, (parent, _, _) in self._rows.items() if parent in found}
        return found

    def cpu_s(self, roots: set[int]) -> float:
        return sum(self._rows[pid][1] for pid in self.trees(roots) if pid in self._rows)

    def rss_bytes(self, roots: set[int]) -> int:
        return sum(self._rows[pid][2] for pid in self.trees(roots) if pid in self._rows)


def busy_cpu_s() -> float:
    """Return the CPU time of all cores since boot that was not idle; stolen time counts."""
    fields = Path("/proc/stat").read_text().splitlines()[0].split()[1:9]
    return sum(int(field) for i, field in enumerate(fields) if i not in (3, 4)) / TICKS_PER_S


class Watch:
    """What others and a gateway spent since the watch began."""

    def __init__(self, gateway: set[int]) -> None:
        self._gateway = gateway
        self._begin_s, self._busy_s = time.monotonic(), busy_cpu_s()
        table = ProcessTable()
        self._own_s, self._gateway_s = table.cpu_s({os.getpid()}), table.cpu_s(gateway)
        self.rss_bytes = table.rss_bytes(gateway)

    def sample(self) -> None:
        self.rss_bytes = max(self.rss_bytes, ProcessTable().rss_bytes(self._gateway))

    def read(self) -> tuple[float, float]:
        """Return the gateway's CPU seconds, and the part of all cores that others used."""
        table = ProcessTable()
        own_s = table.cpu_s({os.getpid()}) - self._own_s
        cores_s = (time.monotonic() - self._begin_s) * (os.cpu_count() or 1)
        others = max(0.0, busy_cpu_s() - self._busy_s - own_s) / cores_s
        return table.cpu_s(self._gateway) - self._gateway_s, others


def comparability_set(**more: Any) -> dict[str, Any]:
    """Return everything that must be equal in two runs before one may be divided by the other."""
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    model = next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), "unknown")
    return {"cpu": model, "cores": os.cpu_count(), "python": platform.python_version(), **more}
