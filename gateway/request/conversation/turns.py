"""The stage of a conversation: which question is being answered, and by how many calls so far?

Chat messages, Anthropic messages and Responses items are read alike. A turn is the user's, the model's, a tool's
result, or an instruction of the app. The question is the user's last turn; the turns after it are the calls of its
interaction. Example: user, model (calls a tool), tool result, model (calls a tool), tool result is the third call, so
stage 3.

Only the roles are decoded; contents stay encoded.
"""

from __future__ import annotations

import re
from typing import Final

import msgspec
from msgspec import Raw

from gateway.request.conversation.turn_keys import FIRST_TURNS, LAST_TURNS, build_turn_keys, named
from gateway.request.fields import Turn, TurnKeys, decode_one_text

QUOTE: Final = ord('"')
INSTRUCTS: Final = ("system", "developer")
"""Roles of the app's own instructions."""
_TOOL_RESULT: Final = b'"tool_result"'
_RESULTS_MAX: Final = 1 << 8
"""Most blocks of one turn that are searched for a tool's result."""
_MARK: Final = b'"cache_control"'
_IS_TYPE: Final = re.compile(rb'"type"\s{0,16}:\s{0,16}\Z')
_TYPE_BYTES_MAX: Final = 48
_BEFORE_MARK: Final = re.compile(rb",\s{0,16}\Z")
_BEFORE_MARK_BYTES: Final = 17
_WHOLE_MARK: Final = re.compile(rb'"cache_control"\s{0,16}:\s{0,16}(?:null|\{[^{}]{0,256}\})')
_AFTER_MARK: Final = re.compile(rb"\s{0,16},")
_MARKS_MAX: Final = 64
"""Most cache marks removed from one question; engines take four."""


class Turns:
    """The facts that the turns of a conversation tell of its interaction, fed turn by turn.

    Attributes:
        questions: the user's own turns up to and with the question; empty if there is none.
        answered: number of earlier questions that the model has replied to.
        begins: True if the question comes last, False if a tool's result does, None if neither does.
        keys: correlation keys by which the interaction is recognised.
    """

    __slots__ = (
        "_calls", "_calls_before", "_has_result", "_in_models_turn", "answered", "begins", "keys", "questions",
    )  # fmt: skip

    def __init__(self) -> None:
        self.questions: list[bytes] = []
        self.answered = 0
        self.begins: bool | None = None
        self.keys = TurnKeys()
        self._calls = 0
        self._calls_before = 0
        """Number of calls up to the model's last turn, whatever was asked since."""
        self._in_models_turn = False
        self._has_result = False
        """Whether a tool's result has come since the model's last turn."""

    def add(self, turn: Turn) -> None:
        """Add the next turn."""
        role = turn.role
        if role == "user":
            content = bytes(turn.content)
            # Text beside a tool's result, such as reminders and images, asks nothing.
            if self._has_result or (content.startswith(b"[") and _holds_result(content)):
                self._add_result()
            else:
                self.ask(content)
        elif role in INSTRUCTS:
            pass
        elif role == "tool" or role == "function" or (role is None and (turn.type or "").endswith("_output")):
            self._add_result()
        else:
            # One call may answer with several items in a row: reasoning, a text, tool calls.
            self._calls += not self._in_models_turn
            self._calls_before = self._calls
            self.begins, self._in_models_turn, self._has_result = None, True, False
            self.answered = len(self.questions)

    def ask(self, question: bytes) -> None:
        """Add a question of the user."""
        self.begins, self._in_models_turn = True, False
        self._calls = 0
        self.questions.append(question)

    def _add_result(self) -> None:
        """Add a tool's result, before which the user's turns since the model's last one asked nothing."""
        self.begins = self._in_models_turn = False
        self._has_result = True
        self._calls = self._calls_before
        del self.questions[self.answered :]

    def stage(self) -> int:
        """Return the call's position among the calls that answer the question, from 1."""
        # If the model's turn comes last, this call continues the answer that it begins.
        return self._calls if self._in_models_turn else self._calls + 1


def read_turns(turns: list[Turn] | None, conversation: Raw) -> Turns:
    """Return the facts that these turns of a conversation tell. Without turns, the conversation is one text."""
    found = Turns()
    if turns is None:
        found.ask(bytes(conversation))
        return found
    for turn in turns:
        found.add(turn)
    found.keys = build_turn_keys(turns[:FIRST_TURNS], turns[-LAST_TURNS:])
    return found


def _holds_result(content: bytes) -> bool:
    """Return whether a list of blocks holds a tool's result."""
    at = -1
    for _ in range(_RESULTS_MAX):
        at = content.find(_TOOL_RESULT, at + 1)
        if at < 0:
            break
        if _IS_TYPE.search(content, max(0, at - _TYPE_BYTES_MAX), at) is not None:
            return True
    return False


def same_text(content: bytes) -> bytes | memoryview:
    """Return the text of a question that is hashed, without cache marks, which agents move from turn to turn.

    A question without marks is returned as it is. If one text block is left without its marks, its text is returned.
    """
    if content.startswith(b'"') or content.find(_MARK) < 0:
        return content
    view = memoryview(content)
    kept: list[memoryview] = []
    done = at = 0
    for _ in range(_MARKS_MAX):
        at = content.find(_MARK, at)
        if at < 0:
            break
        begin, end = _mark_at(content, at, done)
        if end > begin:
            kept.append(view[done:begin])
            done = end
        at = max(end, at + 1)
    kept.append(view[done:])
    plain = b"".join(kept)
    try:
        (block,) = decode_one_text(plain)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return plain
    return memoryview(block.text)


def _mark_at(content: bytes, at: int, low: int) -> tuple[int, int]:
    """Return the bounds of the cache mark whose name stands at `at`, with one comma; (at, at) if there is none. Bytes
    before `low` belong to another mark.

    JSON strings hold no bare quote, so a match is structure and never the user's text.
    """
    found = _WHOLE_MARK.match(content, at)
    if found is None:
        return at, at
    end = found.end()
    comma = _BEFORE_MARK.search(content, max(low, at - _BEFORE_MARK_BYTES), at)
    if comma is not None:
        return comma.start(), end
    after = _AFTER_MARK.match(content, end)
    return at, end if after is None else after.end()


def name_of_questions(questions: list[bytes], *rest: bytes) -> str:
    """Return a short name of these questions, and of the `rest` that sets them apart."""
    return named(*[same_text(question) for question in questions], *rest)
