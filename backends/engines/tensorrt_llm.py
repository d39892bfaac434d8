"""TensorRT-LLM's `trtllm-serve`. Its gauges are at /prometheus/metrics; `/metrics` answers with JSON."""

from __future__ import annotations

from typing import Final

from backends.engines.adapter import Adapter, share, summed
from backends.promtext import lines_of, samples
from policies.capacity.gauges import Gauges

_SUMMED: Final = {
    "running": "trtllm_num_requests_running",
    "waiting": "trtllm_num_requests_waiting",
    "block_size": "trtllm_kv_cache_tokens_per_block",
}
_USAGE: Final = "trtllm_kv_cache_utilization"
_BLOCKS: Final = "trtllm_kv_cache_max_blocks"
_LINES: Final = lines_of((*_SUMMED.values(), _USAGE, _BLOCKS))


class TensorRtLlmAdapter(Adapter):
    """The adapter for trtllm-serve."""

    name = "tensorrt-llm"
    title = "TensorRT-LLM"
    metric_prefixes = ("trtllm_",)
    owners = ("tensorrt_llm",)
    metrics_paths = ("/prometheus/metrics",)
    health_path = "/health"
    takes_cache_salt = True
    gaps = ("tells its load only with return_perf_metrics", "tells no slots, so they are learned")

    def snapshot(self, text: str, taken_s: float) -> Gauges | None:
        """Read /prometheus/metrics."""
        page = samples(text, _LINES)
        if not page:
            return None
        found = summed(page, _SUMMED)
        blocks = summed(page, {"blocks": _BLOCKS}).get("blocks")
        if blocks and found.get("block_size"):
            found["kv_capacity_tokens"] = blocks * found["block_size"]
        return Gauges(taken_s, kv_usage=share(page, _USAGE), **found)
