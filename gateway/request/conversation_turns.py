"""Where does a conversation stand? Which question is being answered, and how many calls has the answer taken?

Reads chat messages, Anthropic messages and Responses items alike: a turn is the user's, the model's, a tool's result,
or an instruction of the app. The question is the user's last turn; what follows it are the calls of its interaction.
Only the roles are decoded, contents stay unparsed.
"""

from __future__ import annotations

import re
from typing import Final

import msgspec
from msgspec import Raw

from gateway.request.fields import decode_turns

__all__ = ["NO_TURNS", "QUOTE", "Turns", "read_turns", "same_text"]

QUOTE: Final = ord('"')
_TOOL_RESULT: Final = re.compile(rb'"type"\s*:\s*"tool_result"')
_CACHE_MARK: Final = re.compile(
    rb',\s*"cache_control"\s*:\s*(?:null|\{[^{}]*\})|"cache_control"\s*:\s*(?:null|\{[^{}]*\})\s*,'
)
_ONE_TEXT: Final = re.compile(rb'\[\s*\{\s*"type"\s*:\s*"text"\s*,\s*"text"\s*:\s*("(?:[^"\\]|\\.)*")\s*\}\s*\]')


class Turns:
    """What the shape of a conversation tells of the interaction it is in.

    Attributes:
        questions: the user's own turns up to the question, the last one being the question; empty if there is none.
        stage: the call's place among those that answer the question, from 1.
        begins: True if the question comes last; False if a tool's result does; None if neither does.
        instruction_bytes: of the system and developer turns.
    """

    __slots__ = ("begins", "instruction_bytes", "questions", "stage")

    def __init__(self, questions: list[bytes], stage: int, begins: bool | None, instruction_bytes: int) -> None:
        self.questions = questions
        self.stage = stage
        self.begins = begins
        self.instruction_bytes = instruction_bytes


NO_TURNS: Final = Turns([], 1, None, 0)


def read_turns(conversation: Raw) -> Turns:
    """Read `messages` or `input` as they stand in the body. What is no conversation has no turns: the engine judges."""
    if not conversation:
        return NO_TURNS
    try:
        turns = decode_turns(conversation)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        text = bytes(conversation)
        return Turns([text], 1, True, 0) if text[0] == QUOTE else NO_TURNS
    questions: list[bytes] = []
    calls = 0
    begins: bool | None = None
    in_models_turn = False
    instruction_bytes = 0
    for turn in turns:
        role = turn.role
        if role == "user":
            content = bytes(turn.content)
            begins = not (content.startswith(b"[") and _TOOL_RESULT.search(content))
            if begins:
                questions.append(content)
                calls = 0
            in_models_turn = False
        elif role == "system" or role == "developer":
            instruction_bytes += len(turn.content)
        elif role == "tool" or role == "function" or (role is None and (turn.type or "").endswith("_output")):
            begins = in_models_turn = False
        else:
            # One call may answer with several items in a row: reasoning, a text, the calls of tools.
            calls += not in_models_turn
            begins, in_models_turn = None, True
    if in_models_turn:
        calls -= 1  # the beginning of an answer that this call is to go on with
    return Turns(questions, calls + 1, begins, instruction_bytes)


def same_text(content: bytes) -> bytes:
    """The content in its plainest form, without marks for the engine's cache: agents move these from turn to turn."""
    if content.startswith(b'"') or content.find(b'"cache_control"') < 0:
        return content
    # JSON strings hold no bare quote, so what matches is structure and never the user's text.
    return _ONE_TEXT.sub(rb"\1", _CACHE_MARK.sub(b"", content))
