"""Text Generation Inference, which reserves `max_tokens` of each request at its admission.

Names are those of TGI 1.4 to 3.3. A refusal is a 429 with the `error_type` "overloaded".
"""

from __future__ import annotations

import json
from typing import ClassVar

from backends.engines.adapter import CACHE_SHARED, SLOTS_LEARNED, Adapter, Metrics, count


class TgiAdapter(Adapter):
    """The adapter for Text Generation Inference."""

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
