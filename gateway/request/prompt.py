"""The size of a prompt, without copies of long text, and hashes of its leading blocks.

By the hashes a policy finds the engine that has the prompt in its cache. Nothing is tokenized: the hashes are of the
prompt's JSON, in the order of chat templates. Equal beginnings of the text are equal beginnings of the tokens, as long
as the client writes its JSON the same way each time.
"""

from __future__ import annotations

import re
from itertools import islice
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
_ATTACHED: Final = re.compile(rb";base64,[A-Za-z0-9+/=\\]++")


class Prompt:
    """The JSON of everything that becomes prompt.

    Attributes:
        head: the text, until `drop_text`.
        size: bytes of the text.
        attachments: number of inline images and clips.
        attached_bytes: bytes of the attachments within `size`.
    """

    __slots__ = ("_commas", "_ids", "attached_bytes", "attachments", "head", "size")

    def __init__(self, head: bytes, size: int, attachments: int, attached_bytes: int) -> None:
        self.head = head
        self.size = size
        self.attachments = attachments
        self.attached_bytes = attached_bytes
        self._ids: tuple[int, int] | None = None
        self._commas: int | None = None

    def drop_text(self, counts_commas: bool) -> None:
        """Drop the text, and keep its counts of token ids and, with `counts_commas`, of commas."""
        self.token_ids()
        if counts_commas:
            self.commas()
        self.head = b""

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


def prompt_of(text: bytes) -> Prompt:
    """Return the prompt of a complete text."""
    attachments = attached_bytes = 0
    at = text.find(b";")
    if at >= 0 and holds_attachment(text, at):
        for found in islice(_ATTACHED.finditer(text), ATTACHMENTS_MAX):
            attachments += 1
            attached_bytes += found.end() - found.start()
    return Prompt(text, len(text), attachments, attached_bytes)


def holds_attachment(text: bytes, at: int) -> bool:
    """Return whether anything is attached as base64. `at` is the first semicolon: C finds one byte eight times as fast
    as several."""
    for _ in range(len(text) // PROSE_BYTES):
        if at < 0 or text.startswith(ATTACHMENT, at):
            return at >= 0
        at = text.find(b";", at + 1)
    return text.find(ATTACHMENT, max(0, at)) >= 0


def without_attachments(text: bytes) -> bytes:
    """Return the text without attachments."""
    return _ATTACHED.sub(b"", text)


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
