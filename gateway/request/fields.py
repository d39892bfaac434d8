"""Which parts of a request's JSON are decoded? The rest stays as it is: prompts are long.

msgspec fills these structures in C; they stand apart from the code that reads them, which is compiled.
"""

from __future__ import annotations

import msgspec
from msgspec import UNSET, Raw, UnsetType

__all__ = [
    "Claimed",
    "Fields",
    "StreamOptions",
    "Turn",
    "decode_claimed",
    "decode_fields",
    "decode_list",
    "decode_object",
    "decode_turns",
    "decode_user",
    "encode",
]


class StreamOptions(msgspec.Struct):
    include_usage: bool | None = None


class UserMetadata(msgspec.Struct):
    user_id: str | None = None


class Fields(msgspec.Struct):
    model: str = ""
    stream: bool | None = None
    stream_options: StreamOptions | UnsetType | None = UNSET
    max_tokens: int | None = None
    max_completion_tokens: int | None = None
    max_output_tokens: int | None = None
    n: int | None = None
    best_of: int | None = None
    user: str | None = None
    safety_identifier: str | None = None
    previous_response_id: str | None = None
    tool_choice: Raw = Raw()
    metadata: Raw = Raw()
    # What makes up the prompt, in any of the APIs, as chat templates put it: what requests of one app have in common
    # comes first.
    tools: Raw = Raw()
    system: Raw = Raw()
    instructions: Raw = Raw()
    query: Raw = Raw()
    documents: Raw = Raw()
    text_2: Raw = Raw()
    text_1: Raw = Raw()
    messages: Raw = Raw()
    prompt: Raw = Raw()
    input: Raw = Raw()
    # From here to the end: what steers an engine.
    priority: Raw = Raw()
    cache_salt: Raw = Raw()
    kv_transfer_params: Raw = Raw()
    ec_transfer_params: Raw = Raw()
    vllm_xargs: Raw = Raw()
    request_id: Raw = Raw()
    extra_key: Raw = Raw()
    bootstrap_host: Raw = Raw()
    bootstrap_port: Raw = Raw()
    bootstrap_room: Raw = Raw()
    data_parallel_rank: Raw = Raw()


class Turn(msgspec.Struct):
    """One message of a chat, or one item of a Responses call's input."""

    role: str | None = None
    type: str | None = None
    content: Raw = Raw()


class Claimed(msgspec.Struct):
    """What `metadata` says of the interaction."""

    fairgate_interaction: str | None = None
    fairgate_stage: str | int | None = None
    fairgate_end: str | bool | None = None


decode_fields = msgspec.json.Decoder(Fields).decode
decode_user = msgspec.json.Decoder(UserMetadata).decode
decode_claimed = msgspec.json.Decoder(Claimed).decode
decode_turns = msgspec.json.Decoder(list[Turn]).decode
decode_object = msgspec.json.Decoder(dict[str, Raw]).decode
decode_list = msgspec.json.Decoder(list[Raw]).decode
encode = msgspec.json.encode
