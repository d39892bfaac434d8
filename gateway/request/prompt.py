"""How large is a prompt, and how does it begin? What admission needs of it, without a copy of what is long."""

from __future__ import annotations

import re
from itertools import islice
from typing import Final

ATTACHMENT: Final = b";base64,"
"""Where the bytes of an inline image or audio clip begin."""
ATTACHMENTS_MAX: Final = 1 << 12
"""Attachments beyond these count as text."""
PROSE_BYTES: Final = 512
"""Text with more semicolons than one in so many bytes is code."""
_ATTACHED: Final = re.compile(rb";base64,[A-Za-z0-9+/=\\]++")


class Prompt:
    """JSON of everything that becomes prompt.

    Attributes:
        head: its text, until that is let go. size: bytes of it.
        attachments: how many inline images and clips there are.
        attached_bytes: what they take of `size`.
    """

    __slots__ = ("_commas", "_ids", "attached_bytes", "attachments", "head", "size")

    def __init__(self, head: bytes, size: int, attachments: int, attached_bytes: int) -> None:
        self.head = head
        self.size = size
        self.attachments = attachments
        self.attached_bytes = attached_bytes
        self._ids: tuple[int, int] | None = None
        self._commas: int | None = None

    def let_go(self, counts_commas: bool) -> None:
        """Hold no more of its text, but what follows from it."""
        self.token_ids()
        if counts_commas:
            self.commas()
        self.head = b""

    def commas(self) -> int:
        """Count the commas of its text: a list has one item more at most."""
        if self._commas is None:
            self._commas = self.head.count(b",")
        return self._commas

    def token_ids(self) -> tuple[int, int]:
        """Return the number of its token ids, and of the prompts that they are in; (0, 1) of a text."""
        if self._ids is None:
            head = self.head
            if head.startswith(b"[") and head[:8].lstrip(b"[ \t\r\n")[:1].isdigit():
                self._ids = self.commas() + 1, max(1, head.count(b"]") - 1)
            else:
                self._ids = 0, 1
        return self._ids


def prompt_of(text: bytes) -> Prompt:
    """A prompt that is at hand as a whole."""
    attachments = attached_bytes = 0
    at = text.find(b";")
    if at >= 0 and holds_attachment(text, at):
        for found in islice(_ATTACHED.finditer(text), ATTACHMENTS_MAX):
            attachments += 1
            attached_bytes += found.end() - found.start()
    return Prompt(text, len(text), attachments, attached_bytes)


def holds_attachment(text: bytes, at: int) -> bool:
    """Is anything attached as base64? `at`: the first semicolon. C finds one byte eight times as fast as several."""
    for _ in range(len(text) // PROSE_BYTES):
        if at < 0 or text.startswith(ATTACHMENT, at):
            return at >= 0
        at = text.find(b";", at + 1)
    return text.find(ATTACHMENT, max(0, at)) >= 0


def without_attachments(text: bytes) -> bytes:
    """What of it is text."""
    return _ATTACHED.sub(b"", text)
