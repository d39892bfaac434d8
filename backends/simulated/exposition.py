"""What does vLLM's `/metrics` page say? The same names, labels and text format, from the model's gauges.

Absent on purpose: histograms, LoRA, multimodal and external-cache series, which the model has nothing to say about.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import NamedTuple

from backends.simulated.engine_model import EngineGauges
from backends.simulated.engine_profiles import EngineProfile

__all__ = ["Totals", "render"]


@dataclass(slots=True)
class Totals:
    """What only the server knows: how requests ended."""

    stop: int = 0
    length: int = 0
    abort: int = 0
    rejected: int = 0


class _Family(NamedTuple):
    name: str
    """As exposed: with `_total` when it is a counter, so that `name[]` selects by it."""
    help: str
    samples: list[tuple[str, float]]
    """(labels beyond model and engine, value)."""
    with_engine: bool = True


def render(
    profile: EngineProfile, model: str, gauges: EngineGauges, totals: Totals, names: Collection[str] = ()
) -> bytes:
    """The page, or with `names` only those families, in the classic text format."""
    lines = []
    for family in _families(profile, gauges, totals):
        if names and family.name not in names:
            continue
        kind = "counter" if family.name.endswith("_total") else "gauge"
        lines.append(f"# HELP {family.name} {family.help}")
        lines.append(f"# TYPE {family.name} {kind}")
        own = f'model_name="{_escape(model)}"'
        if family.name == "vllm:cache_config_info":
            own = 'engine="0"'
        elif family.with_engine:
            own = 'engine="0",' + own
        lines.extend(
            f"{family.name}{{{own}{',' if labels else ''}{labels}}} {float(value)}" for labels, value in family.samples
        )
    return ("\n".join(lines) + "\n").encode() if lines else b""


def _escape(value: str) -> str:
    return value.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")


def _families(profile: EngineProfile, gauges: EngineGauges, totals: Totals) -> list[_Family]:
    computed = gauges.prompt_tokens_total - gauges.prompt_tokens_cached_total
    return [
        _Family("vllm:num_requests_running", "Number of requests in model execution batches.", [("", gauges.running)]),
        _Family("vllm:num_requests_waiting", "Number of requests waiting to be processed.", [("", gauges.waiting)]),
        _Family(
            "vllm:num_requests_waiting_by_reason",
            "Number of waiting requests by reason.",
            [('reason="capacity"', gauges.waiting), ('reason="deferred"', 0)],
        ),
        _Family("vllm:kv_cache_usage_perc", "KV-cache usage. 1 means 100 percent usage.", [("", gauges.kv_usage)]),
        _Family(
            "vllm:num_preemptions_total",
            "Cumulative number of preemption from the engine.",
            [("", gauges.preemptions_total)],
        ),
        _Family("vllm:prompt_tokens_total", "Prefill tokens processed.", [("", gauges.prompt_tokens_total)]),
        _Family(
            "vllm:prompt_tokens_by_source_total",
            "Prompt tokens by source.",
            [('source="local_compute"', computed), ('source="local_cache_hit"', gauges.prompt_tokens_cached_total)],
        ),
        _Family("vllm:prompt_tokens_cached_total", "Cached prompt tokens.", [("", gauges.prompt_tokens_cached_total)]),
        _Family("vllm:generation_tokens_total", "Generation tokens processed.", [("", gauges.generation_tokens_total)]),
        _Family(
            "vllm:prefix_cache_queries_total",
            "Prefix cache queries, in tokens.",
            [("", gauges.prefix_cache_queries_total)],
        ),
        _Family(
            "vllm:prefix_cache_hits_total", "Prefix cache hits, in tokens.", [("", gauges.prefix_cache_hits_total)]
        ),
        _Family(
            "vllm:request_success_total",
            "Requests that ended, by reason.",
            [
                ('finished_reason="stop"', totals.stop),
                ('finished_reason="length"', totals.length),
                ('finished_reason="abort"', totals.abort),
            ],
        ),
        _Family(
            "vllm:admission_rejections_total",
            "Requests rejected at admission, by reason.",
            [('reason="max_num_queued_reqs"', totals.rejected)],
            with_engine=False,
        ),
        _Family("vllm:cache_config_info", "Information of the LLMEngine CacheConfig", [(_cache_config(profile), 1)]),
    ]


def _cache_config(profile: EngineProfile) -> str:
    tokens = profile.num_gpu_blocks * profile.block_size
    return (
        f'block_size="{profile.block_size}",enable_prefix_caching="True",kv_cache_max_concurrency="'
        f'{tokens / profile.max_model_len}",kv_cache_size_tokens="{tokens}",num_gpu_blocks="{profile.num_gpu_blocks}"'
    )
