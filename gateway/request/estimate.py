"""An estimator of prompt tokens before admission, from bytes by a ratio that the engines' counts teach."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Final

from gateway.request.prompt import Prompt, without_attachments

BYTES_PER_TOKEN_START: Final = 4.0
BYTES_PER_TOKEN_MIN: Final = 0.5
BYTES_PER_TOKEN_MAX: Final = 16.0
ATTACHMENT_TOKENS: Final = 1000
"""Tokens assumed for one inline image or audio clip, whatever its size."""
START_COUNTS_AS_TOKENS: Final = 50.0
"""Weight of the starting ratio, as tokens of observed prompts."""
MEMORY: Final = 0.98
"""Factor by which each observation fades with every later one."""
COUNTED_BYTES_MAX: Final = 32768
"""Bytes of a text that are tokenized, which takes some milliseconds; the rest is extrapolated."""
LOOKED_AT_BYTES_MAX: Final = 1 << 20
"""Bytes of a prompt that are searched for text between attachments."""


class TokenEstimator:
    """An estimator for one model, by bytes per token or by the model's own tokenizer."""

    def __init__(self, *, bytes_per_token: float | None = None, counter: Callable[[str], int] | None = None) -> None:
        self._counter = counter
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
        text_bytes = prompt.size - prompt.attached_bytes
        if self._counter is not None:
            tokens = self._counted(self._counter, prompt, text_bytes)
        else:
            tokens = round(text_bytes / self.bytes_per_token)
        return max(1, tokens + prompt.attachments * ATTACHMENT_TOKENS)

    def _counted(self, counter: Callable[[str], int], prompt: Prompt, text_bytes: int) -> int:
        text = prompt.head[:LOOKED_AT_BYTES_MAX]
        if prompt.attachments:
            text = without_attachments(text)
        text = text[:COUNTED_BYTES_MAX]
        if not text:
            return round(text_bytes / self.bytes_per_token)
        tokens = counter(text.decode("utf-8", "replace"))
        return tokens if len(text) >= text_bytes else round(tokens * text_bytes / len(text))

    def learn(self, prompt: Prompt, prompt_tokens: int) -> None:
        """Learn from an engine's count of a prompt. Prompts of token ids, with attachments, or with an unlikely ratio
        teach nothing."""
        if prompt_tokens <= 0 or prompt.attachments or prompt.token_ids()[0]:
            return
        ratio = prompt.size / prompt_tokens
        if BYTES_PER_TOKEN_MIN <= ratio <= BYTES_PER_TOKEN_MAX:
            self._bytes = MEMORY * self._bytes + prompt.size
            self._tokens = MEMORY * self._tokens + prompt_tokens


def exact_counter(file: str) -> Callable[[str], int]:
    """Return the counter of a configured tokenizer, the path of a `tokenizer.json`.

    Raise ValueError if the file cannot be loaded, or if the extra `tokenize` is missing.
    """
    try:
        from tokenizers import Tokenizer
    except ImportError as error:
        raise ValueError("install the extra first: pip install 'fairgate[tokenize]'") from error
    if not Path(file).is_file():
        raise ValueError(f"there is no file {file} to load a tokenizer from")
    try:
        tokenizer = Tokenizer.from_file(file)
    except Exception as error:  # the library raises no narrower type
        raise ValueError(f"{file} is no tokenizer.json that can be loaded: {error}") from error
    return lambda text: len(tokenizer.encode(text, add_special_tokens=False).ids)
