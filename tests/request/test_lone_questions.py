"""A lone question is read on a short way, to what the long one finds."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec import Raw

from gateway.config.sections.apps import InteractionRules
from gateway.request.apis import CHAT
from gateway.request.body.payload import NO_FIELDS, read_json
from gateway.request.conversation.turn_keys import LINES_MAX
from gateway.request.conversation.turns import read_turns
from gateway.request.fields import decode_turns
from gateway.request.interaction_claim import ClaimReader, claim_of_question, claim_of_turns
from policies.request import NO_CLAIM, NO_KEYS, Flow

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
    turns = decode_turns(raw)
    found, whole = claim_of_question(turns), claim_of_turns(read_turns(turns, raw), b"", b"")
    assert found is not None
    assert found == (whole if whole.keys.text else replace(whole, keys=NO_KEYS))


def test_what_brings_an_id_back_or_continues_an_answer_is_no_lone_question() -> None:
    user = {"role": "user", "content": "what now?"}
    for first, last in (
        ({"tool_call_id": "call_1"}, {}),
        ({"call_id": "call_1"}, {}),
        ({}, {"tool_call_id": "call_1"}),
    ):
        asked = [{"role": "system", "content": "be brief", **first}, {**user, **last}]
        raw = Raw(json.dumps(asked).encode())
        turns = decode_turns(raw)
        assert claim_of_question(turns) is None
        assert claim_of_question(turns[1:]) is None or not last
        assert read_turns(turns, raw).keys.tool_ids == [b"call_1"]
    for turns in ([{**user, "role": "assistant"}, user], [user, user], [user, user, user]):
        assert claim_of_question(decode_turns(Raw(json.dumps(turns).encode()))) is None


def test_no_more_lines_are_read_than_of_any_conversation() -> None:
    texts = ["\n".join(f"{role} {number:040d}" for number in range(LINES_MAX - 6)) for role in ("system", "user")]
    asked = [{"role": text.split()[0], "content": text} for text in texts]
    raw = Raw(json.dumps(asked).encode())
    found = claim_of_question(decode_turns(raw))
    assert found == claim_of_turns(read_turns(decode_turns(raw), raw), b"", b"")
    assert found is not None
    assert len(found.keys.text) == 2 * LINES_MAX


def test_all_instructions_of_a_conversation_are_counted() -> None:
    turns = [{"role": role, "content": "12345678"} for role in ("system", "user", "assistant", "developer", "user")]
    payload = read_json(json.dumps({"messages": turns}).encode(), CHAT)
    reader = ClaimReader(InteractionRules(), {})
    _, instruction_bytes = reader.read({}, payload, payload.conversation, Flow("t"))
    assert instruction_bytes == 2 * len('"12345678"')
    assert reader.read({}, payload, NO_FIELDS.messages, Flow("t")) == (NO_CLAIM, 0)
