"""How many tokens will this prompt be? Before admission it is bytes; the ratio is learned from what came back."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Final

__all__ = ["TokenEstimator", "exact_counter"]

BYTES_PER_TOKEN_START: Final = 4.0
BYTES_PER_TOKEN_MIN: Final = 0.5
BYTES_PER_TOKEN_MAX: Final = 16.0
ATTACHMENT_TOKENS: Final = 1000
"""Taken for one inline image or audio clip, whatever the bytes of its base64."""
START_COUNTS_AS_TOKENS: Final = 50.0
"""The starting ratio weighs as much as one observed prompt of so many tokens."""
MEMORY: Final = 0.98
"""Each observation fades by this much with every later one."""

_ATTACHMENT: Final = re.compile(rb";base64,[A-Za-z0-9+/=\\]+")


class TokenEstimator:
    """Prompt tokens of a request to one model, by bytes per token or by the model's own tokenizer."""

    def __init__(self, *, bytes_per_token: float | None = None, counter: Callable[[str], int] | None = None) -> None:
        self._counter = counter
        self._tokens = START_COUNTS_AS_TOKENS
        self._bytes = START_COUNTS_AS_TOKENS * (bytes_per_token or BYTES_PER_TOKEN_START)

    @property
    def bytes_per_token(self) -> float:
        return self._bytes / self._tokens

    def estimate(self, prompt: bytes, *, is_text: bool = False) -> int:
        """Tokens of a prompt given as the JSON of its messages, at least 1. `is_text`: it is known that nothing is
        attached to it as base64."""
        attachments = 0
        if not is_text:
            prompt, attachments = _ATTACHMENT.subn(b"", prompt)
        if self._counter is not None:
            tokens = self._counter(prompt.decode("utf-8", "replace"))
        else:
            tokens = round(len(prompt) / self.bytes_per_token)
        return max(1, tokens + attachments * ATTACHMENT_TOKENS)

    def learn(self, prompt: bytes, prompt_tokens: int, *, is_text: bool = False) -> None:
        """The engine counted this many tokens in that prompt."""
        if prompt_tokens <= 0 or not (is_text or prompt.find(b";base64,") < 0):
            return
        prompt_bytes = len(prompt)
        ratio = prompt_bytes / prompt_tokens
        if BYTES_PER_TOKEN_MIN <= ratio <= BYTES_PER_TOKEN_MAX:
            self._bytes = MEMORY * self._bytes + prompt_bytes
            self._tokens = MEMORY * self._tokens + prompt_tokens


def exact_counter(spec: str) -> Callable[[str], int]:
    """A tokenizer from the config: a path to a `tokenizer.json`, or `tiktoken:ENCODING`. Needs the extra `tokenize`.

    Raises ValueError with what to do when it cannot be had; a tiktoken encoding must be in its local cache, since a
    gateway does not reach for the network to start.
    """
    if spec.startswith("tiktoken:"):
        return _tiktoken_counter(spec.removeprefix("tiktoken:"))
    try:
        from tokenizers import Tokenizer
    except ImportError as error:
        raise ValueError("tokenizer: install the extra first: pip install 'fairgate[tokenize]'") from error
    if not Path(spec).is_file():
        raise ValueError(f"tokenizer: there is no file {spec}")
    tokenizer = Tokenizer.from_file(spec)
    return lambda text: len(tokenizer.encode(text, add_special_tokens=False).ids)


def _tiktoken_counter(encoding_name: str) -> Callable[[str], int]:
    try:
        import tiktoken
    except ImportError as error:
        raise ValueError("tokenizer: install the extra first: pip install 'fairgate[tokenize]'") from error
    try:
        encoding = tiktoken.get_encoding(encoding_name)
    except Exception as error:  # tiktoken raises whatever its HTTP client raises when the encoding is not cached
        raise ValueError(
            f"tokenizer: tiktoken has no '{encoding_name}' in its cache (TIKTOKEN_CACHE_DIR): {error}"
        ) from error
    return lambda text: len(encoding.encode(text, disallowed_special=()))
