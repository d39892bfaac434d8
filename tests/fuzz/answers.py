"""The readers of what engines answer: HTTP heads and framing, streams, whole answers, error bodies, metrics pages,
and what an engine says of its steps."""

from __future__ import annotations

from typing import Any, cast

from backends.answers.answer import made_bytes, read_answer, usage_finder, usage_found
from backends.answers.body import Usage
from backends.answers.sse import Dialect, StreamMeter
from backends.client.upstream import UpstreamCall, UpstreamConnections, _Connection
from backends.engines.vllm import VllmAdapter
from backends.health import read_models
from backends.step_feed import _Clock, _FeedFault, _StepStream
from backends.upstream_errors import UpstreamError
from gateway.proxy.engine_errors import OWN_ERROR_EVENTS, engine_error
from tests.fuzz.harness import JSON_MARKS, Harness
from tests.fuzz.transport import Transport, in_loop, pieces

DIALECTS = tuple(Dialect)


def _well(usage: Usage | None) -> bool:
    counts = () if usage is None else (usage.prompt_tokens, usage.output_tokens, usage.cached_tokens)
    return all(count is None or (type(count) is int and count >= 0) for count in counts)


def _metered(data: list[bytes], dialect: Dialect, own_error: bytes) -> tuple[bytes, tuple[Any, ...]]:
    meter = StreamMeter(dialect, strip_usage=False, own_error=own_error)
    meter.tail_bytes_max = 16384
    out = [meter.feed(piece) for piece in data]
    out.append(meter.flush())
    usage = meter.usage
    assert _well(usage)
    counts = None if usage is None else (usage.prompt_tokens, usage.output_tokens, usage.cached_tokens)
    found = (meter.token_events, meter.started, counts, meter.ended, meter.is_over, meter.aborted, meter.awaits_more)
    return b"".join(out), found


def read_stream(data: bytes) -> None:
    """Wherever it is cut, the same goes out and is noted; without what is replaced, all of it goes out."""
    dialect = DIALECTS[len(data) % len(DIALECTS)]
    forwarded, facts = _metered(pieces(data), dialect, b"")
    assert forwarded == data
    if len(data) <= 4096:
        assert _metered([data], dialect, b"") == (forwarded, facts)
    _metered(pieces(data), dialect, OWN_ERROR_EVENTS[dialect])


def read_whole(data: bytes) -> None:
    """A usage is found, or not, whether the answer is held or not."""
    answer = read_answer(data)
    assert _well(answer.usage)
    finder, at_once = usage_finder(), usage_finder()
    for piece in pieces(data):
        finder.feed(piece)
    at_once.feed(data)
    cut, whole = usage_found(finder), usage_found(at_once)
    assert cut == whole
    assert _well(cut)
    assert 0 <= made_bytes(data) <= len(data)


def read_error(data: bytes) -> None:
    error = engine_error("b", 400 + len(data) % 100, data)
    for dialect in Dialect:
        assert 0 < len(error.body(dialect)) < 40_000


class _Receiver:
    """Checks the order of what it is told."""

    def __init__(self) -> None:
        self.status = 0
        self.ends = 0

    def head_received(self, status: int, headers: list[tuple[bytes, bytes]]) -> None:
        assert not self.status
        assert 200 <= status <= 599
        assert all(name == name.lower() and not set(value) & set(b"\r\n\0") for name, value in headers)
        self.status = status

    def body_received(self, data: bytes) -> None:
        assert self.status
        assert data
        assert not self.ends

    def completed(self) -> None:
        assert self.status
        self.ends += 1

    def failed(self, error: UpstreamError) -> None:
        self.ends += 1


def read_head(data: bytes) -> None:
    """Whatever comes, the call ends once."""
    in_loop(_answered(data))


async def _answered(data: bytes) -> None:
    pool = UpstreamConnections("b", "http://127.0.0.1:1")
    receiver = _Receiver()
    call = UpstreamCall(b"GET / HTTP/1.1\r\n\r\n", b"", receiver)
    connection = _Connection(pool, call)
    call.limit, call.connecting = cast("Any", _NoLimit()), cast("Any", _NoLimit())
    connection.connection_made(Transport())
    for piece in pieces(data):
        if connection._transport.is_closing():
            break
        connection.data_received(piece)
    connection.connection_lost(None)
    assert receiver.ends == 1
    pool._outbox.flush()


class _NoLimit:
    def reschedule(self, when: float | None) -> None:
        pass

    def cancelling(self) -> int:
        return 0


def read_metrics(data: bytes) -> None:
    snapshot = VllmAdapter().snapshot(data.decode("latin-1"), 1.0)
    if snapshot is None:
        return
    counts = (snapshot.running, snapshot.waiting, snapshot.kv_capacity_tokens, snapshot.preemptions_total)
    assert all(count is None or count >= 0 for count in counts)
    assert snapshot.kv_usage is None or 0 <= snapshot.kv_usage <= 1
    assert snapshot.block_size is None or snapshot.block_size > 0


def read_cards(data: bytes) -> None:
    for card in read_models("http://x", data):
        assert card.max_model_len is None or card.max_model_len > 0


def read_steps(data: bytes) -> None:
    """What an engine says of its steps is believed within bounds, or ends the feed."""
    heard = _StepStream(_Clock(0.0))
    for number, piece in enumerate(pieces(data)):
        now = number / 1000
        said = heard.feed(piece, now)
        if said is None:
            continue
        assert said.taken_s <= now
        counts = (said.running, said.waiting, said.kv_capacity_tokens, said.preemptions_total, said.prompt_tokens_total)
        counts += (said.scheduled_tokens, said.max_num_seqs, said.block_size)
        assert all(count is None or (type(count) is int and 0 <= count <= 1 << 50) for count in counts)
        assert said.kv_usage is None or 0 <= said.kv_usage <= 1
        assert said.is_step or said.scheduled_tokens is said.max_num_seqs is None


_USAGE = (
    *JSON_MARKS, b'"usage":', b'"usage":{}', b'"prompt_tokens":', b'"completion_tokens":', b'"output_tokens":',
    b'"usage', b'{"cached_tokens":5}', b"1.5", b'"x\\"usage":',
)  # fmt: skip
_STREAM = (
    *_USAGE, b"data: ", b"event: ", b"\n\n", b"\r\n\r\n", b"\r", b": x\n\n", b"data: [DONE]\n\n", b'"choices":[{}]',
    b'"finish_reason":null', b'"type":"response.completed"', b"message_stop", b'"error":{"code":500}', b'"response":{',
    b'"delta":{"content":"x"}', b"Traceback (most recent call last)",
)  # fmt: skip
_ERROR = (*JSON_MARKS, b'"error":', b'"message":', b'"detail":', b'"loc":', b'"msg":')
_HEAD = (
    b"HTTP/1.1 200 OK\r\n", b"HTTP/1.1 100 x\r\n\r\n", b"\r\n", b"\r\n\r\n", b"Content-Length: 5\r\n", b"0\r\n\r\n",
    b"Transfer-Encoding: chunked\r\n", b"HTTP/1.0 ", b"099", b"204", b": ", b"\n", b"\0", b"Connection: close\r\n",
)  # fmt: skip
_METRICS = (
    b"vllm:num_requests_running", b"vllm:kv_cache_usage_perc", b"vllm:cache_config_info", b'{engine="0"}', b" 1\n",
    b"1e308", b"NaN", b"+Inf", b"-1", b'block_size="16"', b'num_gpu_blocks="9"', b'="', b"{", b"}", b"\\", b"\n#",
)  # fmt: skip
_CARDS = (*JSON_MARKS, b'"id"', b'"max_model_len"', b'"data"')
_STEPS = (
    *JSON_MARKS, b'"v":1', b'"start":"a"', b'"seq":', b'"now_s":', b'"age_s":', b'"ranks":[', b'"rank":0', b"1e12",
    b'"free_blocks":', b'"total_blocks":', b'"kv_tokens":', b'"prompt_tokens_total":', b"1e13", b"1.5", b"}\n",
)  # fmt: skip

HARNESSES = (
    # Objects that an engine writes in three bytes take a hundred: of answers, what is read at once has its own bound.
    Harness("stream", read_stream, (), _STREAM, s_per_mb_max=5.0, memory_ratio_max=6.0),
    Harness("whole", read_whole, (), _USAGE, memory_ratio_max=40.0),
    Harness("error", read_error, (), _ERROR),
    Harness("head", read_head, (), _HEAD),
    Harness("metrics", read_metrics, (), _METRICS),
    Harness("cards", read_cards, (UpstreamError,), _CARDS, memory_ratio_max=40.0),
    Harness("steps", read_steps, (_FeedFault,), _STEPS),
)
