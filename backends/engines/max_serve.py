"""Modular's MAX, which refuses load with 429 at a bound. Its gauges have a port of their own (8001)."""

from __future__ import annotations

from typing import Final

from backends.engines.adapter import Adapter, summed
from backends.promtext import lines_of, samples
from policies.capacity.gauges import Gauges

_RUNNING: Final = {"running": "maxserve_num_requests_running"}
_WAITING: Final = {"queued": "maxserve_num_requests_queued", "outside": "maxserve_num_requests_awaiting_admission"}
_LINES: Final = lines_of((*_RUNNING.values(), *_WAITING.values()))


class MaxAdapter(Adapter):
    """The adapter for MAX."""

    name = "max"
    title = "MAX"
    metric_prefixes = ("maxserve_",)
    owners = ("modular",)
    metrics_paths = ("/metrics",)
    gaps = (
        "tells its load on another port (8001) only",
        "tells no slots and no KV cache, so they are learned",
        "has no cache_salt, so tenants share its prefix cache",
    )

    def snapshot(self, text: str, taken_s: float) -> Gauges | None:
        """Read `/metrics`."""
        page = samples(text, _LINES)
        waiting = summed(page, _WAITING)
        return (
            Gauges(taken_s, waiting=sum(waiting.values()) if waiting else None, **summed(page, _RUNNING))
            if page
            else None
        )
