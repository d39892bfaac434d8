"""vLLM's `/metrics` page, rendered from the model's gauges with vLLM's names, labels and text format.

The page has the series that a gateway reads, and no others.
"""

from __future__ import annotations

from collections.abc import Collection
from types import SimpleNamespace
from typing import Any

from prometheus_client.exposition import generate_latest
from prometheus_client.metrics_core import Metric

from backends.simulated.engine_model import EngineGauges
from backends.simulated.engine_profiles import EngineProfile

_Sample = tuple[dict[str, str], float]
"""Labels beyond model and engine, and the value."""


def render(profile: EngineProfile, model: str, gauges: EngineGauges, names: Collection[str] = ()) -> bytes:
    """Render the page in the classic text format; with `names`, only those families."""
    metrics = []
    for name, (text, *samples) in _families(profile, gauges).items():
        if names and name not in names:
            continue
        metric = Metric(name.removesuffix("_total"), text, "counter" if name.endswith("_total") else "gauge")
        own = {"engine": "0", "model_name": model}
        if name == "vllm:cache_config_info":
            del own["model_name"]
        for labels, value in samples:
            metric.add_sample(name, {**own, **labels}, value)
        metrics.append(metric)
    page: Any = SimpleNamespace(collect=lambda: metrics)  # all that the renderer asks of a registry
    return generate_latest(page)


def _families(profile: EngineProfile, gauges: EngineGauges) -> dict[str, tuple[str, *tuple[_Sample, ...]]]:
    """Return help and samples by exposed name. A counter's name ends in `_total`, so that `name[]` selects by it."""
    return {
        "vllm:num_requests_running": ("Number of requests in model execution batches.", ({}, gauges.running)),
        "vllm:num_requests_waiting": ("Number of requests waiting to be processed.", ({}, gauges.waiting)),
        "vllm:num_requests_waiting_by_reason": (
            "Number of waiting requests by reason.",
            ({"reason": "capacity"}, gauges.waiting), ({"reason": "deferred"}, 0),
        ),
        "vllm:kv_cache_usage_perc": ("KV-cache usage. 1 means 100 percent usage.", ({}, gauges.kv_usage)),
        "vllm:num_preemptions_total": (
            "Cumulative number of preemption from the engine.", ({}, gauges.preemptions_total),
        ),
        "vllm:prompt_tokens_total": ("Prefill tokens processed.", ({}, gauges.prompt_tokens_total)),
        "vllm:generation_tokens_total": ("Generation tokens processed.", ({}, gauges.generation_tokens_total)),
        "vllm:cache_config_info": ("Information of the LLMEngine CacheConfig", (_cache_config(profile), 1)),
    }  # fmt: skip


def _cache_config(profile: EngineProfile) -> dict[str, str]:
    return {
        "block_size": str(profile.block_size),
        "kv_cache_size_tokens": str(profile.num_gpu_blocks * profile.block_size),
        "num_gpu_blocks": str(profile.num_gpu_blocks),
    }
