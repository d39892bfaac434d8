"""What is read of answers: usage, text and calls of tools, alike from a stream and a whole, wherever it is cut."""

from __future__ import annotations

import itertools
import json
import tracemalloc
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from backends.answers.answer import KEY_BYTES_MAX, made_bytes, read_answer, usage_finder, usage_found
from backends.answers.body import Usage
from backends.answers.members import CANDIDATES_MAX, MemberFinder
from backends.answers.sse import Dialect, StreamMeter
from tests.gateway.capture import DONE, named

TEXT = 'I look: "a.py" first.\nThen \\ b.py, and \U0001f600.'
PIECES = [TEXT[at : at + 3] for at in range(0, len(TEXT), 3)]
CALLS = [{"id": f"call-{n}", "type": "function", "function": {"name": "ls", "arguments": '{"id": "no"}'}} for n in "ab"]


def chat_stream() -> bytes:
    def event(delta: Any, finish: str | None = None) -> bytes:
        choice = {"index": 0, "delta": delta, "finish_reason": finish}
        value = {"id": "chatcmpl-1", "object": "chat.completion.chunk", "choices": [choice]}
        return b"data: " + json.dumps(value, separators=(",", ":"), ensure_ascii=False).encode() + b"\n\n"

    events = [event({"role": "assistant", "content": ""}), *(event({"content": piece}) for piece in PIECES)]
    for index, call in enumerate(CALLS):
        function: Any = call["function"]
        events.append(event({"tool_calls": [{"index": index, **call, "function": {"name": "ls", "arguments": ""}}]}))
        events.append(event({"tool_calls": [{"index": index, "function": {"arguments": function["arguments"]}}]}))
    return b"".join([*events, event({}, "tool_calls"), DONE])


def responses_stream() -> bytes:
    items = [{"type": "function_call", "id": f"fc-{n}", "call_id": f"call-{n}", "name": "ls"} for n in "ab"]
    return b"".join(
        [
            named("response.created", response={"id": "resp", "status": "in_progress"}),
            *(named("response.output_text.delta", delta=piece) for piece in PIECES),
            named("response.output_text.done", text=TEXT),
            *(named("response.output_item.added", item=item) for item in items),
            named("response.function_call_arguments.delta", delta='{"id": "no"}'),
            named("response.completed", response={"id": "resp", "status": "completed", "output": items}),
        ]
    )


def messages_stream() -> bytes:
    tools = [{"type": "tool_use", "id": f"call-{n}", "name": "ls", "input": {}} for n in "ab"]
    return b"".join(
        [
            named("message_start", message={"id": "msg", "usage": {"input_tokens": 1}}),
            named("content_block_start", index=0, content_block={"type": "text", "text": ""}),
            *(named("content_block_delta", index=0, delta={"type": "text_delta", "text": piece}) for piece in PIECES),
            *(named("content_block_start", index=at, content_block=tool) for at, tool in enumerate(tools, 1)),
            named("content_block_delta", index=1, delta={"type": "input_json_delta", "partial_json": '{"id": "no"}'}),
            named("message_delta", delta={"stop_reason": "tool_use"}),
            named("message_stop"),
        ]
    )


STREAMS = {
    Dialect.OPENAI: chat_stream(),
    Dialect.RESPONSES: responses_stream(),
    Dialect.MESSAGES: messages_stream(),
}


@settings(max_examples=60)
@given(dialect=st.sampled_from(list(STREAMS)), cuts=st.lists(st.integers(1, 4000), max_size=40))
def test_a_stream_tells_it_however_it_is_cut(dialect: Dialect, cuts: list[int]) -> None:
    whole = STREAMS[dialect]
    meter = StreamMeter(dialect, strip_usage=False)
    at = 0
    for end in [*sorted({cut % len(whole) for cut in cuts}), len(whole)]:
        meter.feed(whole[at:end])
        at = end
    meter.flush()
    assert json.loads(b'"' + meter.keys.text + b'"') == TEXT
    assert list(meter.keys.tool_ids) == [b"call-a", b"call-b"]
    if dialect is not Dialect.RESPONSES:  # there they come whole, with the item that is done
        assert json.loads(b'"' + meter.keys.arguments + b'"').startswith('{"id": "no"}')


@pytest.mark.parametrize(
    "answer",
    [
        {"choices": [{"message": {"content": TEXT, "tool_calls": CALLS}, "finish_reason": "tool_calls"}]},
        {
            "status": "completed",
            "output": [
                {"type": "message", "id": "m", "content": [{"type": "output_text", "text": TEXT}]},
                *({"type": "function_call", "id": f"fc-{n}", "call_id": f"call-{n}"} for n in "ab"),
            ],
        },
        {
            "stop_reason": "tool_use",
            "content": [{"type": "text", "text": TEXT}, *({"type": "tool_use", "id": f"call-{n}"} for n in "ab")],
        },
    ],
    ids=["chat", "responses", "messages"],
)
def test_a_whole_answer_tells_the_same(answer: dict[str, Any]) -> None:
    made = read_answer(json.dumps(answer).encode()).keys
    decoded, _ = json.JSONDecoder().raw_decode('"' + made.text.decode() + '"')
    assert decoded == TEXT
    assert list(made.tool_ids) == [b"call-a", b"call-b"]


@pytest.mark.parametrize("dialect", STREAMS)
def test_of_a_long_text_only_the_beginning_is_kept(dialect: Dialect) -> None:
    event = STREAMS[dialect].split(b"\n\n")[2] + b"\n\n"
    meter = StreamMeter(dialect, strip_usage=False)
    for _ in range(10 * KEY_BYTES_MAX):
        meter.feed(event)
    assert len(meter.keys.text) >= KEY_BYTES_MAX
    assert len(meter.keys.text) < 2 * KEY_BYTES_MAX
    long = read_answer(json.dumps({"choices": [{"message": {"content": "x" * 10**6}}]}).encode())
    assert len(long.keys.text) <= KEY_BYTES_MAX


@pytest.mark.parametrize("body", [b"", b"[]", b'{"choices":[{"message":"x"}]}', b'{"output":7}', b"\xff"])
def test_what_is_no_answer_tells_nothing(body: bytes) -> None:
    made = read_answer(body).keys
    assert (made.text, made.tool_ids) == (b"", {})


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


USAGE = {"prompt_tokens": 5, "details": {"cached": [1, {"x": "}"}]}}
nasty = st.sampled_from(['"', "\\", '\\"', "{", "}]", '"usage":{"a":1}', '"usage', "usage", 'usage":', "\u2028", ","])
texts = st.lists(st.one_of(nasty, st.text(max_size=5)), max_size=6).map("".join)
values = st.recursive(
    st.one_of(st.none(), st.booleans(), st.integers(), texts),
    lambda inner: st.one_of(
        st.lists(inner, max_size=4),
        st.dictionaries(st.one_of(texts, st.just("usage")), inner, max_size=4),
    ),
    max_leaves=20,
)
members = st.dictionaries(texts.filter(lambda name: name != "usage"), values, max_size=4)


def found(text: bytes, cuts: list[int], depth: int = 1, name: str = "usage") -> Any:
    finder = MemberFinder({(depth, name)})
    places = sorted({0, len(text), *(cut % (len(text) + 1) for cut in cuts)})
    for begin, end in itertools.pairwise(places):
        finder.feed(text[begin:end])
    return finder.values().get(name)


@settings(max_examples=100)
@given(members, members, st.lists(st.integers(0, 10_000), max_size=20), st.booleans(), st.sampled_from([None, 1]))
def test_it_is_what_a_parser_finds(
    before: dict[str, Any], behind: dict[str, Any], cuts: list[int], is_ascii: bool, indent: int | None
) -> None:
    whole = {**before, "usage": USAGE, **{name: value for name, value in behind.items() if name not in before}}
    assert found(json.dumps(whole, ensure_ascii=is_ascii, indent=indent).encode(), cuts) == USAGE
    del whole["usage"]
    assert found(json.dumps(whole, ensure_ascii=is_ascii, indent=indent).encode(), cuts) is None


@pytest.mark.parametrize("text", [b'{"a":{"usage":{"x":1}}}', b'[{"usage":{"x":1}}]', b'{"a":["usage",{"b":1}]}'])
def test_elsewhere_it_is_another_one(text: bytes) -> None:
    assert found(text, list(range(len(text)))) is None


def test_it_is_found_deeper_where_that_is_asked() -> None:
    text = b'event: x\ndata: {"response":{"a":{"usage":{"x":1}},"usage":{"x":2}},"type":"t"}'
    assert found(text, [], depth=2) == {"x": 2}
    assert found(text, [], name="type") == "t"


BROKEN = [b"", b"{", b'"', b"\\", b'{"usage":', b'{"usage":{', b'{"usage":{"a":}}', b'{"usage":' + b"[" * 50_000]
BROKEN += [b'{"usage":' + b"9" * 9000 + b"}", b'{"usage":{"a":"' + b"x" * 9000 + b'"}}', b"}" * 9000, b"\xff" * 9000]


@pytest.mark.parametrize("text", BROKEN, ids=lambda text: str(text[:20]))
def test_what_cannot_be_read_is_nothing(text: bytes) -> None:
    assert found(text, [1, 2, 3, 5000]) is None


def test_what_is_no_json_is_read_alike_wherever_it_is_cut() -> None:
    text = b'"a\\{" \\{ {"b":\\"} "usage":{"x":1}}' + b" " * 60
    whole = found(text, [])
    assert all(found(text, [cut]) == whole for cut in range(len(text)))


def test_the_first_one_stands() -> None:
    assert found(b'{"usage":{"x":1},"usage":{"x":2}}', []) == {"x": 1}


def test_too_many_that_are_not_it_end_the_search() -> None:
    other = b'{"a":[' + b'{"usage":{}},' * (CANDIDATES_MAX + 1) + b'0],"usage":{"x":1}}'
    assert found(other, []) is None


def test_it_holds_little_of_what_it_has_read() -> None:
    piece = b'{"logprob":-0.5,"decoded_token":"\\"{"},' * 10_000
    finder = MemberFinder({(1, "usage")})
    finder.feed(b'{"a":[')
    tracemalloc.start()
    for _ in range(10):
        finder.feed(piece)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 8 * len(piece)
    finder.feed(b'0],"usage":{"x":1}}')
    assert finder.values() == {"usage": {"x": 1}}
