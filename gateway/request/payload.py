"""What does the body of a request ask for? Reads the few fields that admission needs, and leaves the rest unparsed.

The body goes to the engine as the client wrote it, but for two things: fields that steer the engine's own scheduler are
taken out (`design`: a client can refine who it is, never raise its claim), and usage is asked for in streams.
"""

from __future__ import annotations

import re
from typing import Any, Final

import msgspec
from msgspec import UNSET, Raw
from msgspec.structs import astuple

from gateway.http.errors import ApiError, Reason
from gateway.request.fields import Fields, StreamOptions, decode_fields, decode_list, decode_object, decode_user, encode

__all__ = ["Payload", "read_json", "read_multipart"]

SEQUENCES_MAX: Final = 128
_BRACKET: Final = ord("[")
USER_LENGTH_MAX: Final = 128
_ASK_FOR_USAGE: Final = b'"stream_options":{"include_usage":true},'
NO_FIELDS: Final = Fields()

_NAMES: Final = Fields.__struct_fields__
_PROMPT_AT: Final = _NAMES.index("tools")
_STEERING_AT: Final = _NAMES.index("priority")
_PROMPT: Final = _NAMES[_PROMPT_AT:_STEERING_AT]
_STEERING: Final = _NAMES[_STEERING_AT:]
_ATTACHMENT: Final = b";base64,"


class Payload:
    """The request as admission sees it.

    Attributes:
        output_tokens_max: per sequence, or None if the request sets no limit.
        sequences: answers generated side by side (`n`, or several prompts).
        prompt: JSON of everything that becomes prompt.
        is_text: nothing is attached to the prompt as base64.
        asks_usage: the client itself wants usage in its stream.
        body: what goes to the engine; `ask_usage` changes it.
        output_param: the field that said how long the answer may be.
        fields: all that was decoded of a JSON body.
    """

    __slots__ = (
        "asks_usage", "body", "fields", "has_stream_options", "is_text", "model", "output_param", "output_tokens_max",
        "prompt", "sequences", "stream", "user",
    )  # fmt: skip

    def __init__(
        self,
        *,
        model: str,
        stream: bool,
        output_tokens_max: int | None,
        sequences: int,
        prompt: bytes,
        user: str,
        asks_usage: bool,
        has_stream_options: bool,
        body: bytes,
        output_param: str | None = None,
        fields: Fields = NO_FIELDS,
    ) -> None:
        self.model = model
        self.stream = stream
        self.output_tokens_max = output_tokens_max
        self.sequences = sequences
        self.prompt = prompt
        self.is_text = prompt.find(_ATTACHMENT) < 0
        self.user = user
        self.asks_usage = asks_usage
        self.has_stream_options = has_stream_options
        self.body = body
        self.output_param = output_param
        self.fields = fields

    @property
    def prompt_param(self) -> str | None:
        """The field that says what the prompt is; None if there is none."""
        return next((name for name in reversed(_PROMPT) if getattr(self.fields, name)), None)

    @property
    def conversation(self) -> Raw:
        """JSON of the messages, or of what a Responses call calls its input."""
        return self.fields.messages or self.fields.input

    @property
    def instruction_bytes(self) -> int:
        """JSON of instructions that stand beside the conversation."""
        return len(self.fields.system) + len(self.fields.instructions)

    @property
    def demands_tool(self) -> bool:
        """The answer must call a tool."""
        choice = self.fields.tool_choice
        return bool(choice) and bytes(choice) not in (b'"auto"', b'"none"', b"null")

    def ask_usage(self) -> None:
        """Have the engine report usage at the end of the stream."""
        if not self.has_stream_options:
            self._put_first(_ASK_FOR_USAGE)
            return
        fields = _members(self.body)
        options = bytes(fields["stream_options"])
        kept = {} if options == b"null" else _members(options)
        kept["include_usage"] = Raw(b"true")
        fields["stream_options"] = Raw(encode(kept))
        self.body = encode(fields)

    def salt_cache(self, salt: str) -> None:
        """Have the engine keep its cached blocks apart from those of other salts. The salt needs no JSON escapes."""
        self._put_first(b'"cache_salt":"%b",' % salt.encode())

    def _put_first(self, field_and_comma: bytes) -> None:
        # In front rather than decoded and encoded again: prompts are long.
        brace = self.body.index(b"{") + 1
        self.body = b"".join((self.body[:brace], field_and_comma, self.body[brace:]))


def read_json(body: bytes) -> Payload:
    """Read a JSON body, or raise `ApiError` 400 that says which field is wrong."""
    fields = _fields(body)
    options = fields.stream_options
    output_tokens_max, output_param = _output_tokens_max(fields)
    values: tuple[Any, ...] = astuple(fields)  # one call for all of them
    parts = [part for part in values[_PROMPT_AT:_STEERING_AT] if part]
    return Payload(
        model=fields.model,
        stream=bool(fields.stream),
        output_tokens_max=output_tokens_max,
        sequences=_sequences(fields),
        prompt=bytes(parts[0]) if len(parts) == 1 else b"".join(parts),
        user=(fields.safety_identifier or fields.user or _metadata_user(fields.metadata))[:USER_LENGTH_MAX],
        asks_usage=isinstance(options, StreamOptions) and bool(options.include_usage),
        has_stream_options=options is not UNSET,
        body=_without_steering(body) if any(values[_STEERING_AT:]) else body,
        output_param=output_param,
        fields=fields,
    )


def _fields(body: bytes) -> Fields:
    try:
        return decode_fields(body)
    except msgspec.ValidationError as error:
        what, _, where = str(error).partition(" - at `$")
        param = where.strip("`").lstrip(".") or None
        if param is None:
            raise ApiError(Reason.INVALID_JSON, f"the body must be a JSON object: {what}") from None
        raise ApiError(Reason.INVALID_REQUEST, f"'{param}': {what}", param=param) from None
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise _not_json(error) from None


def _members(body: bytes) -> dict[str, Raw]:
    try:
        return decode_object(body)
    except UnicodeDecodeError as error:  # in the name of a field that is not ours
        raise _not_json(error) from None


def _not_json(error: Exception) -> ApiError:
    return ApiError(Reason.INVALID_JSON, f"the body is not valid JSON: {error}")


def _output_tokens_max(fields: Fields) -> tuple[int | None, str | None]:
    if fields.max_output_tokens is not None:
        limit, param = fields.max_output_tokens, "max_output_tokens"
    elif fields.max_completion_tokens is not None:
        limit, param = fields.max_completion_tokens, "max_completion_tokens"
    elif fields.max_tokens is not None:
        limit, param = fields.max_tokens, "max_tokens"
    else:
        return None, None
    if limit < 1:
        raise ApiError(Reason.INVALID_REQUEST, f"'{param}' must be at least 1, got {limit}", param=param)
    return limit, param


def _sequences(fields: Fields) -> int:
    if fields.n is None and fields.best_of is None and not fields.prompt:
        return 1
    sequences = 1
    for name, value in (("n", fields.n), ("best_of", fields.best_of)):
        if value is None:
            continue
        if not 1 <= value <= SEQUENCES_MAX:
            raise ApiError(
                Reason.INVALID_REQUEST, f"'{name}' must be between 1 and {SEQUENCES_MAX}, got {value}", param=name
            )
        sequences = max(sequences, value)
    if fields.prompt and memoryview(fields.prompt)[0] == _BRACKET:
        prompts = decode_list(fields.prompt)
        # A list of numbers is one prompt, already in tokens; anything else is several prompts.
        if prompts and bytes(prompts[0])[:1] in b'"[':
            sequences *= len(prompts)
    if sequences > SEQUENCES_MAX:
        raise ApiError(
            Reason.INVALID_REQUEST,
            f"'prompt' and 'n' ask for {sequences} answers in one request; at most {SEQUENCES_MAX} are served together",
            param="prompt",
        )
    return sequences


def _metadata_user(metadata: Raw) -> str:
    if not metadata or bytes(metadata).find(b'"user_id"') < 0:
        return ""
    try:
        return decode_user(metadata).user_id or ""
    except msgspec.DecodeError:
        return ""


def _without_steering(body: bytes) -> bytes:
    kept = _members(body)
    for name in _STEERING:
        kept.pop(name, None)
    return encode(kept)


_FORM_FIELD: Final = re.compile(
    rb'content-disposition:[^\r\n]*;\s*name="(model|stream|user)"[^\r\n]*\r\n(?:[^\r\n]+\r\n)*\r\n([^\r\n]{0,256})\r\n',
    re.IGNORECASE,
)
AUDIO_PROMPT: Final = b" " * 6000
"""Stands for the prompt of an uploaded clip: about 1,500 tokens, what half a minute of speech takes."""


def read_multipart(body: bytes) -> Payload:
    """Read the few form fields that admission needs from an upload; the body is passed on as it is."""
    found = {name.lower(): value.decode("utf-8", "replace") for name, value in _FORM_FIELD.findall(body)}
    return Payload(
        model=found.get(b"model", ""),
        stream=found.get(b"stream", "").lower() in ("true", "1"),
        output_tokens_max=None,
        sequences=1,
        prompt=AUDIO_PROMPT,
        user=found.get(b"user", "")[:USER_LENGTH_MAX],
        asks_usage=False,
        has_stream_options=False,
        body=body,
    )
