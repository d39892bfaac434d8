"""Is a head equal to the head before it, except for the length of the body?

An engine or client that keeps a connection sends equal heads again and again. All that follows from a head follows from
its bytes, so a head is parsed once, and the result is kept with it.
"""

from __future__ import annotations

from typing import Final

HEAD_BYTES_KEPT: Final = 4096
"""A longer head is read anew each time: an idle connection holds no more than the bytes of a small body."""
_LENGTH: Final = b"\r\ncontent-length:"
_LENGTH_DIGITS_MAX: Final = 18


class RecurringHead:
    """The bytes of an HTTP head that recurs, before and after the digits of its `content-length`."""

    __slots__ = ("_after", "_before")

    def __init__(self) -> None:
        self._before = self._after = b""

    def keep(self, head: bytes, length: bytes) -> bool:
        """Recognise this head from now on, whatever the digits of its length. Return False if the head is too long."""
        if len(head) > HEAD_BYTES_KEPT:
            return False
        at = head.lower().index(_LENGTH) + len(_LENGTH)
        at = head.index(length, at)
        self._before, self._after = head[:at], head[at + len(length) :]
        return True

    def found(self, data: bytes, at: int) -> tuple[int, int]:
        """Return the end of this head in the data, if it begins at `at`, and the length of its body; else (0, 0).

        A head without a body is not recognised, because some fields mean something only where there is one.
        """
        if not data.startswith(self._before, at):
            return 0, 0
        begin = at + len(self._before)
        end = data.find(b"\r", begin, begin + _LENGTH_DIGITS_MAX + 1)
        if end < 0 or not data.startswith(self._after, end):
            return 0, 0
        digits = data[begin:end]
        length = int(digits) if digits.isdigit() else 0
        return (end + len(self._after), length) if length else (0, 0)


AnswerHead = tuple[RecurringHead, list[tuple[bytes, bytes]]]
"""The head of an engine's answer with status 200, and its header fields without the length."""


def answer_head(data: bytes, headers: list[tuple[bytes, bytes]]) -> AnswerHead | None:
    """Return the head of this answer, by which the next one is recognised. None: it is no such head."""
    if data.startswith(b"HTTP/1.1 200 "):
        for number, (name, length) in enumerate(headers):
            if name == b"content-length":
                head, others = RecurringHead(), headers[:number] + headers[number + 1 :]
                return (head, others) if head.keep(data[: data.index(b"\r\n\r\n") + 4], length) else None
    return None
