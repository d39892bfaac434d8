"""What do the metrics of several workers say together? Their pages line by line: the same series, one value.

Whatever is counted is added up, and so are gauges of what each worker has of its own. Gauges of what all workers see
alike are not: of a bad state it is enough that one worker is in it.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import inf
from typing import Final

__all__ = ["LEAST", "MOST", "OWN", "merged"]

MOST: Final = frozenset(
    (
        "fairgate_backend_draining",
        "fairgate_backend_slots",
        "fairgate_build_info",
        "fairgate_config_info",
        "fairgate_kv_projected_ratio",
        "fairgate_name_addresses",
        "fairgate_overloaded",
        "fairgate_replica_alone",
    )
)
"""Gauges whose largest value stands for all workers."""
LEAST: Final = frozenset(
    (
        "fairgate_backend_on_steps",
        "fairgate_backend_up",
        "fairgate_config_reload_success",
        "fairgate_config_reload_timestamp_seconds",
        "fairgate_name_lookup_success",
        "fairgate_state_shared",
        "fairgate_usage_written",
        "process_max_fds",
        "process_start_time_seconds",
    )
)
"""Gauges whose smallest value stands for all workers."""
OWN: Final = frozenset(
    (
        "fairgate_dispatched_sequences",
        "fairgate_granted_sequences",
        "fairgate_open_interactions",
        "fairgate_queued_bytes",
        "fairgate_queued_requests",
        "fairgate_working_set_tokens",
        "fairgate_recent_service",
        "fairgate_recent_service_due",
        "fairgate_starting_requests",
        "fairgate_usage_waiting_sums",
        "process_open_fds",
        "process_resident_memory_bytes",
        "process_virtual_memory_bytes",
    )
)
"""Gauges that are added up. So is one that is in none of these sets; a test sees to it that each is."""

OF_ENGINES: Final = frozenset(("fairgate_backend_preemptions_total",))
"""Counters of the engines' own, which every worker reads alike."""


class _MergedFamily:
    """One metric: what is said of it, and the values of its series by their names and labels."""

    def __init__(self) -> None:
        self.said: list[str] = []
        self.values: dict[str, float] = {}


def merged(pages: Sequence[str]) -> str:
    """Of pages in the text format of Prometheus, without times. A line that makes no sense is left out."""
    families: dict[str, _MergedFamily] = {}
    for page in pages:
        name, family, is_new = "", _MergedFamily(), False
        for line in page.splitlines():
            if line.startswith("# HELP "):
                name = line.split(" ", 3)[2]
                is_new = name not in families
                family = families.setdefault(name, _MergedFamily())
            if line.startswith("#"):
                if is_new:
                    family.said.append(line)
                continue
            series, _, text = line.rpartition(" ")
            try:
                value = float(text)
            except ValueError:
                continue
            known = family.values.get(series)
            family.values[series] = value if known is None else _one(name, known, value)
    return "".join(
        f"{line}\n"
        for family in families.values()
        for line in (*family.said, *(f"{series} {_text(value)}" for series, value in family.values.items()))
    )


def _one(name: str, known: float, value: float) -> float:
    if name in MOST or name in OF_ENGINES:
        return max(known, value)
    if name in LEAST:
        return min(known, value)
    return known + value


def _text(value: float) -> str:
    return "+Inf" if value == inf else "-Inf" if value == -inf else repr(value)
