"""Which parts of an event in a stream are decoded? Those of the chat, Responses and Messages APIs, in one structure.

msgspec fills it in C; it stands apart from the meter that reads it, which is compiled.
"""

from __future__ import annotations

import msgspec

from backends.usage import UsageFields

__all__ = ["Choice", "Delta", "Envelope", "ErrorFields", "Event", "Item", "MessageDelta", "decode_event"]


class Delta(msgspec.Struct):
    role: object = None
    content: object = None
    reasoning: object = None
    reasoning_content: object = None
    tool_calls: object = None
    function_call: object = None
    refusal: object = None
    audio: object = None

    def has_tokens(self) -> bool:
        return bool(
            self.content or self.reasoning or self.reasoning_content
            or self.tool_calls or self.function_call or self.refusal or self.audio
        )  # fmt: skip


class Choice(msgspec.Struct):
    delta: Delta | None = None
    text: object = None
    finish_reason: str | None = None

    def is_role_only(self) -> bool:
        delta = self.delta
        if delta is None or delta.role is None or self.finish_reason is not None:
            return False
        return not delta.has_tokens()

    def is_empty_abort(self) -> bool:
        made_any = self.delta.has_tokens() if self.delta is not None else bool(self.text)
        return self.finish_reason == "abort" and not made_any


class ErrorFields(msgspec.Struct):
    message: object = None
    type: object = None
    code: object = None


class Envelope(msgspec.Struct):
    """`response` of a Responses event, `message` of Anthropic's message_start."""

    id: str | None = None
    usage: UsageFields | None = None
    error: ErrorFields | None = None
    status: str | None = None


class Item(msgspec.Struct):
    type: str = ""


class MessageDelta(msgspec.Struct):
    stop_reason: object = None


class Event(msgspec.Struct):
    type: str = ""
    delta: MessageDelta | str | None = None
    choices: list[Choice] | None = None
    usage: UsageFields | None = None
    error: ErrorFields | str | None = None
    response: Envelope | None = None
    message: Envelope | str | None = None
    item: Item | None = None
    code: object = None


decode_event = msgspec.json.Decoder(Event).decode
