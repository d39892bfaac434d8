"""The stage of a conversation: which question is being answered, and by how many calls so far?

Chat messages, Anthropic messages and Responses items are read alike. A turn is the user's, the model's, a tool's
result, or an instruction of the app. The question is the user's last turn; the turns after it are the calls of its
interaction. Example: user, model (calls a tool), tool result, model (calls a tool), tool result is the third call, so
stage 3.

Only the roles are decoded; contents stay encoded.
"""

from __future__ import annotations

import re
from enum import Enum
from hashlib import sha256
from typing import Final

import msgspec
from msgspec import Raw
from xxhash import xxh3_64_hexdigest

from gateway.request.conversation.turn_keys import (
    FIRST_TURNS,
    LAST_TURNS,
    keys_of_turns,
)
from gateway.request.fields import TooManyItemsError, Turn, TurnKeys, decode_one_text, decode_turns

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
    """The facts that the turns of a conversation tell of its interaction.

    Attributes:
        questions: the user's own turns up to and with the question; empty if there is none.
        answered: number of earlier questions that the model has replied to.
        stage: the call's position among the calls that answer the question, from 1.
        begins: True if the question comes last, False if a tool's result does, None if neither does.
        keys: correlation keys by which the interaction is recognised.
    """

    __slots__ = ("answered", "begins", "keys", "questions", "stage")

    def __init__(self, questions: list[bytes], answered: int, counter: StageCounter, keys: TurnKeys) -> None:
        self.questions = questions
        self.stage = counter.stage()
        self.begins = counter.begins
        self.keys = keys
        self.answered = answered


class TurnKind(Enum):
    """The kinds of turns."""

    ASKS = 1
    """A question, unless a tool's result follows before the model's next turn."""
    RESULT = 2
    """A tool's result, or the user's text beside one."""
    MODEL = 3
    OTHER = 4


class StageCounter:
    """A counter of the calls since the last question of a conversation, fed turn by turn."""

    __slots__ = ("_calls", "_calls_before", "_has_result", "_in_models_turn", "begins")

    def __init__(self) -> None:
        self._calls = 0
        self._calls_before = 0
        """Number of calls up to the model's last turn, whatever was asked since."""
        self.begins: bool | None = None
        self._in_models_turn = False
        self._has_result = False
        """Whether a tool's result has come since the model's last turn."""

    def of_user(self, *, is_question: bool) -> TurnKind:
        """Add a turn of the user: a question or a tool's result. Text beside a result, such as reminders and images,
        asks nothing."""
        if not is_question or self._has_result:
            return self._result()
        self.begins, self._in_models_turn = True, False
        self._calls = 0
        return TurnKind.ASKS

    def of_other(self, turn: Turn) -> TurnKind:
        """Add a turn of anyone but the user."""
        role = turn.role
        if role in INSTRUCTS:
            return TurnKind.OTHER
        if role == "tool" or role == "function" or (role is None and (turn.type or "").endswith("_output")):
            return self._result()
        # One call may answer with several items in a row: reasoning, a text, tool calls.
        self._calls += not self._in_models_turn
        self._calls_before = self._calls
        self.begins, self._in_models_turn, self._has_result = None, True, False
        return TurnKind.MODEL

    def _result(self) -> TurnKind:
        """Begin a tool's result."""
        self.begins = self._in_models_turn = False
        self._has_result = True
        self._calls = self._calls_before
        return TurnKind.RESULT

    def stage(self) -> int:
        # If the model's turn comes last, this call continues the answer that it begins.
        return self._calls if self._in_models_turn else self._calls + 1


def decoded_turns(conversation: Raw) -> list[Turn] | None:
    """Return the turns of `messages` or `input` as they stand in the body. None for any other value, which the engine
    judges, and for a very long conversation."""
    try:
        return decode_turns(conversation) if conversation else None
    except (TooManyItemsError, msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return None


def read_turns(turns: list[Turn] | None, conversation: Raw) -> Turns:
    """Return the facts that these turns of a conversation tell. Without turns, the conversation is one text."""
    counter = StageCounter()
    questions: list[bytes] = []
    answered = 0
    if turns is None:
        counter.of_user(is_question=True)
        return Turns([bytes(conversation)], 0, counter, TurnKeys())
    for turn in turns:
        if turn.role == "user":
            content = bytes(turn.content)
            kind = counter.of_user(is_question=not (content.startswith(b"[") and _holds_result(content)))
        else:
            kind = counter.of_other(turn)
        if kind is TurnKind.ASKS:
            questions.append(content)
        elif kind is TurnKind.RESULT:
            del questions[answered:]
        elif kind is TurnKind.MODEL:
            answered = len(questions)
    return Turns(questions, answered, counter, keys_of_turns(turns[:FIRST_TURNS], turns[-LAST_TURNS:]))


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


def named(*parts: bytes | memoryview) -> str:
    """Return a short name of these parts, by XXH3, at a tenth of sha256's cost. The parts are JSON or printable, so
    none holds a NUL."""
    return xxh3_64_hexdigest(b"\0".join(parts))


def hashed(*parts: bytes) -> str:
    """Return a short name that hides its parts, which may be a client's ids."""
    return sha256(b"\0".join(parts)).hexdigest()[:16]
