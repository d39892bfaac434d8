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
_NO_EXTRA: Final = "install the extra first: pip install 'fairgate[tokenize]'"


class TokenEstimator:
    """An estimator for one pool, by bytes per token or by the models' tokenizer."""

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
            tokens = self._count(self._counter, prompt, text_bytes)
        else:
            tokens = round(text_bytes / self.bytes_per_token)
        return max(1, tokens + prompt.attachments * ATTACHMENT_TOKENS)

    def _count(self, counter: Callable[[str], int], prompt: Prompt, text_bytes: int) -> int:
        """Count the tokens of the text's first `COUNTED_BYTES_MAX` bytes, and extrapolate to all of it."""
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


def exact_counter(spec: str) -> Callable[[str], int]:
    """Return the counter of a configured tokenizer: a path to a `tokenizer.json`, or `tiktoken:ENCODING`.

    Raise ValueError if it cannot be loaded, or if the extra `tokenize` is missing. A tiktoken encoding must be in its
    local cache, since a gateway needs no network to start.
    """
    if spec.startswith("tiktoken:"):
        return _tiktoken_counter(spec.removeprefix("tiktoken:"))
    try:
        from tokenizers import Tokenizer
    except ImportError as error:
        raise ValueError(_NO_EXTRA) from error
    if not Path(spec).is_file():
        raise ValueError(f"there is no file {spec} to load a tokenizer from")
    try:
        tokenizer = Tokenizer.from_file(spec)
    except Exception as error:  # the library raises no narrower type
        raise ValueError(f"{spec} is no tokenizer.json that can be loaded: {error}") from error
    return lambda text: len(tokenizer.encode(text, add_special_tokens=False).ids)


def _tiktoken_counter(encoding_name: str) -> Callable[[str], int]:
    try:
        import tiktoken
        import tiktoken.load
    except ImportError as error:
        raise ValueError(_NO_EXTRA) from error
    if encoding_name not in (known := tiktoken.list_encoding_names()):
        raise ValueError(f"tiktoken has no '{encoding_name}'; it has {', '.join(known)}")
    tiktoken.load.read_file = _read_local
    try:
        encoding = tiktoken.get_encoding(encoding_name)
    except Exception as error:  # plugins may raise anything
        raise ValueError(f"tiktoken cannot load '{encoding_name}': {error}") from error
    return lambda text: len(encoding.encode(text, disallowed_special=()))


def _read_local(blobpath: str) -> bytes:
    """Read a local file, in place of tiktoken's reader, which would download. Raise FileNotFoundError for a URL."""
    if "://" not in blobpath:
        return Path(blobpath).read_bytes()
    raise FileNotFoundError(
        "it is not in the cache (TIKTOKEN_CACHE_DIR), and nothing is fetched at a start; with a network, run: "
        "python -c \"import tiktoken; tiktoken.get_encoding('ENCODING')\""
    )
