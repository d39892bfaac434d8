"""The body of a request, of which only the fields that admission needs are read.

The body goes to the engine as the client wrote it, with these edits: fields that steer the engine are taken out (a
client can refine who it is, never raise its claim), and the model has the engine's name. In JSON, streams are made to
report usage, and vLLM gets the salt that says whose cached blocks it may use. Each kind of body has its own edits,
since those of JSON would damage a form.

A body is read in one go, on the event loop. All that is derived is bounded (members, turns, prompts, attachments), so
the time depends on the body's bytes alone, and these on `limits.json_bytes_max`: `python -m bench.bodies` measures it.
"""

from __future__ import annotations

import re
from json import detect_encoding
from typing import Any, Final

import msgspec
from msgspec import UNSET, Raw
from msgspec.structs import astuple

from gateway.http.errors import ApiError, Reason
from gateway.request.apis import COMPLETIONS, NAMES, RESPONSES, Api
from gateway.request.fields import (
    FLAGS,
    MEMBERS_MAX,
    AllFields,
    Fields,
    Flag,
    StreamOptions,
    TooManyItemsError,
    decode_fields,
    decode_members,
    decode_number,
    decode_user,
    encode,
)
from gateway.request.prompt import Prompt

SEQUENCES_MAX: Final = 128
_BRACE: Final = ord("{")
_PROMPT: Final = re.compile(rb'[\[,]\s*+(?:"[^"\\]*+(?:\\.[^"\\]*+)*+"|\[[^\[\]]*+\])\s*+', re.DOTALL)
"""A prompt of a list, with the separator before it."""
USER_LENGTH_MAX: Final = 128
ASK_FOR_USAGE: Final = b'"stream_options":{"include_usage":true},'
NO_FIELDS: Final[Fields] = AllFields()

STEERING_AT: Final = NAMES.index("session_id")
STEERING: Final = frozenset(NAMES[STEERING_AT:])
"""Names of the fields that steer an engine."""
NO_STEERING: Final[tuple[Any, ...]] = astuple(NO_FIELDS)[STEERING_AT:]


class Payload:
    """The request as admission sees it.

    Attributes:
        output_tokens_max: output limit per sequence; None if the request sets none. Some engines take 0 for "only the
            prompt", which counts as 1, and some a negative number for "no limit"; others refuse them.
        sequences: answers generated side by side (`n`, or several prompts).
        prompt: everything that becomes prompt.
        asks_usage: whether the client itself wants usage in its stream.
        body: the bytes for the engine.
        output_param: the field that sets the output limit; None if no engine is bound by a limit.
        prompt_param: the field that holds the prompt; None without one.
        asked: the client's name of the model; `model` is the engines' name.
        fields: the decoded fields of a JSON body.
    """

    __slots__ = (
        "api", "asked", "asks_usage", "body", "demands_tool", "fields", "is_background", "model", "output_param",
        "output_tokens_max", "previous", "prompt", "sequences", "stream", "user",
    )  # fmt: skip

    def __init__(
        self, body: bytes, fields: Fields, api: Api, prompt: Prompt, prompts: int, model: str, stream: bool, user: str
    ) -> None:
        options = fields.stream_options
        self.body = body
        self.fields = fields
        self.api = api
        self.prompt = prompt
        self.model = self.asked = model
        self.stream = stream
        self.user = user
        self.asks_usage = isinstance(options, StreamOptions) and _flag(
            options.include_usage, "stream_options.include_usage"
        )
        self.output_tokens_max: int | None = None
        self.output_param: str | None = None
        for name in api.limits:
            limit = _read_int(fields, name) if getattr(fields, name) else None
            if limit is not None:
                if limit > 0:
                    self.output_tokens_max, self.output_param = limit, name
                elif limit == 0:
                    self.output_tokens_max = 1
                break
        self.sequences = _sequences(fields, api, prompts)
        choice = fields.tool_choice
        self.demands_tool = bool(choice) and bytes(choice) not in (b'"auto"', b'"none"', b"null")
        """Whether the answer must call a tool."""
        is_response = api is RESPONSES
        self.is_background = is_response and bytes(fields.background) not in (b"", b"false", b"null")
        """Whether the engine may work on after its answer."""
        self.previous = (fields.previous_response_id or "") if is_response else ""
        """Id of the stored response that the request continues, empty without one."""

    def drop_unsent(self, *, counts_commas: bool = False) -> None:
        """Drop all that the engine does not get. Of the prompt only its size is kept, its number of token ids and, with
        `counts_commas`, of commas."""
        self.fields = NO_FIELDS
        self.prompt.token_ids()
        if counts_commas:
            self.prompt.commas()
        self.prompt.head = b""

    @property
    def prompt_param(self) -> str | None:
        return next((name for name in reversed(self.api.prompt) if getattr(self.fields, name)), None)

    @property
    def raw_prompt(self) -> Raw:
        """JSON of a prompt outside of any conversation, empty without one."""
        return self.fields.prompt if self.api is COMPLETIONS else NO_FIELDS.prompt

    @property
    def conversation(self) -> Raw:
        """JSON of the conversation; empty if the request has none."""
        found: Raw = getattr(self.fields, self.api.conversation) if self.api.conversation else NO_FIELDS.messages
        return found

    def rename(self, model: str) -> None:
        """Ask the engine for the model of this name."""
        raise NotImplementedError


class JsonPayload(Payload):
    """A JSON object. Additions stand in front, so that the long prompt stays as it is."""

    __slots__ = ()

    def ask_usage(self) -> None:
        """Make the engine report usage at the end of the stream."""
        if self.fields.stream_options is UNSET:
            at = self.body.index(b"{") + 1
            self.body = b"".join((self.body[:at], ASK_FOR_USAGE, memoryview(self.body)[at:]))
            return
        fields = _members(self.body)
        given = bytes(fields["stream_options"])
        options = {} if given == b"null" else _members(given)
        options["include_usage"] = Raw(b"true")
        fields["stream_options"] = Raw(encode(options))
        self.body = encode(fields)

    def rename(self, model: str) -> None:
        self.model = model
        fields = _members(self.body)
        if "model" in fields:
            fields["model"] = Raw(encode(model))
            self.body = encode(fields)
        else:
            at = self.body.index(b"{") + 1
            self.body = b'%b"model":%b%b%b' % (self.body[:at], encode(model), b"," * bool(fields), self.body[at:])

    def salted(self, salt: str) -> tuple[bytes, memoryview]:
        """Return the body with a cache salt, for engines that separate the cached blocks of different salts.

        The body comes in two pieces, so that nothing long is copied for each engine that is tried. The salt needs no
        JSON escapes.
        """
        body = self.body
        at = body.index(b"{") + 1
        field = b'"cache_salt":"%b",' % salt.encode() if body.find(b'"') >= 0 else b""  # not for an empty object
        return body[:at] + field, memoryview(body)[at:]


def read_json(body: bytes, api: Api) -> JsonPayload:
    """Read a JSON body, or raise `ApiError` 400 that names the faulty field."""
    if not body:
        raise ApiError(Reason.INVALID_JSON, "the body is empty; a JSON object is expected")
    if body[0] != _BRACE or body[1:2] == b"\0":
        body = _as_utf8(body)
    fields = fields_of(body)
    values: tuple[Any, ...] = astuple(fields)  # faster than one access per field
    parts = [part for at in api.prompt_at if (part := values[at])]
    return JsonPayload(
        body if values[STEERING_AT:] == NO_STEERING else _without_steering(body),
        fields,
        api,
        Prompt(bytes(parts[0]) if len(parts) == 1 else b"".join(parts)),
        _prompts(fields.prompt) if fields.prompt and "prompt" in api.prompt else 1,
        fields.model or "",
        _flag(fields.stream, "stream"),
        read_user(fields),
    )


def _as_utf8(body: bytes) -> bytes:
    """Return JSON in UTF-8, which may come in UTF-16 or UTF-32, or with a byte order mark."""
    encoding = detect_encoding(body)
    try:
        return body if encoding == "utf-8" else body.decode(encoding).encode()
    except UnicodeError as error:
        raise _not_json(error) from None


def fields_of(body: bytes) -> Fields:
    """Decode the known fields. Raise ApiError that names a faulty one."""
    try:
        return decode_fields(body)
    except msgspec.ValidationError as error:
        what, _, where = str(error).partition(" - at `$")
        param = where.strip("`").lstrip(".") or None
        if param is None:
            raise ApiError(Reason.INVALID_JSON, f"the body must be a JSON object: {what}") from None
        raise _bad(param, f"'{param}': {what}") from None
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise _not_json(error) from None


def read_user(fields: Fields) -> str:
    """Return the end user that the client names in any of the APIs' ways, empty without one."""
    user = fields.safety_identifier or fields.user
    if not user and fields.metadata:
        user = _metadata_user(fields.metadata)
    return user[:USER_LENGTH_MAX] if user else ""


def _members(body: bytes) -> dict[str, Raw]:
    try:
        return decode_members(body)
    except UnicodeDecodeError as error:  # in the name of a field that is not read
        raise _not_json(error) from None
    except TooManyItemsError:
        message = f"an object of the request has more than {MEMBERS_MAX} fields"
        raise ApiError(Reason.INVALID_REQUEST, message) from None


def _not_json(error: Exception) -> ApiError:
    return ApiError(Reason.INVALID_JSON, f"the body is not valid JSON: {error}")


def _bad(param: str, message: str) -> ApiError:
    return ApiError(Reason.INVALID_REQUEST, message, param=param)


def _flag(value: Flag, name: str) -> bool:
    if value is None or value is True or value is False:
        return value is True
    found = FLAGS.get(str(value).lower())
    if found is None:
        raise _bad(name, f"'{name}' must be true or false, got {str(value)[:100]!r}")
    return found


def _read_int(fields: Fields, name: str) -> int | None:
    try:
        number = decode_number(getattr(fields, name))
    except msgspec.DecodeError as error:
        raise _bad(name, f"'{name}': {error}") from None
    return None if number is None else int(number)


def _sequences(fields: Fields, api: Api, prompts: int) -> int:
    """Return the answers that a request asks for side by side. Raise ApiError for too many."""
    sequences = 1
    for name in api.counts:
        value = _read_int(fields, name) if getattr(fields, name) else None
        if value is None:
            continue
        if not 1 <= value <= SEQUENCES_MAX:
            raise _bad(name, f"'{name}' must be between 1 and {SEQUENCES_MAX}, got {value}")
        sequences = max(sequences, value)
    if api.counts and "prompt" in api.prompt:
        sequences *= prompts
    if sequences > SEQUENCES_MAX:
        what = "'prompt' and 'n' ask for more answers in one request than are served together"
        raise _bad("prompt", f"{what}: {SEQUENCES_MAX}")
    return sequences


def _prompts(prompt: Raw) -> int:
    """Return the number of prompts in the field of that name, at most one above `SEQUENCES_MAX`. A list of numbers is
    one prompt of tokens."""
    at = count = 0
    while count <= SEQUENCES_MAX and (found := _PROMPT.match(prompt, at)) is not None:
        at, count = found.end(), count + 1
    return count or 1


def _metadata_user(metadata: Raw) -> str:
    if bytes(metadata).find(b'"user_id"') < 0:
        return ""
    try:
        return decode_user(metadata).user_id or ""
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return ""


def _without_steering(body: bytes) -> bytes:
    """Return the body without the fields that steer the engine (`STEERING`)."""
    kept = _members(body)
    for name in STEERING:
        kept.pop(name, None)
    return encode(kept)
