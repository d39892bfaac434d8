"""What is known of a prompt before an engine has read it: size, estimated tokens, and hashes of its leading blocks.

Tokens are estimated from bytes, by a ratio that the engines' counts teach. By the hashes a policy finds the engine that
has the prompt in its cache. The hashes are of the prompt's JSON, in the order of chat templates. Equal beginnings of
the text are equal beginnings of the tokens, as long as the client writes its JSON the same way each time.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from itertools import islice
from pathlib import Path
from typing import Final

from xxhash import xxh3_64, xxh3_64_intdigest

ATTACHMENT: Final = b";base64,"
"""Mark before the bytes of an inline image or audio clip."""
ATTACHMENTS_MAX: Final = 1 << 12
"""Most attachments that are counted; further ones count as text."""
PROSE_BYTES: Final = 512
"""Bytes per semicolon below which text counts as code."""
BLOCK_BYTES: Final = 512
"""Bytes of a hashed block, about 128 tokens of English: eight blocks of vLLM."""
BLOCKS_MAX: Final = 64
"""Most blocks after the first one. So many blocks tell the cached part of a long prompt to within a thirty-second of
the prompt."""
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
_ATTACHED: Final = re.compile(rb";base64,[A-Za-z0-9+/=\\]++")


class Prompt:
    """The JSON of everything that becomes prompt.

    Attributes:
        head: the text, until it is dropped.
        size: bytes of the text.
        attachments: number of inline images and clips.
        attached_bytes: bytes of the attachments within `size`.
    """

    __slots__ = ("_commas", "_ids", "attached_bytes", "attachments", "head", "size")

    def __init__(self, text: bytes) -> None:
        self.head = text
        self.size = len(text)
        self.attachments = self.attached_bytes = 0
        at = text.find(b";")
        if at >= 0 and _holds_attachment(text, at):
            for found in islice(_ATTACHED.finditer(text), ATTACHMENTS_MAX):
                self.attachments += 1
                self.attached_bytes += found.end() - found.start()
        self._ids: tuple[int, int] | None = None
        self._commas: int | None = None

    def commas(self) -> int:
        """Return the number of commas in the text. A list has at most one item more."""
        if self._commas is None:
            self._commas = self.head.count(b",")
        return self._commas

    def token_ids(self) -> tuple[int, int]:
        """Return the numbers of token ids and of the prompts that hold them, (0, 1) for a text."""
        if self._ids is None:
            head = self.head
            if head.startswith(b"[") and head[:8].lstrip(b"[ \t\r\n")[:1].isdigit():
                self._ids = self.commas() + 1, max(1, head.count(b"]") - 1)
            else:
                self._ids = 0, 1
        return self._ids


def _holds_attachment(text: bytes, at: int) -> bool:
    """Return whether anything is attached as base64. `at` is the first semicolon: C finds one byte eight times as fast
    as several."""
    for _ in range(len(text) // PROSE_BYTES):
        if at < 0 or text.startswith(ATTACHMENT, at):
            return at >= 0
        at = text.find(b";", at + 1)
    return text.find(ATTACHMENT, max(0, at)) >= 0


def prefix_hashes(prompt: bytes, seed: bytes) -> tuple[int, ...]:
    """Return hashes of the prompt's beginnings: of its first block, of all up to the end of each later block, and of
    all.

    Prompts under different seeds (model and cache salt) share no hash. A prompt too long for `BLOCKS_MAX` has blocks of
    twice the length, or four times, and so on. All prompts hash a beginning of one length alike, so a growing
    conversation keeps matching.
    """
    if not prompt:
        return ()
    size, step = len(prompt), BLOCK_BYTES
    while size > step * BLOCKS_MAX:
        step *= 2
    begun = xxh3_64(prompt[:BLOCK_BYTES], xxh3_64_intdigest(seed))
    hashes, at = [begun.intdigest()], BLOCK_BYTES
    for end in range(max(step, 2 * BLOCK_BYTES), size + step, step):
        begun.update(prompt[at:end])
        hashes.append(begun.intdigest())
        at = end
    return tuple(hashes)


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
            text = _ATTACHED.sub(b"", text)
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
