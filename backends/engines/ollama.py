"""Ollama: one request at a time unless OLLAMA_NUM_PARALLEL is set, and no report of its load.

`/api/ps` names the loaded models. Cached tokens are always reported as 0. An error is a string.
"""

from __future__ import annotations

import json

from backends.engines.adapter import CACHE_SHARED, Adapter, count


class OllamaAdapter(Adapter):
    """The adapter for Ollama."""

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
