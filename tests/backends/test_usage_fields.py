"""Usage is read from every kind of answer, and an empty abort is told from an answer."""

from __future__ import annotations

import pytest

from backends.answers.answer_usage import Usage, made_bytes, read_answer, usage_finder, usage_found

BODIES = {
    "chat": (
        b'{"choices":[{"message":{"content":"hi"},"finish_reason":"length"}],"usage":{"prompt_tokens":14,'
        b'"total_tokens":17,"completion_tokens":3,"prompt_tokens_details":{"cached_tokens":4}},"x":null}',
        Usage(14, 3, 4),
    ),
    "embeddings": (b'{"data":[],"usage":{"prompt_tokens":6,"total_tokens":6,"completion_tokens":0}}', Usage(6, 0)),
    "rerank": (b'{"results":[],"usage":{"total_tokens":56}}', Usage(56, None)),
    "responses": (
        b'{"usage":{"input_tokens":14,"input_tokens_details":{"cached_tokens":2},"output_tokens":3}}',
        Usage(14, 3, 2),
    ),
    "messages": (
        b'{"usage":{"input_tokens":4,"output_tokens":3,"cache_creation_input_tokens":2,"cache_read_input_tokens":8}}',
        Usage(14, 3, 8),
    ),
    "only the output": (b'{"usage":{"completion_tokens":3}}', Usage(None, 3)),
    "only the prompt": (b'{"usage":{"prompt_tokens":3,"completion_tokens":-1}}', Usage(3, None)),
    "no usage": (b'{"choices":[]}', None),
    "null usage": (b'{"usage":null}', None),
    "not JSON": (b"<html>", None),
    "more than there can be": (
        b'{"usage":{"prompt_tokens":3,"completion_tokens":1' + b"0" * 30 + b"}}",
        Usage(3, None),
    ),
    "other shape": (b'{"usage":{"prompt_tokens":"many"}}', None),
    "other shape beside it": (b'{"choices":5,"usage":{"prompt_tokens":6,"completion_tokens":2}}', Usage(6, 2)),
    "deep": (b'{"x":' + b"[" * 100_000 + b"]" * 100_000 + b',"usage":{"prompt_tokens":6}}', Usage(6, None)),
}


@pytest.mark.parametrize("name", BODIES)
def test_usage_of_a_whole_body(name: str) -> None:
    body, usage = BODIES[name]
    assert read_answer(body).usage == usage


@pytest.mark.parametrize("name", BODIES)
def test_usage_of_a_body_that_is_not_held_is_the_same(name: str) -> None:
    body, usage = BODIES[name]
    finder = usage_finder()
    for at in range(0, len(body), 7):
        finder.feed(body[at : at + 7])
    assert usage_found(finder) == usage


@pytest.mark.parametrize(
    ("body", "made"),
    [
        (b'{"choices":[{"message":{"content":"hello"}}],"prompt_logprobs":[1,2,3]}', b'{"content":"hello"}'),
        (b'{"choices":[{"text":"hello"},{"text":"you"}]}', b'"hello""you"'),
        (b'{"output":[{"content":"hello"}],"tools":[{}]}', b'[{"content":"hello"}]'),
        (b'{"content":[{"text":"hello"}],"model":"x"}', b'[{"text":"hello"}]'),
        (b'{"text":"hello"}', b'"hello"'),
        (b"hello", b"hello"),
        (b'{"choices":5}', b'{"choices":5}'),
        (b'{"data":[{"b64_json":"abc"}]}', b""),
    ],
)
def test_what_was_made_is_the_text_and_not_what_is_around_it(body: bytes, made: bytes) -> None:
    assert made_bytes(body) == len(made)


def test_only_an_abort_without_tokens_is_a_drain() -> None:
    drained = b'{"choices":[{"finish_reason":"abort"},{"finish_reason":"abort"}],"usage":{"completion_tokens":0}}'
    assert read_answer(drained).is_drained
    others = drained.replace(b'"abort"', b'"stop"', 1), drained.replace(b":0", b":5"), b'{"choices":[]}', b"not JSON"
    assert not any(read_answer(body).is_drained for body in others)


@pytest.mark.parametrize(
    ("body", "awaits_more"),
    [
        (b'{"choices":[{"finish_reason":"tool_calls","message":{"tool_calls":[{"id":"c"}]}}]}', True),
        (b'{"choices":[{"finish_reason":"stop","message":{"tool_calls":[{"id":"c"}]}}]}', True),
        (b'{"choices":[{"finish_reason":"stop"},{"finish_reason":"tool_calls"}]}', True),
        (b'{"choices":[{"finish_reason":"stop","message":{"content":"\\"tool_calls\\":[1]","tool_calls":[]}}]}', False),
        (b'{"choices":[{"finish_reason":"length"}]}', False),
        (b'{"choices":[{"finish_reason":"stop"},{"finish_reason":"length"}]}', False),
        (b'{"stop_reason":"tool_use","content":[]}', True),
        (b'{"stop_reason":"end_turn","content":[]}', False),
        (b'{"stop_reason":"max_tokens","content":[]}', False),
        (b'{"status":"completed","output":[{"type":"reasoning"},{"type":"function_call"}]}', True),
        (b'{"status":"completed","output":[{"type":"web_search_call"},{"type":"message"}]}', False),
        (b'{"status":"incomplete","output":[{"type":"message"}]}', False),
        (b'{"output":"of another API"}', None),
        (b'{"choices":[{"finish_reason":"stop"},{"finish_reason":"paused"}]}', None),
        (b"not JSON", None),
    ],
)
def test_an_answer_that_asks_for_a_tool_awaits_another_call(body: bytes, awaits_more: bool | None) -> None:
    assert read_answer(body).awaits_more is awaits_more
