"""A large body of any kind is read at one go, in time and memory that its size bounds, and as a small one is."""

from __future__ import annotations

import gc
import json
import sys
import tracemalloc
from contextlib import suppress
from typing import Any

import pytest

from gateway.config.memory_bounds import READ_TIMES
from gateway.config.sections.apps import InteractionRules
from gateway.http.errors import ApiError
from gateway.request.apis import CHAT, COMPLETIONS, RESPONSES
from gateway.request.body.payload import JsonPayload, read_json
from gateway.request.fields import MEMBERS_MAX, TURNS_MAX, decode_turns
from gateway.request.interaction_claim import ClaimReader
from tests.claims import claim_of
from tests.request.large_bodies import FLOW, KINDS, Kind, read

SIZE = 1 << 20


def _read(kind: Kind, body: bytes) -> None:
    with suppress(ApiError):
        read(kind, body)


@pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS)
def test_reading_takes_memory_as_is_reckoned_with(kind: Kind) -> None:
    body = kind[1](SIZE // 2)
    gc.collect()
    tracemalloc.start()
    try:
        _read(kind, body)
        peak_bytes = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak_bytes <= READ_TIMES * len(body) + 200 * TURNS_MAX


@pytest.mark.interpreted_only("counts calls, which compiled code does not report")
@pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS)
def test_reading_calls_no_more_for_more_of_it(kind: Kind) -> None:
    """By what it calls, of Python and of C: a clock would measure the machine's other work."""
    calls = 0

    def count(frame: Any, event: str, argument: Any) -> None:
        nonlocal calls
        calls += event in ("call", "c_call")

    body = kind[1](SIZE)
    sys.setprofile(count)
    try:
        _read(kind, body)
    finally:
        sys.setprofile(None)
    assert calls < 12 * TURNS_MAX  # 20 ms


def _turns(count: int) -> JsonPayload:
    return read_json(json.dumps({"messages": [{"role": "user", "content": "a"}] * count}).encode(), CHAT)


def test_a_conversation_of_very_many_turns_is_not_followed() -> None:
    assert decode_turns(_turns(TURNS_MAX).conversation) is not None
    assert decode_turns(_turns(TURNS_MAX + 1).conversation) is None
    assert decode_turns(_turns(TURNS_MAX).conversation) is not None


def test_an_object_of_very_many_members_is_not_written_anew() -> None:
    fields = {"model": "m", **{str(number): number for number in range(MEMBERS_MAX - 1)}}
    payload = read_json(json.dumps(fields).encode(), CHAT)
    payload.rename("other")
    assert json.loads(payload.body) == {**fields, "model": "other"}
    payload = read_json(json.dumps({**fields, "more": 1}).encode(), CHAT)
    with pytest.raises(ApiError, match=f"more than {MEMBERS_MAX} fields"):
        payload.rename("other")


@pytest.mark.parametrize(("limit", "counted"), [(5, 5), (0, 1), (-1, None), (None, None)])
def test_a_limit_that_engines_read_otherwise_is_counted_as_they_may_mean_it(
    limit: int | None, counted: int | None
) -> None:
    payload = read_json(json.dumps({"max_tokens": limit}).encode(), COMPLETIONS)
    assert (payload.output_tokens_max, payload.output_param) == (counted, "max_tokens" if limit == 5 else None)


# --- what is read of it ---


def _claims(body: dict[str, Any]) -> Any:
    payload = read_json(json.dumps(body).encode(), RESPONSES if "input" in body else CHAT)
    return claim_of(ClaimReader(InteractionRules(), {}), [], payload, FLOW, generates=True)


@pytest.mark.parametrize("words", [10, 100_000, 1_000_000])
@pytest.mark.parametrize("marked", [False, True])
def test_a_conversation_that_grows_large_stays_the_same_interaction(words: int, marked: bool) -> None:
    text = 'say "hi" \\ ' * (words // 10)
    mark = {"cache_control": {"type": "ephemeral"}} if marked else {}
    first = {"role": "user", "content": [{"type": "text", "text": text, **mark}]}
    plain = {"role": "user", "content": text}
    calls = {"role": "assistant", "content": None}
    result = {"role": "tool", "content": "r" * 500_000}
    block = {"role": "user", "content": [{"type": "tool_result", "content": "r" * 500_000}]}
    asked = _claims({"messages": [first]})
    assert asked.begins is True
    for more in (result, block):
        claim = _claims({"messages": [plain if marked else first, calls, more]})
        assert (claim.id, claim.stage, claim.begins) == (asked.id, 2, False)
    assert _claims({"messages": [{"role": "user", "content": text + "!"}]}).id != asked.id


def test_a_long_text_is_a_question() -> None:
    assert _claims({"input": "x" * 500_000}).begins is True
    assert _claims({"input": "x" * 500_000}).id != _claims({"input": "x" * 500_001}).id


@pytest.mark.parametrize("text", ["", "and " * 1000, "and; " * 1000, ";base64 " * 100])
def test_what_is_attached_is_found_among_prose_and_among_code(text: str) -> None:
    said = {"type": "text", "text": text}
    image = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}
    for content, attachments in (([said], 0), ([image, said], 1), ([said, image, said, image], 2)):
        body = json.dumps({"messages": [{"role": "user", "content": content}]}).encode()
        assert read_json(body, CHAT).prompt.attachments == attachments


@pytest.mark.parametrize(
    ("prompt", "count"),
    [
        ("a", 1), (["a"], 1), (["a", "b"], 2), (['a "b", ["c"]', "\\", "]"], 3), ([1, 2, 3], 1),
        ([[1, 2], [3]], 2), ([], 1), ([""] * 128, 128), (None, 1),
    ],
)  # fmt: skip
def test_prompts_are_counted(prompt: Any, count: int) -> None:
    for separators in ((",", ":"), (" ,\n", ": ")):
        body = json.dumps({"prompt": prompt}, separators=separators).encode()
        assert read_json(body, COMPLETIONS).sequences == count
