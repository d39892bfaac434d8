"""SGLang: load per DP rank as JSON, or metrics with --enable-metrics.

Fields of `/v1/loads` are those of SGLang 0.5.23. `num_total_tokens` there includes waiting requests, so it is not the
KV usage.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any, ClassVar

from backends.engines.adapter import Adapter, Metrics, count, used_part
from policies.capacity.gauges import Gauges


class SglangAdapter(Adapter):
    """The adapter for SGLang."""

    name = "sglang"
    title = "SGLang"
    metric_prefixes = ("sglang:", "sglang_")
    owners = ("sglang",)
    metrics_paths = ("/v1/loads?include=core", "/metrics")
    sums: ClassVar[Metrics] = {
        "running": ("sglang_num_running_reqs",),
        "waiting": ("sglang_num_queue_reqs",),
        "kv_capacity_tokens": ("sglang_max_total_num_tokens",),
        "prompt_tokens_total": ("sglang_prompt_tokens_total",),
        "output_tokens_total": ("sglang_generation_tokens_total",),
        "preemptions_total": ("sglang_num_retracted_requests_total",),
        "max_num_seqs": ("sglang_max_running_requests",),
    }
    kv_used_tokens = ("sglang_num_used_tokens",)
    health_path = "/health"
    takes_cache_salt = True
    gaps = ("reports the cached tokens of a prompt only with --enable-cache-report; else usage counts none as cached",)

    def snapshot(self, text: str, taken_s: float) -> Gauges | None:
        """Read `/v1/loads` or `/metrics`, summed over the ranks of data parallelism."""
        if not text.startswith("{"):
            return super().snapshot(text, taken_s)
        loads = json.loads(text)["loads"]
        used, capacity = _sum(loads, "num_used_tokens"), _sum(loads, "max_total_num_tokens")
        return Gauges(
            taken_s,
            running=_sum(loads, "num_running_reqs"),
            waiting=_sum(loads, "num_waiting_reqs"),
            kv_usage=used_part(used, capacity),
            kv_capacity_tokens=capacity,
            max_num_seqs=count(_sum(loads, "max_running_requests")),
        )


def _sum(loads: Sequence[dict[str, Any]], field: str) -> int | None:
    """Return the sum over all ranks, or None if a rank lacks the field."""
    values = [load.get(field) for load in loads]
    numbers = [value for value in values if isinstance(value, int | float)]
    return int(sum(numbers)) if numbers and len(numbers) == len(values) else None
