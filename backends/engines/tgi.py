"""Text Generation Inference, which reserves `max_tokens` of each request at its admission.

Names are those of TGI 1.4 to 3.3. A refusal is a 429 with the `error_type` "overloaded".
"""

from __future__ import annotations

import json
from typing import Final

from backends.engines.adapter import Adapter, count, summed
from backends.promtext import lines_of, samples
from policies.capacity.gauges import Gauges

_SUMMED: Final = {
    "running": "tgi_batch_current_size",
    "waiting": "tgi_queue_size",
    "kv_capacity_tokens": "tgi_batch_max_total_tokens",
}
_HELD: Final = "tgi_batch_current_max_tokens"
_LINES: Final = lines_of((*_SUMMED.values(), _HELD))


class TgiAdapter(Adapter):
    """The adapter for Text Generation Inference."""

    name = "tgi"
    title = "Text Generation Inference"
    metric_prefixes = ("tgi_",)
    metrics_paths = ("/metrics",)
    facts_path = "/info"
    health_path = "/health"
    gaps = (
        "tells no slots, so they are learned",
        "holds max_tokens of each request for its whole life",
        "has no cache_salt, so tenants share its prefix cache",
    )

    def snapshot(self, text: str, taken_s: float) -> Gauges | None:
        """Read `/metrics`. KV usage is the final size of all running requests."""
        page = samples(text, _LINES)
        if not page:
            return None
        found = summed(page, _SUMMED)
        held, capacity = summed(page, {"held": _HELD}).get("held"), found.get("kv_capacity_tokens")
        return Gauges(taken_s, kv_usage=min(held / capacity, 1.0) if held is not None and capacity else None, **found)

    def read_facts(self, text: str) -> None:
        """Read `/info`."""
        facts = json.loads(text)
        self.context_tokens = count(facts.get("max_total_tokens"))
        self.version = str(facts.get("version", ""))[:40]
