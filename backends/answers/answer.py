"""The facts in an answer: usage, tool calls, completeness, and the keys by which the conversation's next request is
known.

The keys are found in the bytes by patterns; neither an answer nor an event is parsed for them.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from typing import Final, NamedTuple

import msgspec
from msgspec import Raw

from backends.answers.body import (
    Body,
    Choice,
    Message,
    Usage,
    decode_body,
    decode_generated,
    decode_items,
    decode_plain,
)
from backends.answers.members import MemberFinder

KEY_BYTES_MAX: Final = 1024
"""Bytes of an answer's text that are kept."""
IDS_MAX: Final = 64
"""Tool call ids that are kept."""
_TEXT: Final = re.compile(rb'"(?:content|text|delta)"\s{0,4}:\s{0,4}"([^"\\]*+(?:\\.[^"\\]*+)*+)', re.DOTALL)
_ARGUMENTS: Final = re.compile(rb'"(?:arguments|partial_json)"\s{0,4}:\s{0,4}"([^"\\]*+(?:\\.[^"\\]*+)*+)', re.DOTALL)
_CALL_ID: Final = re.compile(rb'"call_id"\s{0,4}:\s{0,4}"([^"\\]{1,256})"')
_ID: Final = re.compile(rb'"id"\s{0,4}:\s{0,4}"([^"\\]{1,256})"')
TOKENS_MAX: Final = 1 << 40
"""Counts beyond this bound are ignored."""
_ASKS_FOR_TOOL: Final = frozenset({"tool_calls", "function_call", "tool_use", "pause_turn"})
_CUT: Final = {"length", "max_tokens", "incomplete"}
"""Reasons of an answer cut at its greatest length. No tool was called, so no result is awaited."""
_IS_FINAL: Final = frozenset({"stop", "content_filter", "end_turn", "stop_sequence", "refusal", "completed", *_CUT})
_TOOLS: Final = ("apply_patch", "computer", "custom_tool", "function", "local_shell", "shell")
TOOL_ITEMS: Final = frozenset(["mcp_approval_request", *[f"{tool}_call" for tool in _TOOLS]])
"""Items of a Responses answer that ask the client for something. Other calls (web search, say) run at the server."""


_SOME: Final = re.compile(rb"\[\s*[^\]\s]")
"""A list that is not empty."""
_UNREADABLE: Final = (msgspec.DecodeError, UnicodeDecodeError, RecursionError)
SHORT_BYTES_MAX: Final = 4096
_NOTHING: Final = frozenset({b"null", b'""', b"[]", b"{}", b"false"})
_NOTHING_BYTES_MAX: Final = 5


class AnswerKeys:
    """The correlation keys of one answer.

    Attributes:
        text: the beginning of its text, escaped as in JSON.
        arguments: the beginning of its tool calls' arguments, concatenated, escaped as in JSON.
        tool_ids: ids of its tool calls, by which their results come back.
    """

    __slots__ = ("arguments", "text", "tool_ids")

    def __init__(self) -> None:
        self.text = b""
        self.arguments = b""
        self.tool_ids: dict[bytes, None] = {}

    def add_texts(self, json: bytes) -> None:
        """Append the texts in this JSON until the key has `KEY_BYTES_MAX` bytes."""
        for found in _TEXT.finditer(json):
            if len(self.text) >= KEY_BYTES_MAX:
                return
            self.text += found[1][:KEY_BYTES_MAX]

    def add_calls(self, json: bytes, at: int = 0) -> None:
        """Keep ids and arguments of the tool calls in this JSON."""
        if len(self.arguments) < KEY_BYTES_MAX:
            self.arguments += b"".join(_ARGUMENTS.findall(json, at))[:KEY_BYTES_MAX]
        if len(self.tool_ids) < IDS_MAX:
            for found in (_CALL_ID.findall(json, at) or _ID.findall(json, at))[:IDS_MAX]:
                self.tool_ids[found] = None


NO_ANSWER_KEYS: Final = AnswerKeys()


class Answer(NamedTuple):
    """The facts in a whole answer.

    Attributes:
        awaits_more: True if the answer asks for a tool, so that another call follows; False if final; None if unknown.
        id: the name by which a later Responses call may continue from this answer.
        is_drained: the answer is a refusal in disguise (aborted, no token), as vLLM gives while it shuts down.
        is_whole: the answer is JSON from its first byte to its last.
    """

    usage: Usage | None
    awaits_more: bool | None = None
    id: str = ""
    keys: AnswerKeys = NO_ANSWER_KEYS
    is_drained: bool = False
    is_whole: bool = True


def short_value(raw: Raw) -> object:
    """Return a short value decoded, or None for a long or invalid value."""
    if not 0 < len(raw) <= SHORT_BYTES_MAX:
        return None
    try:
        return decode_plain(raw)
    except _UNREADABLE:
        return None


def holds_any(raw: Raw) -> bool:
    """Return whether the value is present and not empty."""
    length = len(raw)
    return length > _NOTHING_BYTES_MAX or (length > 0 and bytes(raw) not in _NOTHING)


def asks_for_more(reason: str | None) -> bool | None:
    """Return whether an answer with this stop reason asks the client to call again; None if unknown.

    `reason` is that of a chat choice or an Anthropic message, or the status of a Responses answer.
    """
    if reason in _ASKS_FOR_TOOL:
        return True
    return False if reason in _IS_FINAL else None


def taken_together(asks: Iterable[bool | None]) -> bool | None:
    """Combine the choices of an answer: True if one asks for more, False if all are final, None otherwise."""
    asked = set(asks)
    return True if True in asked else None if None in asked or not asked else False


def usage_of(fields: object, before: Usage | None = None) -> Usage | None:
    """Return a `usage` object as tokens, in the spelling of OpenAI chat, OpenAI Responses or Anthropic Messages.

    Missing counts are taken from `before`. Return None if neither has a count.
    """
    if not isinstance(fields, dict):
        return before
    prompt, output = _count(fields.get("prompt_tokens")), _count(fields.get("completion_tokens"))
    details = fields.get("prompt_tokens_details")
    cached = None
    if prompt is None and output is None:
        prompt, output = _count(fields.get("input_tokens")), _count(fields.get("output_tokens"))
        details = fields.get("input_tokens_details")
        if prompt is None and output is None:
            prompt = _count(fields.get("total_tokens"))  # rerank and score report only the total, and generate nothing
        elif prompt is not None and details is None:
            # Anthropic counts cache reads and writes beside input_tokens, not within them.
            cached = _count(fields.get("cache_read_input_tokens"))
            prompt += (cached or 0) + (_count(fields.get("cache_creation_input_tokens")) or 0)
    if prompt is None and output is None:
        return before
    if isinstance(details, dict):
        cached = _count(details.get("cached_tokens"))
    if before is not None:
        prompt = before.prompt_tokens if prompt is None else prompt
        output = before.output_tokens if output is None else output
        cached = before.cached_tokens if cached is None else cached
    return Usage(prompt, output, cached or 0)


def _count(value: object) -> int | None:
    return value if type(value) is int and 0 <= value <= TOKENS_MAX else None


def read_answer(body: bytes) -> Answer:
    """Read a complete JSON answer once. Invalid JSON yields only the usage that is found in it."""
    try:
        answer = decode_body(body)
    except _UNREADABLE:
        finder = usage_finder()
        finder.feed(body)
        return Answer(usage_found(finder), is_whole=_ends(body))
    usage = usage_of(short_value(answer.usage))
    id_ = answer.id if isinstance(answer.id, str) else ""
    return Answer(usage, _awaits_more(answer), id_, _keys_of(answer), _is_drained(answer, usage))


def _ends(body: bytes) -> bool:
    """Return whether a lenient parser accepts this as JSON. Some engines write NaN, or half of a surrogate pair."""
    try:
        json.loads(body.decode("utf-8", "replace").removeprefix("\ufeff"), strict=False)
    except ValueError:
        return False
    except RecursionError:
        pass
    return True


def _keys_of(answer: Body) -> AnswerKeys:
    keys = AnswerKeys()
    if answer.choices:
        message = answer.choices[0].message
        if isinstance(message, Message):
            content = memoryview(message.content)
            begin = bytes(content[: min(KEY_BYTES_MAX, len(content) - 1)])  # without its closing quote
            if begin.startswith(b'"'):
                keys.text = begin[1:]
            if len(message.tool_calls) > len("[]"):
                keys.add_calls(bytes(message.tool_calls))
        return keys
    output = bytes(answer.output or answer.content)
    if output:
        keys.add_texts(output)
        keys.add_calls(output)
    return keys


def usage_finder() -> MemberFinder:
    """Return a finder for the usage of an answer that is not decoded."""
    return MemberFinder({(1, "usage")})


def usage_found(finder: MemberFinder) -> Usage | None:
    """Return the usage found in an answer that has ended."""
    return usage_of(finder.values().get("usage"))


def made_bytes(body: bytes) -> int:
    """Return the length of the generated part of a complete answer, with its JSON; of the whole body if it is not
    JSON."""
    try:
        generated = decode_generated(body)
    except _UNREADABLE:
        return len(body)
    texts = len(generated.output) + len(generated.content) + len(generated.text)
    return texts + sum([len(choice.message) + len(choice.text) for choice in generated.choices])


def _awaits_more(answer: Body) -> bool | None:
    choices = answer.choices
    if len(choices) == 1:
        return _choice_asks(choices[0])
    if choices:
        return taken_together([_choice_asks(choice) for choice in choices])
    if isinstance(answer.stop_reason, str):
        return asks_for_more(answer.stop_reason)
    if answer.output and isinstance(answer.status, str):
        try:
            items = decode_items(answer.output)
        except _UNREADABLE:
            return None  # the format of an unknown API
        return True if any([item.type in TOOL_ITEMS for item in items]) else asks_for_more(answer.status)
    return None


def _choice_asks(choice: Choice) -> bool | None:
    # A tool that the request itself demanded is called with the reason "stop".
    message = choice.message
    if isinstance(message, Message) and len(message.tool_calls) > len("[]") and _SOME.match(message.tool_calls):
        return True
    return asks_for_more(choice.finish_reason)


def _is_drained(answer: Body, usage: Usage | None) -> bool:
    """Return whether the answer is an abort without a token, as each of the three APIs reports one."""
    if usage is not None and usage.output_tokens:
        return False
    if answer.choices:
        return all([choice.finish_reason == "abort" for choice in answer.choices])
    return bool(answer.status == "cancelled" or answer.stop_reason == "abort")
