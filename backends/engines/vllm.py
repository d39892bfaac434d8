"""vLLM 0.8.5 to 0.33: gauges and refusals. Series are detected on the page, never deduced from a version."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar, Final

from backends.engines.adapter import SLOTS_LEARNED, VALUE_MAX, Adapter, Metrics, count
from backends.promtext import Sample
from backends.vllm_plugin.steps import PATH as STEPS_PATH

_SUMS: Final[Metrics] = {
    "running": ("vllm_num_requests_running",),
    "waiting": ("vllm_num_requests_waiting",),
    "preemptions_total": ("vllm_num_preemptions_total", "vllm_num_preemptions"),
    "prompt_tokens_total": ("vllm_prompt_tokens_total",),
    "output_tokens_total": ("vllm_generation_tokens_total",),
}
_KV_USAGE: Final = ("vllm_kv_cache_usage_perc", "vllm_gpu_cache_usage_perc")
_BY_REASON: Final = "vllm_num_requests_waiting_by_reason"
_CONFIG: Final = "vllm_cache_config_info"
_NAMES: Final = (*[name for names in _SUMS.values() for name in names], _BY_REASON, *_KV_USAGE, _CONFIG)
# The mount at /metrics/ knows name[], the route /metrics does not. Colons as vLLM registers them.
_FILTERED: Final = "/metrics/?" + "&".join(f"name[]={name.replace('vllm_', 'vllm:', 1)}" for name in _NAMES)


class VllmAdapter(Adapter):
    """The adapter for vLLM: its gauges of queue and KV cache, and the answers by which it refuses a request."""

    name = "vllm"
    title = "vLLM"
    metric_prefixes = ("vllm:", "vllm_")
    owners = ("vllm",)
    metrics_paths = (_FILTERED, "/metrics")
    sums: ClassVar[Metrics] = _SUMS
    kv_usage = _KV_USAGE
    other_metrics = (_BY_REASON, _CONFIG)
    steps_path = STEPS_PATH
    takes_cache_salt = True
    health_path = "/health"
    gaps = ("without fairgate's plug-in it " + SLOTS_LEARNED,)

    def gauges(self, page: Mapping[str, list[Sample]]) -> dict[str, Any]:
        found = super().gauges(page)
        if deferred := _per_engine(page, (_BY_REASON,), reason="deferred"):
            found["deferred"] = int(sum(deferred))
        found["kv_capacity_tokens"], found["block_size"] = _capacity(page.get(_CONFIG, []))
        return found

    def values(self, page: Mapping[str, list[Sample]], names: tuple[str, ...]) -> list[float]:
        """Return one value for each engine, under the first name that the page has."""
        return _per_engine(page, names)

    def is_refusal(self, status: int, body: bytes) -> bool:
        """Return whether this answer reports overload, pause or death (503), a limit (429), or a shutdown (500)."""
        return status in (429, 503) or (status == 500 and b"cannot schedule new futures after shutdown" in body)


def _per_engine(page: Mapping[str, list[Sample]], names: tuple[str, ...], *, reason: str | None = None) -> list[float]:
    """Return one value per engine: samples of this reason under the first name that the page has.

    Several API servers repeat an engine under their own `pid`, so the highest value counts, never their sum.
    """
    for name in names:
        if found := page.get(name):
            values: dict[str, float] = {}
            for sample in found:
                if sample.labels.get("reason") != reason:
                    continue
                engine = sample.labels.get("engine", "")
                values[engine] = max(values.get(engine, sample.value), sample.value)
            return [value for value in values.values() if 0 <= value <= VALUE_MAX]
    return []


def _capacity(configs: list[Sample]) -> tuple[int | None, int | None]:
    """Return the usable KV tokens of all engines and the block size. Each engine loses its null block."""
    engines = {sample.labels.get("engine", ""): sample.labels for sample in configs}
    if not engines:
        return None, None
    labels = list(engines.values())
    block_size = _int(labels[0].get("block_size"))
    sizes = [_int(each.get("kv_cache_size_tokens")) for each in labels]
    blocks = _int(labels[0].get("num_gpu_blocks"))  # with several engines each reports their sum
    total: int | None = None
    if all(size is not None for size in sizes):
        total = sum(size or 0 for size in sizes)
    elif blocks is not None and block_size is not None:
        total = blocks * block_size
    return None if total is None else max(total - len(engines) * (block_size or 0), 0), block_size


def _int(label: str | None) -> int | None:
    """Return the count in a label, or None. An unknown value is the string "None"."""
    try:
        return count(float(label or ""))
    except ValueError:
        return None
