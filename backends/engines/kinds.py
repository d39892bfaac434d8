"""All kinds of engine in one table, and the recognition of an unknown engine."""

from __future__ import annotations

from collections.abc import Collection
from typing import Final

from backends.engines import by_metrics
from backends.engines.adapter import Adapter
from backends.engines.llama_cpp import LlamaCppAdapter
from backends.engines.sglang import SglangAdapter
from backends.engines.vllm import VllmAdapter

_KINDS: Final[tuple[type[Adapter], ...]] = (
    VllmAdapter, SglangAdapter, LlamaCppAdapter, by_metrics.TgiAdapter, by_metrics.TensorRtLlmAdapter,
    by_metrics.OllamaAdapter, by_metrics.LmDeployAdapter, by_metrics.MaxAdapter, by_metrics.OpenAiAdapter,
)  # fmt: skip
KINDS: Final = {kind.name: kind for kind in _KINDS}
"""Adapters by their name in the configuration."""
RECOGNISED_PATH: Final = "/metrics"


def recognise(owners: Collection[str], page: str) -> Adapter:
    """Return a new adapter for an engine.

    Args:
        owners: `owned_by` of the models that the engine lists.
        page: its answer at RECOGNISED_PATH; "" if there was none. The names of metrics are surer than owners.
    """
    names = {line.split("{", 1)[0].split(" ", 1)[0] for line in page.splitlines() if line and line[0] != "#"}
    for kind in _KINDS:
        if any(name.startswith(kind.metric_prefixes) for name in names):
            return kind()
    for kind in _KINDS:
        if owners and set(owners) <= set(kind.owners):
            return kind()
    return by_metrics.OpenAiAdapter()
