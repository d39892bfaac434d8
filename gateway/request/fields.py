"""Which parts of a request's JSON are decoded? The rest stays as it is: prompts are long.

msgspec fills these structures in C; they stand apart from the code that reads them, which is compiled. Numbers and
flags are taken in the spellings of pydantic's lax mode, since vLLM reads its requests by that.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final, cast

import msgspec
from msgspec import UNSET, Raw, UnsetType

MEMBERS_MAX: Final = 1 << 10
TURNS_MAX: Final = 1 << 13
"""A conversation of more turns is not followed: decoding one takes some microseconds, and 100 bytes."""

Flag = bool | float | str | None
FLAGS: Final = {
    **dict.fromkeys(("1", "1.0", "on", "t", "true", "y", "yes"), True),
    **dict.fromkeys(("0", "0.0", "off", "f", "false", "n", "no"), False),
}
"""Spellings of a flag, in lower case."""


class TooManyError(Exception):
    """A body holds more members or turns than are decoded at one go."""


class _Decoded:
    """Items that msgspec may still make of the body in hand: only what it calls can stop it amid a body."""

    left = 0

    def count(self) -> None:
        self.left -= 1
        if self.left < 0:
            raise TooManyError


_decoded: Final = _Decoded()


class StreamOptions(msgspec.Struct):
    include_usage: Flag = None


class UserMetadata(msgspec.Struct):
    user_id: str | None = None


class Fields(msgspec.Struct):
    """The fields of all APIs together. What only some of them have stays as it is: `Api` says who reads it."""

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
    # What makes up the prompt. A conversation may be long, and so may all of these.
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
    # From here to the end: what steers an engine, whichever it is. First how it schedules and whose cache is used;
    priority: Raw = Raw()
    cache_salt: Raw = Raw()
    extra_key: Raw = Raw()
    session_id: Raw = Raw()
    session_params: Raw = Raw()
    kv_hint: Raw = Raw()
    kv_hints: Raw = Raw()
    agent_hint: Raw = Raw()
    id_slot: Raw = Raw()
    # under which name it runs, where a name that another request has would end or join that one;
    request_id: Raw = Raw()
    rid: Raw = Raw()
    # which of its processes do the work, and what they tell each other;
    data_parallel_rank: Raw = Raw()
    routed_dp_rank: Raw = Raw()
    disagg_prefill_dp_rank: Raw = Raw()
    bootstrap_host: Raw = Raw()
    bootstrap_port: Raw = Raw()
    bootstrap_room: Raw = Raw()
    disaggregated_params: Raw = Raw()
    kv_transfer_params: Raw = Raw()
    ec_transfer_params: Raw = Raw()
    # what it loads or runs beside the model that was asked for, and what it does for all;
    vllm_xargs: Raw = Raw()
    custom_logit_processor: Raw = Raw()
    lora_path: Raw = Raw()
    ngram_corpus_id: Raw = Raw()
    custom_labels: Raw = Raw()
    # how many tokens it sends at once, by which they are counted.
    stream_interval: Raw = Raw()


class Turn(msgspec.Struct):
    """One message of a chat, or one item of a Responses call's input."""

    role: str | None = None
    type: str | None = None
    content: Raw = Raw()
    tool_call_id: Raw = Raw()
    """Of the call whose result it is; `call_id` in a Responses item."""
    call_id: Raw = Raw()

    def __post_init__(self) -> None:
        _decoded.count()


class TextBlock(msgspec.Struct, forbid_unknown_fields=True, tag_field="type", tag="text"):
    """A block that is nothing but text."""

    text: Raw


class _Member(str):
    """The name of a member of an object. Each one is counted."""

    __slots__ = ()

    def __init__(self, text: str) -> None:
        _decoded.count()


class Claimed(msgspec.Struct):
    """What `metadata` says of the interaction."""

    fairgate_interaction: str | None = None
    fairgate_stage: str | int | None = None
    fairgate_end: str | bool | None = None


decode_fields = msgspec.json.Decoder(Fields).decode
decode_user = msgspec.json.Decoder(UserMetadata).decode
decode_claimed = msgspec.json.Decoder(Claimed).decode
decode_one_text = msgspec.json.Decoder(tuple[TextBlock]).decode
decode_number = msgspec.json.Decoder(int | bool | None, strict=False).decode
decode_name = msgspec.json.Decoder(str).decode
encode = msgspec.json.encode
_turns = msgspec.json.Decoder(list[Turn]).decode
_members: Callable[[bytes], dict[str, Raw]] = msgspec.json.Decoder(
    cast(type[dict[str, Raw]], dict[_Member, Raw]), dec_hook=lambda kind, text: kind(text)
).decode


def decode_turns(conversation: Raw) -> list[Turn]:
    """Decode a conversation. Raises `TooManyError` beyond `TURNS_MAX`."""
    _decoded.left = TURNS_MAX
    return _turns(conversation)


def decode_members(body: bytes) -> dict[str, Raw]:
    """Decode an object into its members. Raises `TooManyError` beyond `MEMBERS_MAX`."""
    _decoded.left = MEMBERS_MAX
    return _members(body)
