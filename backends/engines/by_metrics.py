"""Engines that a table of their metrics describes: LMDeploy, MAX, TensorRT-LLM, and an unrecognised server."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from backends.engines.adapter import Adapter, Metrics
from backends.promtext import Sample


class LmDeployAdapter(Adapter):
    """The adapter for LMDeploy 0.10 to 0.18, whose gauges have the names that vLLM's once had."""

    name = "lmdeploy"
    title = "LMDeploy"
    metric_prefixes = ("lmdeploy:", "lmdeploy_")
    owners = ("lmdeploy",)
    metrics_paths = ("/metrics",)
    sums: ClassVar[Metrics] = {
        "running": ("lmdeploy_num_requests_running",),
        "waiting": ("lmdeploy_num_requests_waiting",),
        "prompt_tokens_total": ("lmdeploy_prompt_tokens_total",),
        "output_tokens_total": ("lmdeploy_generation_tokens_total",),
    }
    kv_usage = ("lmdeploy_gpu_cache_usage_perc",)
    health_path = "/health"
    gaps = (
        "tells no size of its KV cache and no slots, so they are learned",
        "has no cache_salt, so tenants share its prefix cache",
    )


class MaxAdapter(Adapter):
    """The adapter for Modular's MAX, which refuses load with 429 at a bound."""

    name = "max"
    title = "MAX"
    metric_prefixes = ("maxserve_",)
    owners = ("modular",)
    metrics_paths = ("/metrics",)
    sums: ClassVar[Metrics] = {
        "running": ("maxserve_num_requests_running",),
        "waiting": ("maxserve_num_requests_queued", "maxserve_num_requests_awaiting_admission"),
    }
    gaps = (
        "tells its load on another port (8001) only",
        "tells no slots and no KV cache, so they are learned",
        "has no cache_salt, so tenants share its prefix cache",
    )


class TensorRtLlmAdapter(Adapter):
    """The adapter for TensorRT-LLM's `trtllm-serve`, whose `/metrics` answers with JSON."""

    name = "tensorrt-llm"
    title = "TensorRT-LLM"
    metric_prefixes = ("trtllm_",)
    owners = ("tensorrt_llm",)
    metrics_paths = ("/prometheus/metrics",)
    sums: ClassVar[Metrics] = {
        "running": ("trtllm_num_requests_running",),
        "waiting": ("trtllm_num_requests_waiting",),
        "block_size": ("trtllm_kv_cache_tokens_per_block",),
        "kv_capacity_tokens": ("trtllm_kv_cache_max_blocks",),
    }
    kv_usage = ("trtllm_kv_cache_utilization",)
    health_path = "/health"
    takes_cache_salt = True
    gaps = ("tells its load only with return_perf_metrics", "tells no slots, so they are learned")

    def gauges(self, page: Mapping[str, list[Sample]]) -> dict[str, Any]:
        """Return the gauges on a page. The engine reports its KV capacity in blocks."""
        found = super().gauges(page)
        blocks, block_size = found.pop("kv_capacity_tokens", 0), found.get("block_size", 0)
        if blocks and block_size:
            found["kv_capacity_tokens"] = blocks * block_size
        return found


class OpenAiAdapter(Adapter):
    """The adapter for an unrecognised server of the OpenAI API, whose capacity is learned from its answers."""

    name = "openai"
    title = "a server of the OpenAI API"
    gaps = ("tells nothing of its load, so its slots are learned by trial unless max_num_seqs says them",)
