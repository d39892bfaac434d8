"""The decoded parts of a request's JSON. All else stays encoded, since prompts are long.

msgspec fills these structures in C. They stand apart from the code that reads them, which is compiled. Numbers and
flags are accepted in the spellings of pydantic's lax mode, by which vLLM reads its requests.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final, cast

import msgspec
from msgspec import UNSET, Raw, UnsetType

MEMBERS_MAX: Final = 1 << 10
TURNS_MAX: Final = 1 << 13
"""Most turns of a conversation that is decoded. A turn takes some microseconds and 100 bytes."""

Flag = bool | float | str | None
FLAGS: Final = {
    **dict.fromkeys(("1", "1.0", "on", "t", "true", "y", "yes"), True),
    **dict.fromkeys(("0", "0.0", "off", "f", "false", "n", "no"), False),
}
"""Spellings of a flag, in lower case."""


class TooManyItemsError(Exception):
    """A body has more members, or a conversation more turns, than are decoded."""


class _ItemCounter:
    """A counter of the items that msgspec may still decode. Only a callback can stop msgspec within a body."""

    left = 0

    def count(self) -> None:
        self.left -= 1
        if self.left < 0:
            raise TooManyItemsError


_decoded: Final = _ItemCounter()


class StreamOptions(msgspec.Struct):
    include_usage: Flag = None


class UserMetadata(msgspec.Struct):
    user_id: str | None = None


class Fields(msgspec.Struct):
    """The fields of all APIs. Fields that only some APIs read stay encoded; `Api` says which API reads a field."""

    model: str | None = None
    stream: Flag = None
    stream_options: StreamOptions | UnsetType | None = UNSET
    user: str | None = None
    safety_identifier: str | None = None
    service_tier: Raw = Raw()
    previous_response_id: str | None = None
    background: Raw = Raw()
    tool_choice: Raw = Raw()
    metadata: Raw = Raw()
    conversation: Raw = Raw()
    prompt_cache_key: Raw = Raw()
    max_tokens: Raw = Raw()
    max_completion_tokens: Raw = Raw()
    max_output_tokens: Raw = Raw()
    n: Raw = Raw()
    best_of: Raw = Raw()
    # The prompt. All of these may be long.
    tools: Raw = Raw()
    system: Raw = Raw()
    instructions: Raw = Raw()
    query: Raw = Raw()
    documents: Raw = Raw()
    text_2: Raw = Raw()
    text_1: Raw = Raw()
    input_ids: Raw = Raw()
    messages: Raw = Raw()
    prompt: Raw = Raw()
    input: Raw = Raw()
    session_id: Raw = Raw()
    """The first of the fields that steer an engine, and the only one that is read here, too."""


_STEERING: Final = (
    # Scheduling and cache.
    "priority", "cache_salt", "extra_key", "session_params", "kv_hint", "kv_hints", "agent_hint", "id_slot",
    # The request's name, since the name of another request would end or join that request.
    "request_id", "rid",
    # The engine's processes that work, and their messages to each other.
    "data_parallel_rank", "routed_dp_rank", "disagg_prefill_dp_rank", "bootstrap_host", "bootstrap_port",
    "bootstrap_room", "disaggregated_params", "kv_transfer_params", "ec_transfer_params",
    # Adapters and code beside the requested model, and effects on all requests.
    "vllm_xargs", "custom_logit_processor", "lora_path", "ngram_corpus_id", "custom_labels",
    # The tokens per event, by which output is counted.
    "stream_interval",
)  # fmt: skip
"""Further fields that steer engines of any kind."""
AllFields: Final = cast(
    type[Fields], msgspec.defstruct("AllFields", [(name, Raw, Raw()) for name in _STEERING], bases=(Fields,))
)


class Turn(msgspec.Struct):
    """A message of a chat, or an item of a Responses input."""

    role: str | None = None
    type: str | None = None
    content: Raw = Raw()
    tool_call_id: Raw = Raw()
    """Id of the tool call whose result this is; `call_id` in a Responses item."""
    call_id: Raw = Raw()


class TurnKeys(msgspec.Struct):
    """The correlation keys of a conversation, read and not decoded.

    Attributes:
        tool_ids: ids of the tool calls whose results come last, or that the model's last turn names in its text.
        last_turn: name of the user's last turn if it follows the model's, else b"".
        turn: name of the user's turn before the model's last turn, and the beginning of the model's; b"" without
            either.
        lines: lines of the turns at the end and at the beginning.
    """

    tool_ids: list[bytes] = []
    last_turn: bytes = b""
    turn: bytes = b""
    lines: list[str] = []


class _CountedTurn(Turn):
    """A turn that counts against `TURNS_MAX`."""

    def __post_init__(self) -> None:
        _decoded.count()


class TextBlock(msgspec.Struct, forbid_unknown_fields=True, tag_field="type", tag="text"):
    """A content block of text and nothing else."""

    text: Raw


class _Member(str):
    """The name of an object's member, which counts against `MEMBERS_MAX`."""

    __slots__ = ()

    def __init__(self, text: str) -> None:
        _decoded.count()


decode_fields = msgspec.json.Decoder(AllFields).decode
decode_user = msgspec.json.Decoder(UserMetadata).decode
decode_one_text = msgspec.json.Decoder(tuple[TextBlock]).decode
decode_number = msgspec.json.Decoder(int | bool | None, strict=False).decode
decode_name = msgspec.json.Decoder(str).decode
encode = msgspec.json.encode
_turns = msgspec.json.Decoder(list[Turn]).decode
_counted_turns: Callable[[Raw], list[Turn]] = cast(Any, msgspec.json.Decoder(list[_CountedTurn]).decode)
_members: Callable[[bytes], dict[str, Raw]] = msgspec.json.Decoder(
    cast(type[dict[str, Raw]], dict[_Member, Raw]), dec_hook=lambda kind, text: kind(text)
).decode


def decode_turns(conversation: Raw) -> list[Turn] | None:
    """Decode the turns of `messages` or `input`. Return None for any other value, which the engine judges, and beyond
    `TURNS_MAX`."""
    try:
        # Each turn has a brace. Counting turns takes two calls for each.
        if len(conversation) <= TURNS_MAX or bytes(conversation).count(b"{") <= TURNS_MAX:
            return _turns(conversation)
        _decoded.left = TURNS_MAX
        return _counted_turns(conversation)
    except (TooManyItemsError, msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return None


def decode_members(body: bytes) -> dict[str, Raw]:
    """Decode an object into its members. Raise `TooManyItemsError` beyond `MEMBERS_MAX`."""
    _decoded.left = MEMBERS_MAX
    return _members(body)
