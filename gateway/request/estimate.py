"""An estimator of prompt tokens before admission, from bytes by a ratio that the engines' counts teach."""

from __future__ import annotations

from typing import Final

from gateway.request.prompt import Prompt

BYTES_PER_TOKEN_START: Final = 4.0
BYTES_PER_TOKEN_MIN: Final = 0.5
BYTES_PER_TOKEN_MAX: Final = 16.0
ATTACHMENT_TOKENS: Final = 1000
"""Tokens assumed for one inline image or audio clip, whatever its size."""
START_COUNTS_AS_TOKENS: Final = 50.0
"""Weight of the starting ratio, as tokens of observed prompts."""
MEMORY: Final = 0.98
"""Factor by which each observation fades with every later one."""


class TokenEstimator:
    """An estimator for one model, by bytes per token."""

    def __init__(self, bytes_per_token: float | None = None) -> None:
        self._tokens = START_COUNTS_AS_TOKENS
        self._bytes = START_COUNTS_AS_TOKENS * (bytes_per_token or BYTES_PER_TOKEN_START)

    @property
    def bytes_per_token(self) -> float:
        return self._bytes / self._tokens

    def estimate(self, prompt: Prompt) -> int:
        """Return the estimated tokens of a prompt, at least 1. A prompt of token ids is counted exactly."""
        ids, _ = prompt.token_ids()
        if ids:
            return ids
        tokens = round((prompt.size - prompt.attached_bytes) / self.bytes_per_token)
        return max(1, tokens + prompt.attachments * ATTACHMENT_TOKENS)

    def learn(self, prompt: Prompt, prompt_tokens: int) -> None:
        """Learn from an engine's count of a prompt. Prompts of token ids, with attachments, or with an unlikely ratio
        teach nothing."""
        if prompt_tokens <= 0 or prompt.attachments or prompt.token_ids()[0]:
            return
        ratio = prompt.size / prompt_tokens
        if BYTES_PER_TOKEN_MIN <= ratio <= BYTES_PER_TOKEN_MAX:
            self._bytes = MEMORY * self._bytes + prompt.size
            self._tokens = MEMORY * self._tokens + prompt_tokens
