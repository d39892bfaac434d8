"""LMDeploy 0.10 to 0.18, whose gauges have the names that vLLM's once had."""

from __future__ import annotations

from typing import Final

from backends.engines.adapter import Adapter, share, summed
from backends.promtext import lines_of, samples
from policies.capacity.gauges import Gauges

_SUMMED: Final = {
    "running": "lmdeploy_num_requests_running",
    "waiting": "lmdeploy_num_requests_waiting",
    "prompt_tokens_total": "lmdeploy_prompt_tokens_total",
    "output_tokens_total": "lmdeploy_generation_tokens_total",
}
_USAGE: Final = "lmdeploy_gpu_cache_usage_perc"
_LINES: Final = lines_of((*_SUMMED.values(), _USAGE))


class LmDeployAdapter(Adapter):
    """The adapter for LMDeploy."""

    name = "lmdeploy"
    title = "LMDeploy"
    metric_prefixes = ("lmdeploy:", "lmdeploy_")
    owners = ("lmdeploy",)
    metrics_paths = ("/metrics",)
    health_path = "/health"
    gaps = (
        "tells no size of its KV cache and no slots, so they are learned",
        "has no cache_salt, so tenants share its prefix cache",
    )

    def snapshot(self, text: str, taken_s: float) -> Gauges | None:
        """Read `/metrics`, summed over the ranks of data parallelism."""
        page = samples(text, _LINES)
        return Gauges(taken_s, kv_usage=share(page, _USAGE), **summed(page, _SUMMED)) if page else None
