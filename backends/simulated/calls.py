"""Requests to the simulated vLLM, read and validated as vLLM would.

The bodies of all generating endpoints become one form. The tokenizer is deterministic and needs no vocabulary: every
four bytes of the rendered prompt are a token. Block hashes cover the real text, so equal prefixes meet in the engine's
cache.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Final

import msgspec

from backends.simulated.engine_profiles import EngineProfile

_BYTES_PER_TOKEN = 4
_MEAN_OUTPUT_TOKENS = 128.0
_CHOICES_MAX = 128


@dataclass(frozen=True, slots=True)
class Endpoint:
    """A generating endpoint.

    Attributes:
        prompts: returns the prompts of a body as text, or raises CallRefusedError.
        limits: fields of the output limit, of which the first one given counts. Without any nothing is generated.
        limit: output limit of a body without one; None takes the rest of the context.
    """

    path: str
    prompts: Callable[[dict[str, Any]], list[bytes]]
    limits: tuple[str, ...] = ()
    limit: int | None = None


@dataclass(eq=False)
class CallRefusedError(Exception):
    """A refusal with vLLM's status and message."""

    status: int
    message: str
    type: str = "BadRequestError"
    param: str | None = None


@dataclass(frozen=True, slots=True)
class HashedPrompt:
    """A prompt as the engine sees it. `digest` seeds the random draws for it."""

    tokens: int
    block_hashes: tuple[int, ...]
    digest: int


@dataclass(slots=True)
class SimulatedCall:
    """An accepted request. Each of `prompts` gets `n` choices of at most `max_tokens` tokens."""

    model: str
    prompts: list[HashedPrompt]
    max_tokens: int
    n: int = 1
    stream: bool = False
    ignore_eos: bool = False
    include_usage: bool = False
    output_tokens: list[int] = field(init=False)
    """Per choice: tokens until its end by itself or at `max_tokens`."""

    def __post_init__(self) -> None:
        self.output_tokens = [self._length(index) for index in range(len(self.prompts) * self.n)]

    def _length(self, choice: int) -> int:
        """Return `max_tokens` with ignore_eos, else a length drawn from the prompt, equal at every call."""
        if self.ignore_eos or not self.max_tokens:
            return self.max_tokens
        text = b"0 %d %d" % (self.prompts[choice // self.n].digest, choice)
        fraction = int.from_bytes(hashlib.blake2b(text, digest_size=6).digest()) / 2**48
        return min(1 + int(-_MEAN_OUTPUT_TOKENS * math.log(1.0 - fraction)), self.max_tokens)


def read_prompt(text: bytes, block_size: int, salt: str = "") -> HashedPrompt:
    """Count the tokens of a text and hash its full blocks. Only equal salts share blocks."""
    tokens = max(1, -(-len(text) // _BYTES_PER_TOKEN))
    chain = hashlib.blake2b(salt.encode(), digest_size=8)
    hashes = []
    width = block_size * _BYTES_PER_TOKEN
    for start in range(0, len(text) - width + 1, width):
        chain.update(text[start : start + width])
        hashes.append(int.from_bytes(chain.copy().digest()))
    chain.update(text[len(hashes) * width :])
    return HashedPrompt(tokens, tuple(hashes), int.from_bytes(chain.digest()))


def render_chat(messages: object, tools: object = None) -> bytes:
    """Render messages as the chat template does."""
    if not isinstance(messages, list) or not all(isinstance(message, dict) for message in messages):
        raise _invalid("list_type", "messages", "Input should be a valid list of objects")
    head = msgspec.json.encode(tools) if tools else b""
    turns = (b"<%b>%b\n" % (str(turn.get("role")).encode(), _text_of(turn.get("content"))) for turn in messages)
    return head + b"".join(turns) + b"<assistant>"


def read_call(endpoint: Endpoint, raw: bytes, profile: EngineProfile, model_names: tuple[str, ...]) -> SimulatedCall:
    """Read one body. Raise CallRefusedError with vLLM's status and words."""
    body = read_object(raw)
    model = body.get("model") or model_names[0]
    if model not in model_names:
        message = f"The model `{model}` does not exist. Valid aliases: {', '.join(model_names)}."
        raise CallRefusedError(404, message, "NotFoundError", "model")
    salt = body.get("cache_salt") or ""
    prompts = [read_prompt(text, profile.block_size, str(salt)) for text in endpoint.prompts(body)]
    options = body.get("stream_options")
    options = options if isinstance(options, dict) else {}
    _integer(body, "priority", 0, -(2**63), 2**63 - 1)  # accepted, without effect under first come, first served
    return SimulatedCall(
        model=str(model),
        prompts=prompts,
        max_tokens=_max_tokens(endpoint, body, max(prompt.tokens for prompt in prompts), profile.max_model_len),
        n=_integer(body, "n", 1, 1, _CHOICES_MAX),
        stream=bool(body.get("stream")) and bool(endpoint.limits),
        ignore_eos=bool(body.get("ignore_eos")),
        include_usage=bool(options.get("include_usage")),
    )


def read_object(raw: bytes) -> dict[str, Any]:
    """Decode a body, or refuse one that is no JSON object."""
    try:
        body = msgspec.json.decode(raw)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise _invalid("json_invalid", "1", f"JSON decode error: {error}") from None
    if not isinstance(body, dict):
        raise _invalid("model_attributes_type", "", "Input should be a valid dictionary")
    return body


def _invalid(type_: str, field_name: str, message: str) -> CallRefusedError:
    location = f"body.{field_name}" if field_name else "body"
    text = f"1 validation error:\n  {{'type': '{type_}', 'loc': '{location}', 'msg': '{message}'}}"
    return CallRefusedError(400, text, "Bad Request", location)


def required(body: dict[str, Any], name: str) -> Any:
    """Return a field, or refuse a body without it."""
    if body.get(name) is None:
        raise _invalid("missing", name, "Field required")
    return body[name]


def _integer(body: dict[str, Any], name: str, default: int, least: int, most: int) -> int:
    value = body.get(name)
    if value is None:
        return default
    if not isinstance(value, int) or isinstance(value, bool):
        raise _invalid("int_parsing", name, "Input should be a valid integer")
    if not least <= value <= most:
        bound = f"at least {least}" if value < least else f"at most {most}"
        raise CallRefusedError(400, f"{name} must be {bound}, got {value}.", param=name)
    return value


def _max_tokens(endpoint: Endpoint, body: dict[str, Any], prompt_tokens: int, max_model_len: int) -> int:
    """Return the requested limit, reduced to the rest of the context. Refuse a prompt that fills the context."""
    room = max_model_len - prompt_tokens
    if room < bool(endpoint.limits):
        message = f"This model's maximum context length is {max_model_len} tokens, and the prompt has {prompt_tokens}."
        raise CallRefusedError(400, message, param="input_tokens")
    if not endpoint.limits:
        return 0
    name = next((each for each in endpoint.limits if body.get(each) is not None), endpoint.limits[-1])
    asked = _integer(body, name, endpoint.limit or room, 1, 2**62)
    if asked > max_model_len:
        raise CallRefusedError(400, f"{name}={asked} is greater than max_model_len={max_model_len}.", param=name)
    return min(asked, room)


def _text_of(content: object) -> bytes:
    """Return the text of a message's content. Parts other than text count with their JSON."""
    if content is None:
        return b""
    if isinstance(content, str):
        return content.encode()
    if isinstance(content, list):
        return b"".join(
            part["text"].encode()
            if isinstance(part, dict) and isinstance(part.get("text"), str)
            else msgspec.json.encode(part)
            for part in content
        )
    return msgspec.json.encode(content)


def texts(value: object, name: str) -> list[bytes]:
    """Return prompts as text from a string, a list of token ids, or a list of either. An id stands for its four
    bytes."""
    many = value if isinstance(value, list) and value and isinstance(value[0], str | list) else [value]
    found = []
    for one in many:
        if isinstance(one, str):
            found.append(one.encode())
        elif isinstance(one, list) and one and all(isinstance(item, int) and 0 <= item < 2**32 for item in one):
            found.append(b"".join(item.to_bytes(_BYTES_PER_TOKEN) for item in one))
        else:
            raise _invalid("value_error", name, "Input should be a string, a list of strings or token ids")
    if len(found) > _CHOICES_MAX:
        raise _invalid("too_long", name, f"At most {_CHOICES_MAX} prompts in one request")
    return found


CHAT: Final = Endpoint(
    "/v1/chat/completions",
    lambda body: [render_chat(required(body, "messages"), body.get("tools"))],
    ("max_completion_tokens", "max_tokens"),
)
COMPLETION: Final = Endpoint(
    "/v1/completions", lambda body: texts(required(body, "prompt"), "prompt"), ("max_tokens",), 16
)
