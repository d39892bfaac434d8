"""vLLM's `/metrics` page, rendered from the model's gauges with vLLM's names and labels.

The page has the series that a gateway reads, and no others.
"""

from __future__ import annotations

import json
from collections.abc import Collection

from backends.simulated.engine_model import EngineGauges
from backends.simulated.engine_profiles import EngineProfile


def render(profile: EngineProfile, model: str, gauges: EngineGauges, names: Collection[str] = ()) -> bytes:
    """Render the page in the classic text format; with `names`, only those series."""
    own = {"engine": "0", "model_name": model}
    lines = [
        ("num_requests_running", own, gauges.running),
        ("num_requests_waiting", own, gauges.waiting),
        ("num_requests_waiting_by_reason", {**own, "reason": "capacity"}, gauges.waiting),
        ("num_requests_waiting_by_reason", {**own, "reason": "deferred"}, 0),
        ("kv_cache_usage_perc", own, gauges.kv_usage),
        ("num_preemptions_total", own, gauges.preemptions_total),
        ("prompt_tokens_total", own, gauges.prompt_tokens_total),
        ("generation_tokens_total", own, gauges.generation_tokens_total),
        ("cache_config_info", _cache_config(profile), 1),
    ]
    return "".join(
        f"vllm:{name}{{{','.join(f'{label}={json.dumps(text)}' for label, text in labels.items())}}} {float(value)}\n"
        for name, labels, value in lines
        if not names or f"vllm:{name}" in names
    ).encode()


def _cache_config(profile: EngineProfile) -> dict[str, str]:
    return {
        "block_size": str(profile.block_size),
        "engine": "0",
        "kv_cache_size_tokens": str(profile.num_gpu_blocks * profile.block_size),
        "num_gpu_blocks": str(profile.num_gpu_blocks),
    }
