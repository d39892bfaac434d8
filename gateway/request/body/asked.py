"""What has the user asked in a long conversation? Names of the questions, made in slices and without copies."""

from __future__ import annotations

from collections.abc import Generator
from typing import Final

from xxhash import xxh3_64

from gateway.request.body.json_ranges import end_of_string
from gateway.request.body.slices import WINDOW_BYTES, Slices, find
from gateway.request.conversation.turns import MARK, MARKS_MAX, ONE_TEXT_HEAD, ONE_TEXT_TAIL, QUOTE, TurnKind, mark_at

AROUND_BYTES_MAX: Final = 1 << 16
"""Of what stands around a text, looked at to see whether it is all of a turn."""


class Asked:
    """The names of the user's questions: of all together, and of the last one. Each is brought into its plainest form
    first, as `same_text` does it."""

    def __init__(self, body: bytes) -> None:
        self._body = body
        self._view = memoryview(body)
        self.all = xxh3_64()
        self.count = 0
        self.all_answered = xxh3_64()
        self.answered = 0
        """How many of them the model has said something to, and their name."""
        self._last = b""
        self._last_pieces: list[int] = []
        self._last_answered = self._last, self._last_pieces

    def add(self, text: bytes) -> None:
        """A question that is short."""
        self._next()
        self.all.update(text)
        self._last, self._last_pieces = text, []

    def add_range(self, at: int, end: int) -> Slices:
        """One that is long: where it stands in the body."""
        self._next()
        self._last = b""
        self._last_pieces = yield from self._plain(at, end)
        yield from self._hash(self.all, self._last_pieces)

    def note(self, kind: TurnKind) -> None:
        """A turn that asks nothing. A tool's result shows that what was said beside it was no question."""
        if kind is TurnKind.MODEL:
            self.all_answered, self.answered = self.all.copy(), self.count
            self._last_answered = self._last, self._last_pieces
        elif kind is TurnKind.RESULT and self.count > self.answered:
            self.all, self.count = self.all_answered.copy(), self.answered
            self._last, self._last_pieces = self._last_answered

    def last(self) -> Generator[None, None, xxh3_64]:
        """The name of the last one."""
        name = xxh3_64(self._last)
        yield from self._hash(name, self._last_pieces)
        return name

    def _next(self) -> None:
        if self.count:
            self.all.update(b"\0")
        self.count += 1

    def _hash(self, name: xxh3_64, pieces: list[int]) -> Slices:
        for number in range(0, len(pieces), 2):
            at, end = pieces[number], pieces[number + 1]
            while at < end:
                name.update(self._view[at : min(at + WINDOW_BYTES, end)])
                at += WINDOW_BYTES
                yield

    def _plain(self, at: int, end: int) -> Generator[None, None, list[int]]:
        """Begins and ends of what is left without marks, by turns."""
        body = self._body
        if body[at] == QUOTE:
            return [at, end]
        pieces: list[int] = [at]
        done = at
        for _ in range(MARKS_MAX):
            mark = yield from find(body, MARK, at, end)
            if mark < 0:
                break
            begin, until = mark_at(body, mark, done, end)
            if until > begin:
                pieces += (begin, until)
                done = until
            at = max(until, mark + 1)
        pieces.append(end)
        if done > pieces[0]:
            one = yield from self._one_text(pieces)
            return one or pieces
        return pieces

    def _one_text(self, pieces: list[int]) -> Generator[None, None, list[int]]:
        """Where its text is, if it is one block of text; else nothing."""
        body = self._body
        pairs = [(pieces[number], pieces[number + 1]) for number in range(0, len(pieces), 2)]
        long = max(range(len(pairs)), key=lambda number: pairs[number][1] - pairs[number][0])
        at, end = pairs[long]
        before = b"".join([body[a : min(b, a + AROUND_BYTES_MAX)] for a, b in pairs[:long]])
        after = b"".join([body[a : min(b, a + AROUND_BYTES_MAX)] for a, b in pairs[long + 1 :]])
        head = ONE_TEXT_HEAD.match(before + body[at : min(end, at + AROUND_BYTES_MAX)])
        if head is None or head.end() < len(before):
            return []
        text = at + head.end() - len(before)
        text_end = yield from end_of_string(body, text + 1)
        tail = body[text_end : min(end, text_end + AROUND_BYTES_MAX)] + after
        return [] if text_end > end or ONE_TEXT_TAIL.fullmatch(tail) is None else [text, text_end]
