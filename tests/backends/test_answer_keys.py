"""How an answer begins and which calls of tools it asks for: the same from a stream, however it is cut, and a whole."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from backends.answers.answer_keys import KEY_BYTES_MAX
from backends.answers.answer_usage import read_answer
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
