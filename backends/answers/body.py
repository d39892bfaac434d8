"""The decoded parts of an answer's JSON, and of the events of a stream.

One structure each serves the chat, Responses and Messages APIs. Members that may have any type stay raw: an error in
one must not hide the rest, and a large one is not unfolded. msgspec fills these structures in C, so they stand apart
from the compiled code that reads them.
"""

from __future__ import annotations

import msgspec
from msgspec import Raw

Scalar = str | int | float | bool | None


class Message(msgspec.Struct):
    content: Raw = Raw()
    tool_calls: Raw = Raw()


class Choice(msgspec.Struct):
    finish_reason: str | None = None
    message: Message | str | None = None


class Item(msgspec.Struct):
    type: str = ""


class Body(msgspec.Struct):
    id: Scalar = None
    usage: Raw = Raw()
    choices: list[Choice] = []
    status: Scalar = None
    stop_reason: Scalar = None
    content: Raw = Raw()
    output: Raw = Raw()


class GeneratedChoice(msgspec.Struct):
    message: Raw = Raw()
    text: Raw = Raw()


class GeneratedBody(msgspec.Struct):
    """The generated parts of a complete answer."""

    choices: list[GeneratedChoice] = []
    output: Raw = Raw()
    content: Raw = Raw()
    text: Raw = Raw()


class Delta(msgspec.Struct):
    role: Scalar = None
    content: Raw = Raw()
    reasoning: Raw = Raw()
    reasoning_content: Raw = Raw()
    tool_calls: Raw = Raw()
    function_call: Raw = Raw()
    refusal: Raw = Raw()
    audio: Raw = Raw()


class EventChoice(msgspec.Struct):
    index: Raw = Raw()
    delta: Delta | None = None
    text: Raw = Raw()
    finish_reason: str | None = None


class ErrorFields(msgspec.Struct):
    message: Raw = Raw()
    type: Raw = Raw()
    code: Raw = Raw()


class Envelope(msgspec.Struct):
    """The `response` of a Responses event, or the `message` of Anthropic's message_start."""

    id: str | None = None
    usage: Raw = Raw()
    error: ErrorFields | None = None
    status: str | None = None


class MessageDelta(msgspec.Struct):
    stop_reason: Scalar = None


class StreamEvent(msgspec.Struct):
    type: str = ""
    delta: MessageDelta | str | None = None
    choices: list[EventChoice] | None = None
    usage: Raw = Raw()
    error: ErrorFields | str | None = None
    response: Envelope | None = None
    message: Envelope | str | None = None
    item: Item | None = None
    code: Raw = Raw()


class Usage(msgspec.Struct):
    """Tokens of one request by the engine's own count. None where the engine reports no valid count."""

    prompt_tokens: int | None
    output_tokens: int | None
    cached_tokens: int = 0


decode_plain = msgspec.json.Decoder().decode
decode_body = msgspec.json.Decoder(Body).decode
decode_items = msgspec.json.Decoder(list[Item]).decode
decode_generated = msgspec.json.Decoder(GeneratedBody).decode
decode_event = msgspec.json.Decoder(StreamEvent).decode
