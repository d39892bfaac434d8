"""The vLLM look-alike over real sockets: what clients read, what an operator scrapes, what a disconnect does."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import aiohttp
import openai
import pytest

from backends.simulated.engine_model import EngineGauges
from backends.simulated.engine_profiles import EngineProfile, profile
from tests.faulty_engine import FaultyEngine

MODEL = "pretend"
_CHAT = {"model": MODEL, "messages": [{"role": "user", "content": "hello there"}], "ignore_eos": True}

Start = Callable[..., Awaitable[tuple[FaultyEngine, str]]]


@pytest.fixture
async def start() -> AsyncIterator[Start]:
    """Starts servers on free ports and stops them at the end. They run as fast as they can unless told otherwise."""
    servers = []

    async def begin(
        engine: EngineProfile | None = None, *, time_scale: float = 0.0, **options: Any
    ) -> tuple[FaultyEngine, str]:
        server = FaultyEngine(engine or profile("demo"), model_names=(MODEL,), time_scale=time_scale, **options)
        port = await server.start("127.0.0.1", 0)
        servers.append(server)
        return server, f"http://127.0.0.1:{port}"

    yield begin
    for server in servers:
        await server.stop()


@pytest.fixture
async def http() -> AsyncIterator[aiohttp.ClientSession]:
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as session:
        yield session


async def post(http: aiohttp.ClientSession, url: str, body: dict[str, Any] | bytes) -> tuple[int, bytes]:
    raw = body if isinstance(body, bytes) else json.dumps(body).encode()
    async with http.post(url, data=raw, headers={"Content-Type": "application/json"}) as answer:
        return answer.status, await answer.read()


async def until(server: FaultyEngine, true: Callable[[EngineGauges], bool]) -> EngineGauges:
    """Wait for a state of the gauges; the test's timeout is the bound. They have no event: nor have the engine's."""
    while not true(server.gauges):  # noqa: ASYNC110
        await asyncio.sleep(0.001)
    return server.gauges


def data_of(stream: bytes) -> list[Any]:
    lines = [line[6:] for line in stream.decode().split("\n") if line.startswith("data: ")]
    return [line if line == "[DONE]" else json.loads(line) for line in lines]


async def test_the_openai_client_streams_a_chat(start: Start) -> None:
    """With its usage, which is not said unasked. `tests/gateway/test_pass_through.py` has the other APIs."""
    _, base = await start()
    options: Any = {
        "model": MODEL, "messages": _CHAT["messages"], "max_tokens": 5, "extra_body": {"ignore_eos": True},
    }  # fmt: skip
    async with openai.AsyncOpenAI(base_url=f"{base}/v1", api_key="none", max_retries=0) as client:
        create = client.chat.completions.create
        counted = await create(stream=True, stream_options={"include_usage": True}, **options)
        chunks = [chunk async for chunk in counted]
        quiet = [chunk async for chunk in await create(stream=True, **options)]
        whole = await create(**options)
    assert chunks[0].choices[0].delta.role == "assistant"
    deltas = [chunk.choices[0] for chunk in chunks[1:-1]]
    assert len(deltas) == 5, "one token, one chunk"
    assert [choice.finish_reason for choice in deltas] == [None] * 4 + ["length"]
    assert "".join(choice.delta.content or "" for choice in deltas) == whole.choices[0].message.content
    assert chunks[-1].choices == []
    assert chunks[-1].usage.total_tokens == whole.usage.total_tokens == whole.usage.prompt_tokens + 5
    assert len(quiet) == len(chunks) - 1
    assert all(chunk.usage is None for chunk in quiet)


async def test_anthropic_messages_stream_their_events(start: Start, http: aiohttp.ClientSession) -> None:
    _, base = await start()
    _, raw = await post(http, f"{base}/v1/messages", {**_CHAT, "max_tokens": 3, "stream": True})
    events = data_of(raw)
    expected = ["message_start", "content_block_start"] + ["content_block_delta"] * 3
    assert [event["type"] for event in events] == [*expected, "content_block_stop", "message_delta", "message_stop"]
    assert events[-2]["usage"]["output_tokens"] == 3


async def test_without_ignore_eos_the_length_is_drawn_from_the_prompt(
    start: Start, http: aiohttp.ClientSession
) -> None:
    lengths: list[list[int]] = [[], []]
    for drawn in lengths:
        _, base = await start()
        for i in range(8):
            body = {"model": MODEL, "prompt": f"prompt {i}", "max_tokens": 1000}
            _, raw = await post(http, f"{base}/v1/completions", body)
            answer = json.loads(raw)
            assert answer["choices"][0]["finish_reason"] == "stop"
            drawn.append(answer["usage"]["completion_tokens"])
    assert lengths[0] == lengths[1], "the same again"
    assert len(set(lengths[0])) > 4


async def test_a_repeated_prefix_is_cached_and_a_salt_keeps_it_apart(start: Start, http: aiohttp.ClientSession) -> None:
    _, base = await start()
    cached = []
    for salt in (None, None, "mine", "mine"):
        body = {"model": MODEL, "prompt": "x" * 640, "max_tokens": 1, "cache_salt": salt}
        _, raw = await post(http, f"{base}/v1/completions", body)
        cached.append(json.loads(raw)["usage"]["prompt_tokens_details"]["cached_tokens"])
    assert cached == [0, 144, 0, 144], "160 tokens, of which the last block is computed"


async def test_a_max_tokens_beyond_the_context_is_cut_to_what_is_left(
    start: Start, http: aiohttp.ClientSession
) -> None:
    _, base = await start()
    body = {"model": MODEL, "prompt": list(range(4090)), "max_tokens": 4000, "ignore_eos": True}
    _, raw = await post(http, f"{base}/v1/completions", body)
    assert json.loads(raw)["usage"]["completion_tokens"] == 6


@pytest.mark.parametrize(
    ("path", "body", "status", "param"),
    [
        ("chat/completions", {**_CHAT, "model": "nope"}, 404, "model"),
        ("chat/completions", {"model": MODEL}, 400, "body.messages"),
        ("chat/completions", {"model": MODEL, "messages": "hello"}, 400, "body.messages"),
        ("chat/completions", {**_CHAT, "max_tokens": 0}, 400, "max_tokens"),
        ("chat/completions", {**_CHAT, "max_completion_tokens": -5}, 400, "max_completion_tokens"),
        ("chat/completions", {**_CHAT, "max_tokens": 5000}, 400, "max_tokens"),
        ("chat/completions", {**_CHAT, "n": 1.5}, 400, "body.n"),
        ("completions", {"model": MODEL, "prompt": {"a": 1}}, 400, "body.prompt"),
        ("completions", {"model": MODEL, "prompt": [[], "a"]}, 400, "body.prompt"),
        ("completions", {"model": MODEL, "prompt": list(range(4096))}, 400, "input_tokens"),
        ("responses", {"model": MODEL, "input": 5, "max_output_tokens": "x"}, 400, "body.max_output_tokens"),
        ("completions", b"{bad", 400, "body.1"),
        ("completions", b"[1]", 400, "body"),
        ("completions", b"[" * 5000, 400, "body.1"),
        ("completions", b"\xff\xfe", 400, "body.1"),
    ],
)
async def test_bad_input_is_refused_in_vllms_words(
    start: Start, http: aiohttp.ClientSession, path: str, body: dict[str, Any] | bytes, status: int, param: str
) -> None:
    server, base = await start()
    got, raw = await post(http, f"{base}/v1/{path}", body)
    error = json.loads(raw)["error"]
    assert (got, error["code"], error["param"]) == (status, status, param)
    assert error["message"]
    assert server.gauges == EngineGauges(), "nothing reached the engine"


async def test_metrics_have_vllms_names_and_the_filter_selects(start: Start, http: aiohttp.ClientSession) -> None:
    _, base = await start()
    await post(http, f"{base}/v1/chat/completions", {**_CHAT, "max_tokens": 7})
    async with http.get(f"{base}/metrics") as answer:
        page = await answer.text()
    assert f'vllm:generation_tokens_total{{engine="0",model_name="{MODEL}"}} 7.0\n' in page
    assert 'block_size="16"' in page
    assert 'num_gpu_blocks="513"' in page
    assert f'kv_cache_size_tokens="{513 * 16}"' in page
    async with http.get(f"{base}/metrics/?name[]=vllm:num_requests_waiting") as answer:
        assert await answer.text() == page


async def test_models_tokenize_health_and_version(start: Start, http: aiohttp.ClientSession) -> None:
    _, base = await start()
    found: dict[str, Any] = {}
    for path in ("/v1/models", "/health", "/version"):
        async with http.get(base + path) as answer:
            assert answer.status == 200, path
            found[path] = await answer.read()
    (card,) = json.loads(found["/v1/models"])["data"]
    assert (card["id"], card["max_model_len"]) == (MODEL, 4096)
    assert json.loads(found["/version"])["version"]
    status, raw = await post(http, f"{base}/tokenize", {"model": MODEL, "prompt": "twelve bytes"})
    assert (status, json.loads(raw)["count"]) == (200, 3)
    assert (await post(http, f"{base}/tokenize", b"[]"))[0] == 400


@pytest.mark.parametrize("stream", [True, False])
async def test_a_client_that_goes_away_frees_its_kv(start: Start, http: aiohttp.ClientSession, stream: bool) -> None:
    server, base = await start(time_scale=1.0)
    body = {**_CHAT, "max_tokens": 4000, "stream": stream}
    task = asyncio.create_task(post(http, f"{base}/v1/chat/completions", body))
    await until(server, lambda gauges: gauges.running == 1)
    task.cancel()
    gauges = await until(server, lambda gauges: gauges.running == 0)
    assert gauges.kv_blocks == 0
    assert gauges.generation_tokens_total < 4000


async def test_a_drain_finishes_what_runs_and_aborts_what_comes(start: Start, http: aiohttp.ClientSession) -> None:
    server, base = await start(time_scale=0.1)
    running = asyncio.create_task(post(http, f"{base}/v1/chat/completions", {**_CHAT, "max_tokens": 200}))
    await until(server, lambda gauges: gauges.running == 1)
    server.faults.is_draining = True
    status, raw = await post(http, f"{base}/v1/chat/completions", {**_CHAT, "max_tokens": 5})
    answer = json.loads(raw)
    assert (status, answer["choices"][0]["finish_reason"], answer["usage"]["completion_tokens"]) == (200, "abort", 0)
    status, raw = await post(http, f"{base}/v1/chat/completions", {**_CHAT, "max_tokens": 5, "stream": True})
    assert (status, raw) == (200, b"data: [DONE]\n\n")
    async with http.get(f"{base}/health") as health:
        assert health.status == 200
    status, raw = await running
    assert json.loads(raw)["usage"]["completion_tokens"] == 200


async def test_a_stop_drops_what_runs(start: Start, http: aiohttp.ClientSession) -> None:
    server, base = await start(time_scale=1.0)
    task = asyncio.create_task(post(http, f"{base}/v1/chat/completions", {**_CHAT, "max_tokens": 4000}))
    await until(server, lambda gauges: gauges.running == 1)
    await server.stop()
    with pytest.raises(aiohttp.ClientError):
        await task


async def test_under_pressure_streams_stall_and_all_end(start: Start, http: aiohttp.ClientSession) -> None:
    """32 sequences of up to 400 tokens do not fit 8,192: some are preempted, none loses or repeats a token."""
    server, base = await start()
    bodies = [
        {"model": MODEL, "prompt": f"{i:04}" * 200, "max_tokens": 200, "ignore_eos": True, "stream": True}
        for i in range(40)
    ]
    answers = await asyncio.gather(*(post(http, f"{base}/v1/completions", body) for body in bodies))
    assert all(len(data_of(raw)) == 201 for _, raw in answers)
    gauges = server.gauges
    assert gauges.preemptions_total > 0
    assert gauges.generation_tokens_total == 40 * 200
    assert (gauges.running, gauges.kv_blocks) == (0, 0)
