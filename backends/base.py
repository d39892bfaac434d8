"""What does a backend say of itself, and what does an engine adapter have to know?"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from policies.capacity.gauges import Gauges


@dataclass(slots=True, init=False)
class Usage:
    """What did one request really cost? As the engine reports it, in tokens. None: it did not say, or said nothing that
    can be a count."""

    prompt_tokens: int | None
    output_tokens: int | None
    cached_tokens: int

    def __init__(self, prompt_tokens: int | None, output_tokens: int | None, cached_tokens: int = 0) -> None:
        self.prompt_tokens = prompt_tokens
        self.output_tokens = output_tokens
        self.cached_tokens = cached_tokens


class Adapter(Protocol):
    """How does one kind of engine name its gauges, and what does its refusal look like?"""

    name: str
    metrics_paths: tuple[str, ...]
    """Paths to scrape, cheapest first; an empty answer falls through to the next. () = no metrics."""
    steps_path: str | None
    """Where the engine says after each step what it holds, if it can. None: it cannot."""
    takes_cache_salt: bool
    """Does it keep the cached blocks of requests with different `cache_salt` apart?"""
    health_path: str
    """Answers 200 when the engine is well."""

    def snapshot(self, text: str, taken_s: float) -> Gauges | None:
        """Read one metrics page; None when it holds nothing this adapter knows."""

    def is_refusal(self, status: int, body: bytes) -> bool:
        """Is this answer backpressure (put the request back, unbilled) rather than an error of the request?"""
