"""How does any other OpenAI-compatible server refuse work? It has no gauges that could be relied on."""

from __future__ import annotations

from policies.capacity.gauges import Gauges


class OpenAiAdapter:
    """The adapter for servers that are known only by the OpenAI API."""

    name = "openai"
    metrics_paths: tuple[str, ...] = ()
    steps_path: str | None = None
    takes_cache_salt = False
    health_path = "/v1/models"

    def snapshot(self, text: str, taken_s: float) -> Gauges | None:
        return None

    def is_refusal(self, status: int, body: bytes) -> bool:
        """529 is what Anthropic's API answers when it is overloaded."""
        return status in (429, 503, 529)
