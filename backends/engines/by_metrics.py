"""Engines that little more than a table describes: LMDeploy, MAX, Ollama, TensorRT-LLM, TGI, an unrecognised server."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, ClassVar

from backends.engines.adapter import CACHE_SHARED, KV_SIZE_UNKNOWN, SLOTS_LEARNED, Adapter, Metrics, count
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
    gaps = (SLOTS_LEARNED, KV_SIZE_UNKNOWN, CACHE_SHARED)


class MaxAdapter(Adapter):
    """The adapter for Modular's MAX, which refuses load with 429 at a configured bound.

    MAX names no owner of its models, so only its metrics identify it. MAX counts tokens at the end of an answer, so the
    counters say nothing of its steps.
    """

    name = "max"
    title = "MAX"
    metric_prefixes = ("maxserve_",)
    metrics_paths = ("/metrics",)
    sums: ClassVar[Metrics] = {
        "running": ("maxserve_num_requests_running",),
        "waiting": ("maxserve_num_requests_queued", "maxserve_num_requests_awaiting_admission"),
        "kv_capacity_tokens": ("maxserve_cache_num_total_blocks",),
        "preemptions_total": ("maxserve_cache_preemption_count_total",),
    }
    kv_used_tokens = ("maxserve_cache_num_used_blocks",)
    gaps = (
        "reports its load on another port (8001) only, so that port must be joined under /metrics",
        SLOTS_LEARNED, KV_SIZE_UNKNOWN, CACHE_SHARED,
    )  # fmt: skip

    def gauges(self, page: Mapping[str, list[Sample]]) -> dict[str, Any]:
        """Return the gauges on a page. Running requests include the waiting ones, which a page has only after a step.

        The size of the KV cache is in blocks of unknown size.
        """
        found = super().gauges(page)
        found.pop("kv_capacity_tokens", None)
        if found.get("running") and "maxserve_num_requests_queued" not in page:
            found.pop("waiting", None)
            del found["running"]
        elif "running" in found:
            found["running"] = max(0, found["running"] - found.get("waiting", 0))
        return found


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
    gaps = ("reports its load only if return_perf_metrics is set there", SLOTS_LEARNED)

    def gauges(self, page: Mapping[str, list[Sample]]) -> dict[str, Any]:
        """Return the gauges on a page. The engine reports its KV capacity in blocks."""
        found = super().gauges(page)
        blocks, block_size = found.pop("kv_capacity_tokens", 0), found.get("block_size", 0)
        if blocks and block_size:
            found["kv_capacity_tokens"] = blocks * block_size
        return found


class TgiAdapter(Adapter):
    """The adapter for Text Generation Inference 1.4 to 3.3.

    The engine reserves `max_tokens` of each request at its admission. A refusal is a 429 with the `error_type`
    "overloaded".
    """

    name = "tgi"
    title = "Text Generation Inference"
    metric_prefixes = ("tgi_",)
    metrics_paths = ("/metrics",)
    sums: ClassVar[Metrics] = {
        "running": ("tgi_batch_current_size",),
        "waiting": ("tgi_queue_size",),
        "kv_capacity_tokens": ("tgi_batch_max_total_tokens",),
    }
    kv_used_tokens = ("tgi_batch_current_max_tokens",)  # the final size of all running requests
    facts_path = "/info"
    health_path = "/health"
    gaps = (
        SLOTS_LEARNED,
        "reserves max_tokens of each request until the request ends, so a smaller max_tokens lets more requests run",
        CACHE_SHARED,
    )

    def read_facts(self, text: str) -> None:
        """Read `/info`."""
        facts = json.loads(text)
        self.context_tokens = count(facts.get("max_total_tokens"))
        self.version = str(facts.get("version", ""))[:40]


class OllamaAdapter(Adapter):
    """The adapter for Ollama: one request at a time unless OLLAMA_NUM_PARALLEL is set, and no report of its load.

    `/api/ps` names the loaded models. Cached tokens are always reported as 0. An error is a string.
    """

    name = "ollama"
    title = "Ollama"
    owners = ("library",)
    facts_path = "/api/ps"
    gaps = (
        "reports nothing of its load, so it gets one request at a time unless max_num_seqs says OLLAMA_NUM_PARALLEL",
        CACHE_SHARED,
    )

    def __init__(self) -> None:
        super().__init__()
        self.slots = 1

    def read_facts(self, text: str) -> None:
        """Read the context of the loaded models from `/api/ps`."""
        loaded = [length for model in json.loads(text)["models"] if (length := count(model.get("context_length")))]
        self.context_tokens = min(loaded, default=None)


class OpenAiAdapter(Adapter):
    """The adapter for an unrecognised server of the OpenAI API, whose capacity is learned from its answers."""

    name = "openai"
    title = "a server of the OpenAI API"
    role_is_start = False
    gaps = (
        "reports nothing of its load, so how many requests it runs is learned by trial unless max_num_seqs says it",
        "gets no cache_salt, so if it has a prompt cache, tenants share it",
    )
