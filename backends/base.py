"""The cost of one request, as an engine reports it."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True, init=False)
class Usage:
    """Tokens of one request by the engine's own count. None where the engine reports no valid count."""

    prompt_tokens: int | None
    output_tokens: int | None
    cached_tokens: int

    def __init__(self, prompt_tokens: int | None, output_tokens: int | None, cached_tokens: int = 0) -> None:
        self.prompt_tokens = prompt_tokens
        self.output_tokens = output_tokens
        self.cached_tokens = cached_tokens
