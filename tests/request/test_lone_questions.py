"""A lone question is read on a short way, to what the long one finds."""

from __future__ import annotations

import json
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec import Raw

from gateway.request.conversation.turn_keys import keys_of_turns
from gateway.request.conversation.turns import Shape, read_turns
from gateway.request.fields import decode_turns

WORDS = st.sampled_from(
    [
        "read the file and say what is in it",
        "\n",
        "\r",
        " ",
        '"',
        "\\",
        "\u00e9",
        "\U0001f600",
        '"tool_use_id": "a"',
        "x" * 40,
    ]
)
TEXTS = st.one_of(st.text(max_size=60), st.lists(WORDS, max_size=40).map("".join))
BLOCKS = st.lists(TEXTS.map(lambda text: {"type": "text", "text": text}), max_size=3)
INSTRUCTIONS = st.builds(
    lambda role, content: {"role": role, "content": content},
    st.sampled_from(["system", "developer"]),
    st.one_of(TEXTS, BLOCKS, st.none()),
)


@settings(max_examples=300)
@given(st.lists(INSTRUCTIONS, max_size=1), TEXTS, st.booleans())
def test_it_is_read_as_any_conversation(before: list[dict[str, Any]], text: str, escaped: bool) -> None:
    asked = [*before, {"role": "user", "content": text}]
    raw = Raw(json.dumps(asked, ensure_ascii=escaped).encode("utf-8", "replace"))
    turns, found = decode_turns(raw), read_turns(raw)
    shape, keys = Shape(), keys_of_turns(turns, turns)
    for turn in turns[:-1]:
        shape.of_other(turn, len(turn.content))
    shape.of_user(is_question=True)
    assert (found.questions, found.stage, found.begins) == ([bytes(turns[-1].content)], shape.stage(), shape.begins)
    assert found.is_lone
    assert found.instruction_bytes == shape.instruction_bytes
    named = [(each.tool_ids, each.last_turn, each.turn, each.lines) for each in (found.keys, keys)]
    assert named[0] == named[1]


def test_what_brings_an_id_back_is_no_lone_question() -> None:
    user = {"role": "user", "content": "what now?"}
    for first, last in (
        ({"tool_call_id": "call_1"}, {}),
        ({"call_id": "call_1"}, {}),
        ({}, {"tool_call_id": "call_1"}),
    ):
        turns = [{"role": "system", "content": "be brief", **first}, {**user, **last}]
        assert read_turns(Raw(json.dumps(turns).encode())).keys.tool_ids == [b"call_1"]
