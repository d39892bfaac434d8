"""Which parts of an answer's JSON are decoded: of a whole one, and of the events of a stream?

The chat, Responses and Messages APIs in one structure each. A `usage` is left as it is written: whatever is wrong in it
must not hide the rest. msgspec fills them in C; they stand apart from the code that reads them, which is compiled.
"""

from __future__ import annotations

from typing import Any

import msgspec
from msgspec import Raw

__all__ = [
    "Body",
    "Choice",
    "Delta",
    "Envelope",
    "ErrorFields",
    "Event",
    "EventChoice",
    "Item",
    "Made",
    "MadeChoice",
    "Message",
    "MessageDelta",
    "decode_body",
    "decode_event",
    "decode_items",
    "decode_made",
]


class Message(msgspec.Struct):
    tool_calls: Raw = Raw()


class Choice(msgspec.Struct):
    finish_reason: str | None = None
    message: Message | str | None = None


class Item(msgspec.Struct):
    type: str = ""


class Body(msgspec.Struct):
    id: Any = None
    usage: Any = None
    choices: list[Choice] = []
    status: Any = None
    stop_reason: Any = None
    output: Raw = Raw()


class MadeChoice(msgspec.Struct):
    message: Raw = Raw()
    text: Raw = Raw()


class Made(msgspec.Struct):
    """Where a whole answer holds what was generated."""

    choices: list[MadeChoice] = []
    output: Raw = Raw()
    content: Raw = Raw()
    text: Raw = Raw()


class Delta(msgspec.Struct):
    role: Any = None
    content: Any = None
    reasoning: Any = None
    reasoning_content: Any = None
    tool_calls: Any = None
    function_call: Any = None
    refusal: Any = None
    audio: Any = None


class EventChoice(msgspec.Struct):
    delta: Delta | None = None
    text: Any = None
    finish_reason: str | None = None


class ErrorFields(msgspec.Struct):
    message: Any = None
    type: Any = None
    code: Any = None


class Envelope(msgspec.Struct):
    """`response` of a Responses event, `message` of Anthropic's message_start."""

    id: str | None = None
    usage: Any = None
    error: ErrorFields | None = None
    status: str | None = None


class MessageDelta(msgspec.Struct):
    stop_reason: Any = None


class Event(msgspec.Struct):
    type: str = ""
    delta: MessageDelta | str | None = None
    choices: list[EventChoice] | None = None
    usage: Any = None
    error: ErrorFields | str | None = None
    response: Envelope | None = None
    message: Envelope | str | None = None
    item: Item | None = None
    code: Any = None


decode_body = msgspec.json.Decoder(Body).decode
decode_items = msgspec.json.Decoder(list[Item]).decode
decode_made = msgspec.json.Decoder(Made).decode
decode_event = msgspec.json.Decoder(Event).decode
