"""Where does a conversation stand? Which question is being answered, and how many calls has the answer taken?

Reads chat messages, Anthropic messages and Responses items alike: a turn is the user's, the model's, a tool's result,
or an instruction of the app. The question is the user's last turn; what follows it are the calls of its interaction.
Only the roles are decoded, contents stay unparsed.
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
    NO_TURN_KEYS,
    TurnKeys,
    keys_of_question,
    keys_of_turns,
)
from gateway.request.fields import TooManyError, Turn, decode_one_text, decode_turns

QUOTE: Final = ord('"')
_TOOL_RESULT: Final = b'"tool_result"'
_RESULTS_MAX: Final = 1 << 8
"""Blocks of one turn that are looked at, for a tool's result."""
_MARK: Final = b'"cache_control"'
_IS_TYPE: Final = re.compile(rb'"type"\s{0,16}:\s{0,16}\Z')
_TYPE_BYTES_MAX: Final = 48
_BEFORE_MARK: Final = re.compile(rb",\s{0,16}\Z")
_BEFORE_MARK_BYTES: Final = 17
_WHOLE_MARK: Final = re.compile(rb'"cache_control"\s{0,16}:\s{0,16}(?:null|\{[^{}]{0,256}\})')
_AFTER_MARK: Final = re.compile(rb"\s{0,16},")
_MARKS_MAX: Final = 64
"""Marks that are looked for in one question; engines take four."""


class Turns:
    """What the shape of a conversation tells of the interaction it is in.

    Attributes:
        questions: the user's own turns up to the question, the last one being the question; empty if there is none.
        stage: the call's place among the calls that answer the question, from 1. begins: True if the question comes
        last; False if a tool's result does; None if neither does. instruction_bytes: of the system and developer turns.
        keys: the correlation keys by which its interaction is recognised.
    """

    __slots__ = ("_answered", "begins", "instruction_bytes", "keys", "questions", "stage")

    def __init__(self, questions: list[bytes], answered: int, shape: Shape, keys: TurnKeys) -> None:
        """`answered`: how many of the questions the model has said something to."""
        self.questions = questions
        self.stage = shape.stage()
        self.begins = shape.begins
        self.instruction_bytes = shape.instruction_bytes
        self.keys = keys
        self._answered = answered

    @property
    def asks(self) -> bool:
        """Is there a question?"""
        return bool(self.questions)

    @property
    def has_answers(self) -> bool:
        """Was there a question before the last ones, and an answer to it?"""
        return self._answered > 0

    @property
    def is_lone(self) -> bool:
        """Is it one question, and nothing was said before it?"""
        keys = self.keys
        return self.begins is True and not self._answered and not keys.turn and not keys.tool_ids

    def named(self, *rest: bytes, last_only: bool = False) -> str:
        """A short name for all that was asked, or for the last question, and for the rest that sets it apart."""
        questions = self.questions
        if last_only or len(questions) == 1:
            return named(same_text(questions[-1]), *rest)
        return named(*[same_text(question) for question in questions], *rest)

    def named_before(self, *rest: bytes) -> str:
        """The same for all that was asked up to the last answer: the name that the conversation had then."""
        return named(*[same_text(question) for question in self.questions[: self._answered]], *rest)


class TurnKind(Enum):
    """What is a turn?"""

    ASKS = 1
    """It is a question, unless a tool's result follows before the model's next turn."""
    RESULT = 2
    """A tool's result, or what the user says beside one."""
    MODEL = 3
    OTHER = 4


class Shape:
    """Turns as they come by, one after another: what they come to."""

    __slots__ = ("_calls", "_calls_before", "_has_result", "_in_models_turn", "begins", "instruction_bytes")

    def __init__(self) -> None:
        self._calls = 0
        self._calls_before = 0
        """Calls up to the last turn of the model, whatever was asked since."""
        self.begins: bool | None = None
        self._in_models_turn = False
        self._has_result = False
        """A tool's result has come since the model's last turn."""
        self.instruction_bytes = 0

    def of_user(self, *, is_question: bool) -> TurnKind:
        """A turn of the user, who asks, or hands in a tool's result. Beside a result nothing is asked: reminders and
        images stand there."""
        if not is_question or self._has_result:
            return self._result()
        self.begins, self._in_models_turn = True, False
        self._calls = 0
        return TurnKind.ASKS

    def of_other(self, turn: Turn, content_bytes: int) -> TurnKind:
        """Any other turn."""
        role = turn.role
        if role == "system" or role == "developer":
            self.instruction_bytes += content_bytes
            return TurnKind.OTHER
        if role == "tool" or role == "function" or (role is None and (turn.type or "").endswith("_output")):
            return self._result()
        # One call may answer with several items in a row: reasoning, a text, the calls of tools.
        self._calls += not self._in_models_turn
        self._calls_before = self._calls
        self.begins, self._in_models_turn, self._has_result = None, True, False
        return TurnKind.MODEL

    def _result(self) -> TurnKind:
        self.begins = self._in_models_turn = False
        self._has_result = True
        self._calls = self._calls_before
        return TurnKind.RESULT

    def stage(self) -> int:
        # A turn of the model that comes last is the beginning of an answer that this call is to go on with.
        return self._calls if self._in_models_turn else self._calls + 1


NO_TURNS: Final = Turns([], 0, Shape(), NO_TURN_KEYS)


def _question() -> Shape:
    shape = Shape()
    shape.of_user(is_question=True)
    return shape


QUESTION: Final = _question()
"""One question, before which nothing was said."""


def read_turns(conversation: Raw) -> Turns:
    """Read `messages` or `input` as they stand in the body. What is no conversation, or a very long one, has no turns:
    the engine judges."""
    if not conversation:
        return NO_TURNS
    try:
        turns = decode_turns(conversation)
    except TooManyError:
        return NO_TURNS
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        text = bytes(conversation)
        return Turns([text], 0, QUESTION, NO_TURN_KEYS) if text[0] == QUOTE else NO_TURNS
    if 0 < len(turns) <= 2 and (found := _of_question(turns[-1], turns[0])) is not None:
        return found
    shape = Shape()
    questions: list[bytes] = []
    answered = 0
    for turn in turns:
        if turn.role == "user":
            content = bytes(turn.content)
            kind = shape.of_user(is_question=not (content.startswith(b"[") and _holds_result(content)))
        else:
            kind = shape.of_other(turn, len(turn.content))
        if kind is TurnKind.ASKS:
            questions.append(content)
        elif kind is TurnKind.RESULT:
            del questions[answered:]
        elif kind is TurnKind.MODEL:
            answered = len(questions)
    return Turns(questions, answered, shape, keys_of_turns(turns[:FIRST_TURNS], turns[-LAST_TURNS:]))


def _of_question(last: Turn, first: Turn) -> Turns | None:
    """Return the turns of a text of the user, alone or behind one instruction of the app: as most requests are. None:
    they are others."""
    content = bytes(last.content)
    if last.role != "user" or not content.startswith(b'"'):
        return None
    if first is last:
        return Turns([content], 0, QUESTION, keys_of_question(content, b""))
    role = first.role
    ids = last.tool_call_id or last.call_id or first.tool_call_id or first.call_id
    if ids or (role != "system" and role != "developer"):
        return None
    instructions = bytes(first.content)
    turns = Turns([content], 0, QUESTION, keys_of_question(content, instructions))
    turns.instruction_bytes = len(instructions)
    return turns


def _holds_result(content: bytes) -> bool:
    """Does a list of blocks hold a tool's result?"""
    at = -1
    for _ in range(_RESULTS_MAX):
        at = content.find(_TOOL_RESULT, at + 1)
        if at < 0:
            break
        if _IS_TYPE.search(content, max(0, at - _TYPE_BYTES_MAX), at) is not None:
            return True
    return False


def same_text(content: bytes) -> bytes | memoryview:
    """Return what is hashed of a question: its plainest form, without marks for the engine's cache (agents move these
    from turn to turn)."""
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
    """Return where the mark begins and ends whose name stands at `at`, with one comma; (at, at) if it is none. What
    stands before `low` belongs to another mark.

    JSON strings hold no bare quote, so what is found is structure and never the user's text.
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


def named(*parts: bytes | memoryview) -> str:
    """Return a short name for these parts, as only text is: XXH3, at a tenth of what sha256 takes. None of the parts
    holds a NUL: they are JSON, or printable."""
    return xxh3_64_hexdigest(b"\0".join(parts))


def hashed(*parts: bytes) -> str:
    """The same where a part may be an id that is to stay unknown."""
    return sha256(b"\0".join(parts)).hexdigest()[:16]
