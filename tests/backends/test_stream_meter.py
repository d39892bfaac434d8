"""What the meter forwards and counts does not depend on how the network cut the stream."""

from __future__ import annotations

import itertools
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from backends.answers.body import Usage
from backends.answers.sse import Dialect, StreamMeter


def chunk(content: str | None, *, finish: str | None = None, role: bool = False, usage: object = None) -> bytes:
    delta = {"role": "assistant", "content": ""} if role else {"content": content}
    event: dict[str, object] = {"id": "c1", "choices": [{"index": 0, "delta": delta, "finish_reason": finish}]}
    if usage is not None:
        event["usage"] = usage
    return b"data: " + compact(event)


def compact(event: object) -> bytes:
    return json.dumps(event, separators=(",", ":")).encode()


USAGE = {"prompt_tokens": 14, "total_tokens": 17, "completion_tokens": 3, "prompt_tokens_details": {"cached_tokens": 8}}
ROLE = chunk(None, role=True)
FINAL_USAGE = b"data: " + compact({"id": "c1", "choices": [], "usage": USAGE})
DONE = b"data: [DONE]"
NASTY = '"usage":{"x":1} data: [DONE]\n\n \r\n "error":{} \u2028 "role":"assistant" "finish_reason":null'


def stream(*events: bytes, end: bytes = b"\n\n") -> bytes:
    return b"".join(event.replace(b"\n", end[: len(end) // 2]) + end for event in events)


def read(dialect: Dialect, data: bytes, cuts: list[int], *, strip: bool) -> tuple[bytes, StreamMeter]:
    meter = StreamMeter(dialect, strip_usage=strip)
    places = sorted({0, len(data), *(cut % (len(data) + 1) for cut in cuts)})
    out = [meter.feed(data[start:end]) for start, end in itertools.pairwise(places)]
    return b"".join([*out, meter.flush()]), meter


def facts(meter: StreamMeter) -> tuple[object, ...]:
    return meter.token_events, meter.started, meter.usage, meter.error, meter.ended, meter.aborted


texts = st.one_of(st.text(max_size=20), st.just(NASTY))
openai_events = st.one_of(
    st.builds(chunk, texts),
    st.builds(chunk, texts, usage=st.just(USAGE)),
    st.just(ROLE),
    st.just(chunk("end", finish="stop")),
    st.just(FINAL_USAGE),
    st.just(b": keep-alive"),
    st.just(DONE),
    st.just(b'data: {"error": {"message": "busy", "type": "Service Unavailable", "code": 503}}'),
    st.just(b"data: {garbage"),
    st.just(b'event: x\ndata: {"choices":[{"text":"a","finish_reason":null}]}'),
    st.just(b'data: {"choices":\ndata: [{"text":"a"}]}'),
)
ends = st.sampled_from([b"\n\n", b"\r\n\r\n", b"\r\r"])
cuts = st.lists(st.integers(0, 10_000), max_size=30)


@given(st.lists(openai_events, max_size=8), ends, cuts, st.booleans())
def test_cutting_the_stream_anywhere_changes_nothing(
    events: list[bytes], end: bytes, cuts: list[int], strip: bool
) -> None:
    data = stream(*events, end=end)
    forwarded, meter = read(Dialect.OPENAI, data, cuts, strip=strip)
    kept = [event for event in events if not (strip and event == FINAL_USAGE)]
    assert forwarded == stream(*kept, end=end)
    one_by_one = StreamMeter(Dialect.OPENAI, strip_usage=strip)
    for event in events:
        one_by_one.feed(stream(event))
    assert facts(meter) == facts(one_by_one)
    assert read(Dialect.OPENAI, data, [], strip=strip)[0] == forwarded


@given(cuts)
def test_every_event_with_tokens_counts_and_nothing_else_does(cuts: list[int]) -> None:
    data = stream(ROLE, b": keep-alive", chunk(NASTY), chunk(""), chunk("x", finish="length"), FINAL_USAGE, DONE)
    _, meter = read(Dialect.OPENAI, data, cuts, strip=True)
    assert facts(meter) == (3, True, Usage(14, 3, 8), None, True, False)


def test_a_read_of_whole_token_events_is_forwarded_as_the_same_object() -> None:
    meter = StreamMeter(Dialect.OPENAI, strip_usage=True)
    meter.feed(stream(ROLE))
    data = stream(chunk("a"), chunk(NASTY))
    assert meter.feed(data) is data
    assert meter.token_events == 2


def test_a_comment_does_not_start_the_answer_and_the_role_does() -> None:
    meter = StreamMeter(Dialect.OPENAI, strip_usage=True)
    meter.feed(b": keep-alive\n\n")
    assert not meter.started
    meter.feed(stream(ROLE))
    assert meter.started
    assert meter.token_events == 0


def test_an_unfinished_event_is_held_back_and_given_out_at_the_end() -> None:
    meter = StreamMeter(Dialect.OPENAI, strip_usage=True)
    assert meter.feed(stream(ROLE) + b'data: {"cho') == stream(ROLE)
    assert meter.flush() == b'data: {"cho'
    assert not meter.ended


@pytest.mark.parametrize("strip", [True, False])
def test_an_event_too_long_to_hold_passes_and_its_usage_is_read(strip: bool) -> None:
    long = b'event: response.completed\ndata: {"response":{"text":"' + b"x" * 5000
    long += b'","usage":{"input_tokens":5,"output_tokens":9}},"type":"response.completed"}'
    data = stream(long, long)
    meter = StreamMeter(Dialect.RESPONSES, strip_usage=strip)
    meter.tail_bytes_max = 1000
    out = [meter.feed(data[at : at + 100]) for at in range(0, len(data), 100)]
    assert b"".join(out) + meter.flush() == data
    assert facts(meter) == (0, False, Usage(5, 9), None, True, False)
    assert max(len(piece) for piece in out) < 1200


def test_continuous_usage_is_known_while_the_stream_runs() -> None:
    meter = StreamMeter(Dialect.OPENAI, strip_usage=False)
    for at, piece in enumerate([ROLE, chunk("a"), chunk("b")]):
        meter.feed(stream(piece[:-1] + b',"usage":{"prompt_tokens":3,"completion_tokens":%d}}' % at))
        assert meter.usage == Usage(3, at)


@pytest.mark.parametrize(
    ("dialect", "event", "status"),
    [
        (Dialect.OPENAI, b'data: {"error": {"message": "m", "type": "t", "param": null, "code": 503}}', 503),
        (Dialect.OPENAI, b'data: {"error":{"message":"m","type":"t","code":"400"}}', 400),
        (Dialect.MESSAGES, b'event: error\ndata: {"type":"error","error":{"type":"t","message":"m"}}', 0),
        (Dialect.RESPONSES, b'event: error\ndata: {"type":"error","code":"rate_limit_exceeded","message":"m"}', 429),
        (
            Dialect.RESPONSES,
            b'event: response.failed\ndata: {"response":{"error":{"code":"server_error","message":"m"}}}',
            0,
        ),
    ],
)
def test_an_error_in_the_stream_is_seen(dialect: Dialect, event: bytes, status: int) -> None:
    meter = StreamMeter(dialect, strip_usage=True)
    assert meter.feed(stream(event)) == stream(event)
    assert meter.error == status
    assert meter.token_events == 0


def test_an_engine_that_shuts_down_gives_up_without_a_token() -> None:
    for events in ([DONE], [chunk("", finish="abort"), FINAL_USAGE, DONE], [ROLE, chunk("", finish="abort"), DONE]):
        meter = StreamMeter(Dialect.OPENAI, strip_usage=True)
        meter.feed(stream(*events))
        assert meter.aborted, events
    for events in ([ROLE, chunk("a"), chunk("", finish="abort"), DONE], [ROLE, chunk("a", finish="stop"), DONE]):
        meter = StreamMeter(Dialect.OPENAI, strip_usage=True)
        meter.feed(stream(*events))
        assert not meter.aborted, events


MESSAGES = stream(
    b'event: message_start\ndata: {"type":"message_start","message":{"usage":{"input_tokens":14,"output_tokens":0}}}',
    b'event: content_block_start\ndata: {"type":"content_block_start","index":0}',
    b'event: content_block_delta\ndata: {"type":"content_block_delta","delta":{"text":"a"},"index":0}',
    b'event: content_block_delta\ndata: {"type":"content_block_delta","delta":{"text":"b"},"index":0}',
    b'event: content_block_stop\ndata: {"type":"content_block_stop","index":0}',
    b'event: message_delta\ndata: {"type":"message_delta","delta":{"stop_reason":"x"},"usage":{"output_tokens":2}}',
    b'event: message_stop\ndata: {"type":"message_stop"}',
)
RESPONSES = stream(
    b'event: response.created\ndata: {"response":{"status":"in_progress","usage":null},"type":"response.created"}',
    b'event: response.output_text.delta\ndata: {"delta":"a","type":"response.output_text.delta"}',
    b'data: {"delta":"b","type":"response.reasoning_text.delta"}',
    b'event: response.output_text.done\ndata: {"text":"ab","type":"response.output_text.done"}',
    b'event: response.completed\ndata: {"response":{"status":"completed","usage":{"input_tokens":14,'
    b'"input_tokens_details":{"cached_tokens":0},"output_tokens":2}},"type":"response.completed"}',
)


@given(cuts)
@pytest.mark.parametrize(("dialect", "data"), [(Dialect.MESSAGES, MESSAGES), (Dialect.RESPONSES, RESPONSES)])
def test_the_other_two_dialects_pass_untouched_and_are_counted(dialect: Dialect, data: bytes, cuts: list[int]) -> None:
    forwarded, meter = read(dialect, data, cuts, strip=True)
    assert forwarded == data
    assert facts(meter) == (2, True, Usage(14, 2), None, True, False)


def chat_end(reason: str) -> bytes:
    return b'data: {"choices":[{"index":0,"delta":{},"finish_reason":"%b"}]}\n\ndata: [DONE]\n\n' % reason.encode()


def responses_end(status: str, *items: str) -> bytes:
    added = [b'event: response.output_item.done\ndata: {"item":{"type":"%b"}}\n\n' % item.encode() for item in items]
    end = b'event: response.%b\ndata: {"response":{"id":"resp_1","status":"%b"}}\n\n'
    return b"".join(added) + end % (status.encode(), status.encode())


def messages_end(reason: str) -> bytes:
    return b'event: message_delta\ndata: {"delta":{"stop_reason":"%b"}}\n\n' % reason.encode()


@pytest.mark.parametrize(
    ("dialect", "end", "awaits_more"),
    [
        (Dialect.OPENAI, chat_end("tool_calls"), True),
        (Dialect.OPENAI, chat_end("stop"), False),
        (Dialect.OPENAI, chat_end("length"), False),
        (Dialect.OPENAI, chat_end("stop") + chat_end("tool_calls"), True),
        (Dialect.OPENAI, b"data: [DONE]\n\n", None),
        (Dialect.RESPONSES, responses_end("completed", "reasoning", "function_call"), True),
        (Dialect.RESPONSES, responses_end("completed", "message"), False),
        (Dialect.RESPONSES, responses_end("incomplete", "message"), False),
        (Dialect.MESSAGES, messages_end("tool_use"), True),
        (Dialect.MESSAGES, messages_end("end_turn"), False),
    ],
)
def test_a_stream_says_whether_another_call_follows(dialect: Dialect, end: bytes, awaits_more: bool | None) -> None:
    meter = StreamMeter(dialect, strip_usage=False)
    assert meter.feed(end) == end
    assert meter.awaits_more is awaits_more
    assert meter.answer_id == ("resp_1" if dialect is Dialect.RESPONSES else "")


def test_what_begins_and_ends_like_an_earlier_event_is_read_all_the_same() -> None:
    plain = stream(chunk("one"))
    before, after = plain.split(b"one")
    meter = StreamMeter(Dialect.OPENAI, strip_usage=False)
    two = before + b"x" + after + before + b"y" + after
    used = before + b'"}}],"usage":{"prompt_tokens":1,"completion_tokens":2},"choices":[{"delta":{"content":"' + after
    quoted, broken = before + b'\\"x\\\\' + after, before + b"x\ny" + after
    for data, tokens in ((stream(ROLE), 0), (plain, 1), (plain, 2), (two, 4), (quoted, 5), (broken, 6), (used, 7)):
        assert meter.usage is None
        assert meter.feed(data) == data
        assert meter.token_events == tokens
    assert meter.usage == Usage(1, 2)
