"""A meter of event streams: tokens, usage, errors and the end, read beside the relayed bytes.

Engines write the events of a stream alike. So after a few token events the bytes around a text are known, and on the
fast path an event that differs in its text alone is only compared. On the slow path events are split at blank lines and
decoded. Both hold at most one event: a larger one passes in pieces, while a finder looks for its usage.
"""

from __future__ import annotations

import re
from enum import Enum
from typing import Final

import msgspec

from backends.answers.answer import (
    KEY_BYTES_MAX,
    TOOL_ITEMS,
    AnswerKeys,
    asks_for_more,
    holds_any,
    short_value,
    taken_together,
    usage_of,
)
from backends.answers.body import (
    Delta,
    Envelope,
    ErrorFields,
    EventChoice,
    MessageDelta,
    StreamEvent,
    Usage,
    decode_event,
)
from backends.answers.members import MemberFinder

# A blank line is two line ends, each CRLF, LF or CR. A final CR may be half a CRLF, so it ends nothing yet.
_BLANK_LINE: Final = re.compile(rb"(?>\r\n|\n|\r(?!\Z)){2}")
_BEGINS: Final = re.compile(rb"(?:\xef\xbb\xbf)?[\r\n]*(?:data|event|id|retry)?:")
_LINE_END: Final = re.compile(rb"\r\n|\n|\r")
_TEXT: Final = re.compile(rb'"(?:content|text|reasoning|reasoning_content)":"([^"\\\n]*)"')
# Numbers, because `in` first tries its operand as a number: for bytes that raises an exception in each chunk.
_QUOTE: Final = ord('"')
_LF: Final = ord("\n")
_CR: Final = ord("\r")
_TEXTS_LOOKED_FOR: Final = 4
_HEAD_BYTES: Final = 256
_INTERNAL_STATUS_MIN: Final = 500
_TRACE: Final = re.compile(rb'Traceback \(most recent call last\)|File \\?"[^"\\]+\\?", line [0-9]')
"""A position in the engine's own source code."""


class Dialect(Enum):
    """The API that the stream speaks."""

    OPENAI = "openai"
    RESPONSES = "responses"
    MESSAGES = "messages"


# Per dialect: the beginning of a token event with LF line ends, and its number of lines.
_TOKEN_EVENT: Final[dict[Dialect, tuple[bytes, int]]] = {
    Dialect.OPENAI: (b"data: {", 2),
    Dialect.RESPONSES: (b"event: response.output_text.delta\ndata: {", 3),
    Dialect.MESSAGES: (b"event: content_block_delta\ndata: {", 3),
}
# Per dialect: the mark of an event that has a tool call's id.
_TOOL_MARK: Final = {Dialect.OPENAI: b'"tool_calls"', Dialect.RESPONSES: b'"call_id"', Dialect.MESSAGES: b'"tool_use"'}
_RESPONSE_TEXT: Final = b"response.output_text.delta"
_UNREADABLE: Final = (msgspec.DecodeError, UnicodeDecodeError, RecursionError)
_RESPONSE_ENDS: Final = frozenset({"response.completed", "response.incomplete", "response.failed"})
_ERROR_STATUS: Final = {
    **dict.fromkeys(("Service Unavailable", "ServiceUnavailableError", "overloaded_error"), 503),
    **dict.fromkeys(("rate_limit_error", "rate_limit_exceeded"), 429),
}


class StreamMeter:
    """Meter of one stream: `feed` takes each chunk in order, and returns the bytes for the client.

    Whole events are forwarded byte for byte. With `strip_usage` the event that `include_usage` adds is left out. An
    internal error of the engine is replaced by `own_error`, if there is one. An event longer than `tail_bytes_max` is
    forwarded in pieces.
    """

    __slots__ = (
        "_after_text", "_before_text", "_dialect", "_finder", "_finished", "_head", "_instead", "_is_cut",
        "_is_foreign", "_is_openai", "_is_plain", "_lines", "_own_error", "_stops", "_strip", "_tail",
        "_texts_looked_for", "_token_head", "_token_next", "_tool_mark", "aborted", "answer_id", "choices", "ended",
        "error", "keys", "started", "tail_bytes_max", "token_events", "usage",
    )  # fmt: skip

    def __init__(self, dialect: Dialect, *, strip_usage: bool, own_error: bytes = b"", choices: int = 1) -> None:
        self.token_events = 0
        """Events with generated tokens. The role chunk and comments do not count."""
        self.started = False
        """True once the engine has begun to answer, by a token or by the role chunk that comes with it."""
        self.usage: Usage | None = None
        self.error: int | None = None
        """HTTP status of an error that the engine reported inside a 200 stream; 0 for an error without a status."""
        self.ended = False
        """Did the stream report its end?"""
        self.aborted = False
        """Did the engine abort before the first token, as vLLM does while it shuts down? The request may be retried."""
        self.answer_id = ""
        """Name of a Responses answer, by which a later call may continue from it."""
        self.keys = AnswerKeys()
        self._tool_mark = _TOOL_MARK[dialect]
        self._stops: set[bool | None] = set()
        self.choices = choices
        self._finished: set[bytes] = set()
        self._is_cut = False
        """Did the stream end within an event?"""
        self._dialect = dialect
        self._is_openai = dialect is Dialect.OPENAI
        self._is_foreign: bool | None = None
        """True if all events so far have an unknown format; None before the first event."""
        self._own_error = own_error
        self._instead = b""
        """Replacement for the event that was left out."""
        self._strip = strip_usage
        self._tail = b""
        self.tail_bytes_max = 262144
        self._finder: MemberFinder | None = None
        """Reader of an event that is too long to hold; None outside such an event."""
        self._head = b""
        self._is_plain = True
        self._token_head, self._lines = _TOKEN_EVENT[dialect]
        self._token_next = b"\n\n" + self._token_head
        self._before_text = self._after_text = b""
        """Bytes around the text of a token event, up to and including the quotes that enclose the text."""
        self._texts_looked_for = _TEXTS_LOOKED_FOR

    @property
    def awaits_more(self) -> bool | None:
        """Return whether the answer asks for a tool (False: it is final); None if unknown."""
        return taken_together(self._stops)

    @property
    def is_over(self) -> bool:
        """Return whether the stream may end here: after its end event, after an event once all choices have finished,
        or anywhere in a format without a known end."""
        return self.ended or bool(self._is_foreign) or (len(self._finished) >= self.choices and not self._is_cut)

    @property
    def is_amid_event(self) -> bool:
        """Return whether a part of an event has been forwarded, but not yet its rest."""
        return self._finder is not None

    def feed(self, data: bytes) -> bytes:
        """Take the next bytes from the engine. Return the bytes to forward now: whole events only."""
        if self.started and self._is_plain and not self._tail and self._finder is None:
            # Fast path. A bare quote ends a text, so text without one is safe. Compiled, a slice costs a quarter of a
            # call of startswith.
            before, after = self._before_text, self._after_text
            begin, end = len(before), len(data) - len(after)
            if before and end >= begin and data[:begin] == before and data[end:] == after:
                text = data[begin:end]
                if _QUOTE not in text and _LF not in text:
                    if len(self.keys.text) < KEY_BYTES_MAX:
                        self.keys.text += text
                    self.token_events += 1
                    return data
            events = self._tokens_only(data)
            if events:
                self.token_events += events
                return data
        return self._feed_slowly(data)

    def flush(self) -> bytes:
        """Take the engine's close. Return the unfinished rest, to be forwarded unchanged if the stream `is_over`."""
        tail, self._tail = self._tail, b""
        if self._finder is not None:
            self._is_cut = True
            self.usage = usage_of(self._finder.values().get("usage"), self.usage)
            return tail
        is_whole = tail.endswith(b"\r") and _BLANK_LINE.search(tail + b"\n")  # held back for an LF that never came
        self._is_cut = bool(tail) and not is_whole
        is_kept = self._read_event(tail, is_cut=not is_whole)
        return b"" if is_whole and not is_kept else tail

    def _tokens_only(self, data: bytes) -> int:
        """Return the number of events if the data is whole token events and nothing else; otherwise 0.

        JSON text holds no raw line end and no bare quote, so a match here is structure, never generated text.
        """
        if not (data.startswith(self._token_head) and data.endswith(b"\n\n")):
            return 0
        events, rest = divmod(data.count(b"\n"), self._lines)
        if rest or (events > 1 and data.count(self._token_next) != events - 1):
            return 0
        if self._is_openai:
            # Every event has a choice that continues: so no error, no abort, and no JSON with spaces.
            if data.count(b'"finish_reason":null') != events:
                return 0
            if data.find(b'"usage":{') >= 0 or data.find(b'"role":"assistant"') >= 0:
                return 0
            if events == 1 and self._texts_looked_for:
                self._remember(data)
        self._note_keys(data)
        return events

    def _note_keys(self, events: bytes) -> None:
        """Keep the beginning of the text, and the ids and arguments of tool calls."""
        if len(self.keys.text) < KEY_BYTES_MAX and (self._dialect is not Dialect.RESPONSES or _RESPONSE_TEXT in events):
            self.keys.add_texts(events)
        at = events.find(self._tool_mark)
        if at >= 0 or (not self._is_openai and events.find(b'"partial_json"') >= 0):
            self.keys.add_calls(events, max(0, at))

    def _remember(self, data: bytes) -> None:
        """Keep the bytes around the text, since engines write every event of a stream alike. Stop trying soon where
        they do not."""
        self._texts_looked_for -= 1
        found = _TEXT.search(data)
        if found is not None:
            self._before_text, self._after_text = data[: found.start(1)], data[found.end(1) :]

    def _feed_slowly(self, data: bytes) -> bytes:
        """Return the bytes to forward, after reading the complete events in `data` and in the tail before it."""
        if self._is_plain and _CR in data:
            self._is_plain = False
        known = len(self._tail)
        buffer = self._tail + data if known else data
        kept: list[bytes] = []
        start = keep_from = 0
        end, after = self._blank_line(buffer, max(known - 3, 0))
        while end >= 0:
            if self._finder is not None:
                self._end_oversized(self._finder, buffer[start:end])
            elif end > start and not self._read_event(buffer[start:end]):
                kept += (buffer[keep_from:start], self._instead)
                self._instead = b""
                keep_from = after
            start = after
            end, after = self._blank_line(buffer, after)
        self._tail = buffer[start:]
        if self._finder is not None or len(self._tail) > self.tail_bytes_max:
            start = self._pass_oversized(buffer)
        if not kept:
            return buffer if start == len(buffer) else buffer[:start]
        kept.append(buffer[keep_from:start])
        return b"".join(kept)

    def _blank_line(self, buffer: bytes, at: int) -> tuple[int, int]:
        """Return the end of an event and the begin of the next from `at` on, or (-1, -1)."""
        if self._is_plain:
            end = buffer.find(b"\n\n", at)
            return (end, end + 2) if end >= 0 else (-1, -1)
        found = _BLANK_LINE.search(buffer, at)
        return found.span() if found else (-1, -1)

    def _pass_oversized(self, buffer: bytes) -> int:
        """Forward an event too long to hold. Keep its first bytes, and line ends that may finish it.

        Return how much of `buffer` may be forwarded.
        """
        piece = self._tail
        if self._finder is None:
            self._finder, self._head = self._member_finder(), piece[:_HEAD_BYTES]
        held = len(piece) - len(piece.rstrip(b"\r\n"))
        self._tail = piece[len(piece) - held :]
        self._finder.feed(piece[: len(piece) - held])
        return len(buffer) - held

    def _end_oversized(self, finder: MemberFinder, piece: bytes) -> None:
        """Read the fields that were found in an event too long to hold, now that it has ended."""
        finder.feed(piece)
        self._finder = None
        self._read_partly(_fields(self._head)[0], finder)

    def _member_finder(self) -> MemberFinder:
        """Return a finder for the facts needed from an event that is not decoded."""
        return MemberFinder({(1, "type"), (2 if self._dialect is Dialect.RESPONSES else 1, "usage")})

    def _read_partly(self, name: str, finder: MemberFinder) -> None:
        """Record an event that was not decoded: charged rather than free."""
        values = finder.values()
        self.usage = usage_of(values.get("usage"), self.usage)
        kind = values.get("type")
        name = name or (kind if isinstance(kind, str) else "")
        if self._is_end(name):
            self.ended = True
        elif self._is_openai or name.endswith("delta") or not name:
            self._note_token()

    def _is_end(self, name: str) -> bool:
        """Return whether an event of this name ends the stream."""
        return name in _RESPONSE_ENDS if self._dialect is Dialect.RESPONSES else name == "message_stop"

    def _read_event(self, raw: bytes, *, is_cut: bool = False) -> bool:
        """Record one event. Return False if it is to be left out or replaced by `_instead`."""
        name, payload = _fields(raw)
        if not payload:
            return True
        self._note_keys(payload if self._dialect is not Dialect.RESPONSES else raw)
        if payload == b"[DONE]":
            self.ended = True
            self.aborted = self.aborted or not (self.started or self.usage or self.error is not None)
            return True
        try:
            event = decode_event(payload)
        except _UNREADABLE:
            if is_cut:
                return True  # a part of an event
            self._note_foreign()
            finder = self._member_finder()
            finder.feed(payload)
            self._read_partly(name, finder)
            return True
        if self._note_error(event) and self._is_internal(raw):
            self._instead = self._own_error
            self.ended = self.ended or self._is_end(name or event.type)
            return False
        if self._is_openai:
            return self._read_chunk(event)
        self._read_named(name or event.type, event)
        return True

    def _is_internal(self, raw: bytes) -> bool:
        """Return whether the error is internal to the engine. The client then learns only that an error happened."""
        if self.error is None or not self._own_error:
            return False
        return self.error >= _INTERNAL_STATUS_MIN or _TRACE.search(raw) is not None

    def _read_chunk(self, event: StreamEvent) -> bool:
        """Read an event of a chat or completion stream. Return whether to forward it."""
        if event.usage:
            self.usage = usage_of(short_value(event.usage), self.usage)
        choices = event.choices
        has_usage = holds_any(event.usage)
        if choices is None and not has_usage and event.error is None:
            self._note_foreign()
            self._note_token()  # an unknown format: charged rather than free
            return True
        self._is_foreign = False
        if not choices:
            return not (self._strip and choices is not None and has_usage)
        for choice in choices:
            if choice.finish_reason is not None:
                self._stops.add(asks_for_more(choice.finish_reason))
            if choice.finish_reason:
                self._finished.add(bytes(choice.index))
        if all(_is_empty_abort(choice) for choice in choices):
            self.aborted = self.aborted or self.token_events == 0
        elif all(_is_role_only(choice) for choice in choices):
            self.started = True
        else:
            self._note_token()
        return True

    def _read_named(self, name: str, event: StreamEvent) -> None:
        """Read an event of a Responses or Messages stream."""
        for part in (event, event.response):
            if part is not None and part.usage:
                self.usage = usage_of(short_value(part.usage), self.usage)
        if isinstance(event.message, Envelope):
            begun = usage_of(short_value(event.message.usage))
            if begun is not None:  # sent before the first token, so its output count is not final
                self.usage = Usage(begun.prompt_tokens, None, begun.cached_tokens)
        if name == "content_block_delta" or (name.startswith("response.") and name.endswith(".delta")):
            self._note_token()
        elif self._is_end(name):
            self.ended = True
        elif event.item is not None and event.item.type in TOOL_ITEMS:
            self._stops.add(True)
        if event.response is not None and event.response.id:
            self.answer_id = event.response.id
        if name in _RESPONSE_ENDS and event.response is not None:
            self._stops.add(asks_for_more(event.response.status))
        if isinstance(event.delta, MessageDelta) and isinstance(event.delta.stop_reason, str):
            self._stops.add(asks_for_more(event.delta.stop_reason))
            self._finished.add(b"")
        cancelled = event.response is not None and event.response.status == "cancelled"
        stopped = isinstance(event.delta, MessageDelta) and event.delta.stop_reason == "abort"
        self.aborted = self.aborted or ((cancelled or stopped) and not self.token_events)

    def _note_foreign(self) -> None:
        """Record an event of an unknown format."""
        if self._is_foreign is None and self._is_openai:
            self._is_foreign = True
            self._is_plain = False  # so that an event of a known format is not skipped

    def _note_token(self) -> None:
        self.started = True
        self.token_events += 1

    def _note_error(self, event: StreamEvent) -> bool:
        """Record an error in the event. Return whether the event has one."""
        error = event.error
        if error is None and event.response is None and event.type != "error":
            return False
        if error is None and event.response is not None:
            error = event.response.error
        if isinstance(error, ErrorFields):
            kind, code = str(short_value(error.type)), str(short_value(error.code))
        elif error is None and event.type != "error":
            return False
        else:  # an error that is a text alone; or, of the Responses API, the event itself
            kind, code = "", str(short_value(event.code))
        is_status = re.fullmatch("[1-5][0-9]{2}", code) is not None
        self.error = int(code) if is_status else _ERROR_STATUS.get(kind) or _ERROR_STATUS.get(code, 0)
        return True


def is_event_stream(data: bytes) -> bool:
    """Return whether an answer begins like an event stream, whatever its content type."""
    return _BEGINS.match(data) is not None


def _fields(raw: bytes) -> tuple[str, bytes]:
    """Return an event's name and data. Comments and other fields are skipped."""
    if raw.startswith(b"data: ") and _LF not in raw and _CR not in raw:
        return "", raw[6:]
    name = ""
    data: list[bytes] = []
    for line in _LINE_END.split(raw):
        field, _, value = line.partition(b":")
        if field == b"data":
            data.append(value.removeprefix(b" "))
        elif field == b"event":
            name = value.removeprefix(b" ").decode("utf-8", "replace")
    return name, b"\n".join(data)


def _has_tokens(delta: Delta) -> bool:
    """Return whether the delta has text, reasoning, a tool call, a refusal or audio."""
    return (
        holds_any(delta.content) or holds_any(delta.reasoning) or holds_any(delta.reasoning_content)
        or holds_any(delta.tool_calls) or holds_any(delta.function_call) or holds_any(delta.refusal)
        or holds_any(delta.audio)
    )  # fmt: skip


def _is_role_only(choice: EventChoice) -> bool:
    """Return whether a choice only opens the answer: it names the role, and brings no token."""
    delta = choice.delta
    if delta is None or delta.role is None or choice.finish_reason is not None:
        return False
    return not _has_tokens(delta)


def _is_empty_abort(choice: EventChoice) -> bool:
    """Return whether the engine aborted the choice in an event without tokens."""
    made_any = _has_tokens(choice.delta) if choice.delta is not None else holds_any(choice.text)
    return choice.finish_reason == "abort" and not made_any
