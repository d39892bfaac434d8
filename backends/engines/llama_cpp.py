"""llama.cpp's server: slots of a fixed context, and an unbounded queue.

Pages were recorded from the server of October 2026. `/metrics` needs the flag --metrics. `/slots` needs no flag, and
does not report the queue. The head of an answer comes with the first token, whose event has null as its content.
"""

from __future__ import annotations

import json
from typing import ClassVar

from backends.engines.adapter import CACHE_SHARED, Adapter, Metrics, count
from policies.capacity.gauges import Gauges


class LlamaCppAdapter(Adapter):
    """The adapter for llama.cpp."""

    name = "llama.cpp"
    title = "llama.cpp"
    metric_prefixes = ("llamacpp:", "llamacpp_")
    owners = ("llamacpp",)
    metrics_paths = ("/metrics", "/slots")
    sums: ClassVar[Metrics] = {
        "running": ("llamacpp_requests_processing",),
        "waiting": ("llamacpp_requests_deferred",),
        "prompt_tokens_total": ("llamacpp_prompt_tokens_total",),
        "output_tokens_total": ("llamacpp_n_decode_total",),  # steps: tokens are counted at the end of an answer
    }
    facts_path = "/props"
    health_path = "/health"
    gaps = (
        "reports the output tokens of an answer only at its end",
        "never refuses a request, however many wait there",
        CACHE_SHARED,
    )

    def snapshot(self, text: str, taken_s: float) -> Gauges | None:
        """Read `/metrics`, or `/slots` where the server has no metrics. A slot owns its KV, so KV never runs out."""
        if text.startswith("["):
            running = sum(1 for slot in json.loads(text) if slot["is_processing"])
            return Gauges(taken_s, running=running)
        return super().snapshot(text, taken_s)

    def read_facts(self, text: str) -> None:
        """Read the number of slots and the context of each from `/props`."""
        facts = json.loads(text)
        self.slots = count(facts["total_slots"])
        self.context_tokens = count(facts["default_generation_settings"]["n_ctx"])
        self.version = str(facts.get("build_info", ""))[:40].removeprefix("b0-unknown")
