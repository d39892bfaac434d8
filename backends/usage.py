"""What did a finished answer cost, and did the engine answer it at all? Read from JSON the engine sent."""

from __future__ import annotations

import re

import msgspec

from backends.base import Usage

__all__ = ["UsageFields", "is_drained", "usage_in_tail", "usage_of_body"]


class _Details(msgspec.Struct):
    cached_tokens: int | None = None


class UsageFields(msgspec.Struct):
    """A `usage` object in any of the three spellings: OpenAI chat, OpenAI Responses, Anthropic Messages."""

    prompt_tokens: int | None = None
    completion_tokens: int | None = None
    prompt_tokens_details: _Details | None = None
    total_tokens: int | None = None
    input_tokens: int | None = None
    output_tokens: int | None = None
    input_tokens_details: _Details | None = None
    cache_read_input_tokens: int | None = None
    cache_creation_input_tokens: int | None = None

    def merged(self, before: Usage | None = None) -> Usage | None:
        """As tokens; what this object does not say is taken from `before`. None when neither says anything."""
        prompt, output = self.prompt_tokens, self.completion_tokens
        details = self.prompt_tokens_details or self.input_tokens_details
        cached = details.cached_tokens if details is not None else None
        if prompt is None:
            prompt, output = self.input_tokens, self.output_tokens
            if prompt is None and output is None:
                prompt = self.total_tokens  # rerank and score say only the total, and generate nothing
            elif prompt is not None and details is None:
                # Anthropic counts what was read from or written to the cache beside input_tokens, not in it.
                cached = self.cache_read_input_tokens
                prompt += (cached or 0) + (self.cache_creation_input_tokens or 0)
        if prompt is None and output is None:
            return before
        return Usage(
            prompt_tokens=_known(prompt, before.prompt_tokens if before else 0),
            output_tokens=_known(output, before.output_tokens if before else 0),
            cached_tokens=_known(cached, before.cached_tokens if before else 0),
        )


def _known(value: int | None, otherwise: int) -> int:
    return otherwise if value is None else max(value, 0)


class _Choice(msgspec.Struct):
    finish_reason: str | None = None


class _Body(msgspec.Struct):
    usage: UsageFields | None = None
    choices: list[_Choice] = []
    status: object = None
    stop_reason: object = None

    def is_given_up(self) -> bool:
        """Does it end by an abort, as each of the three APIs says it?"""
        if self.choices:
            return all([choice.finish_reason == "abort" for choice in self.choices])
        return self.status == "cancelled" or self.stop_reason == "abort"


_body_decoder = msgspec.json.Decoder(_Body)
_usage_decoder = msgspec.json.Decoder(UsageFields)
_USAGE_OBJECT = re.compile(rb'"usage"\s*:\s*(\{(?:[^{}"]|"[^"\\]*"|\{[^{}]*\})*\})')


def usage_of_body(body: bytes) -> Usage | None:
    """Usage of a whole JSON answer; None when it states none or is not such JSON."""
    try:
        usage = _body_decoder.decode(body).usage
    except (msgspec.DecodeError, UnicodeDecodeError):
        return None
    return None if usage is None else usage.merged()


def usage_in_tail(tail: bytes) -> Usage | None:
    """Usage of an answer of which only the last kilobytes were kept: its last `"usage": {...}` object.

    Generated text cannot forge one: inside a JSON string every quote is escaped.
    """
    for found in reversed(list(_USAGE_OBJECT.finditer(tail))):
        try:
            usage = _usage_decoder.decode(found[1]).merged()
        except (msgspec.DecodeError, UnicodeDecodeError):
            continue
        if usage is not None:
            return usage
    return None


def is_drained(body: bytes) -> bool:
    """Is this 200 really a refusal? vLLM answers so while it shuts down: aborted, with no token made."""
    try:
        answer = _body_decoder.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError):
        return False
    usage = answer.usage
    made = usage is not None and (usage.completion_tokens or usage.output_tokens)
    return answer.is_given_up() and not made
