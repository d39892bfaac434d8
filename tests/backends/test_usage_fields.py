"""Usage is read from every kind of answer, and an empty abort is told from an answer."""

from __future__ import annotations

import pytest

from backends.base import Usage
from backends.usage import is_drained, read_answer, usage_in_tail

BODIES = {
    "chat": (
        b'{"choices":[{"message":{"content":"hi"},"finish_reason":"length"}],"usage":{"prompt_tokens":14,'
        b'"total_tokens":17,"completion_tokens":3,"prompt_tokens_details":{"cached_tokens":4}},"x":null}',
        Usage(14, 3, 4),
    ),
    "embeddings": (b'{"data":[],"usage":{"prompt_tokens":6,"total_tokens":6,"completion_tokens":0}}', Usage(6, 0)),
    "rerank": (b'{"results":[],"usage":{"total_tokens":56}}', Usage(56, 0)),
    "responses": (
        b'{"usage":{"input_tokens":14,"input_tokens_details":{"cached_tokens":2},"output_tokens":3}}',
        Usage(14, 3, 2),
    ),
    "messages": (
        b'{"usage":{"input_tokens":4,"output_tokens":3,"cache_creation_input_tokens":2,"cache_read_input_tokens":8}}',
        Usage(14, 3, 8),
    ),
    "no usage": (b'{"choices":[]}', None),
    "null usage": (b'{"usage":null}', None),
    "not JSON": (b"<html>", None),
    "other shape": (b'{"usage":{"prompt_tokens":"many"}}', None),
}


@pytest.mark.parametrize("name", BODIES)
def test_usage_of_a_whole_body(name: str) -> None:
    body, usage = BODIES[name]
    assert read_answer(body).usage == usage


@pytest.mark.parametrize("name", BODIES)
def test_usage_of_the_last_bytes_is_the_same(name: str) -> None:
    body, usage = BODIES[name]
    assert usage_in_tail(b'half a string","n":1},' + body) == usage


def test_generated_text_forges_no_usage() -> None:
    assert usage_in_tail(rb'"content":"\"usage\":{\"prompt_tokens\":0,\"completion_tokens\":0}"}') is None


def test_only_an_abort_without_tokens_is_a_drain() -> None:
    drained = b'{"choices":[{"finish_reason":"abort"},{"finish_reason":"abort"}],"usage":{"completion_tokens":0}}'
    assert is_drained(drained)
    assert not is_drained(drained.replace(b'"abort"', b'"stop"', 1))
    assert not is_drained(drained.replace(b":0", b":5"))
    assert not is_drained(b'{"choices":[]}')
    assert not is_drained(b"not JSON")


@pytest.mark.parametrize(
    ("body", "awaits_more"),
    [
        (b'{"choices":[{"finish_reason":"tool_calls","message":{"tool_calls":[{"id":"c"}]}}]}', True),
        (b'{"choices":[{"finish_reason":"stop","message":{"tool_calls":[{"id":"c"}]}}]}', True),
        (b'{"choices":[{"finish_reason":"stop"},{"finish_reason":"tool_calls"}]}', True),
        (b'{"choices":[{"finish_reason":"stop","message":{"content":"\\"tool_calls\\":[1]","tool_calls":[]}}]}', False),
        (b'{"choices":[{"finish_reason":"length"}]}', None),
        (b'{"choices":[{"finish_reason":"stop"},{"finish_reason":"length"}]}', None),
        (b'{"stop_reason":"tool_use","content":[]}', True),
        (b'{"stop_reason":"end_turn","content":[]}', False),
        (b'{"stop_reason":"max_tokens","content":[]}', None),
        (b'{"status":"completed","output":[{"type":"reasoning"},{"type":"function_call"}]}', True),
        (b'{"status":"completed","output":[{"type":"web_search_call"},{"type":"message"}]}', False),
        (b'{"status":"incomplete","output":[{"type":"message"}]}', None),
        (b'{"output":"of another API"}', None),
        (b"not JSON", None),
    ],
)
def test_an_answer_that_asks_for_a_tool_awaits_another_call(body: bytes, awaits_more: bool | None) -> None:
    assert read_answer(body).awaits_more is awaits_more
