"""What the client gets is what the engine wrote, as it wrote it."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import aiohttp
import pytest

from tests.gateway.capture import (
    DONE,
    STREAM_END,
    STREAM_HEAD,
    Peer,
    Seen,
    Upstream,
    answer,
    chunk,
    messages_stream,
    replies,
    responses_stream,
    token,
    usage_event,
)
from tests.gateway.live import MODEL, Starter, chat, events, simulated

TOKENS = [token(""), token("Hel"), token("lo “there”, \\n"), token("", "stop")]
USAGE = usage_event(11, 3)
UNICODE = '{"object":"x", "text" : "déjà\\u0000 \\ud83d\\ude00",  "usage":{"prompt_tokens":3,"completion_tokens":1}}'

NEW = [{"path": "/v1/something/new", "treatment": "generate"}]
WORK: list[tuple[str, dict[str, Any]]] = [
    ("/v1/chat/completions", chat()),
    ("/v1/completions", {"model": MODEL, "prompt": "Hello"}),
    ("/v1/responses", {"model": MODEL, "input": "Hello"}),
    ("/v1/messages", {"model": MODEL, "max_tokens": 5, "messages": [{"role": "user", "content": "Hello"}]}),
    ("/v1/embeddings", {"model": MODEL, "input": ["Hello", "there"]}),
    ("/v1/rerank", {"model": MODEL, "query": "q", "documents": ["a", "b"]}),
    ("/rerank", {"model": MODEL, "query": "q", "documents": ["a", "b"]}),
    ("/v1/score", {"model": MODEL, "text_1": "a", "text_2": "b"}),
    ("/pooling", {"model": MODEL, "input": "a"}),
    ("/v1/something/new", {"model": MODEL, "prompt": "Hello"}),
]
STREAMS: dict[str, tuple[dict[str, Any], list[bytes]]] = {
    "/v1/chat/completions": (chat(stream=True), [b": a comment\n\n", *TOKENS, DONE]),
    "/v1/completions": ({"model": MODEL, "prompt": "Hello", "stream": True}, [*TOKENS, DONE]),
    "/v1/responses": ({"model": MODEL, "input": "Hello", "stream": True}, responses_stream("Hel", "lo “x”")),
    "/v1/messages": (
        {"model": MODEL, "max_tokens": 5, "stream": True, "messages": [{"role": "user", "content": "x"}]},
        messages_stream("Hel", "lo “x”"),
    ),
    "/v1/something/new": (
        {"model": MODEL, "prompt": "Hello", "stream": True},
        [b'data: {"type":"new","part":1}\n\n', b'data: {"type":"new","part":2}\n\n', DONE],
    ),
}


async def test_a_whole_answer_and_its_request_cross_unchanged(start: Starter) -> None:
    whole = answer(UNICODE.encode(), b"X-Engine: yes")
    async with Upstream(replies(whole)) as upstream, start(upstream.url, routes=NEW) as live:
        for path, body in WORK:
            raw = json.dumps(body, indent=1).encode()
            got = await live.ask(path + "?a=b%20c&d", raw)
            assert (got.status, got.body) == (200, UNICODE.encode()), path
            assert got.headers["x-engine"] == "yes", path
            assert got.headers["content-type"] == "application/json", path
            [seen] = upstream.requests
            assert seen.line == f"POST {path}?a=b%20c&d HTTP/1.1".encode(), path
            assert seen.unsalted == raw, path
            assert live.holds_nothing(), path
            upstream.requests.clear()


async def test_a_stream_crosses_byte_for_byte(start: Starter) -> None:
    parts: list[bytes] = []

    async def script(seen: Seen, peer: Peer) -> None:
        await peer.send(STREAM_HEAD)
        for part in parts:
            await peer.send(chunk(part))
            await asyncio.sleep(0)
        await peer.send(STREAM_END)

    async with Upstream(script) as upstream, start(upstream.url, routes=NEW) as live:
        for path, (body, pieces) in STREAMS.items():
            sent = b"".join(pieces)
            for width in (len(sent), 120, 7):
                parts[:] = [sent[at : at + width] for at in range(0, len(sent), width)]
                got = await live.ask(path, body)
                assert got.body == sent, (path, width)
                assert got.headers["content-type"] == "text/event-stream; charset=utf-8", path
                assert live.holds_nothing(), path
        assert len(upstream.requests) == 3 * len(STREAMS)


async def _stream_with_usage(start: Starter, **fields: Any) -> tuple[Seen, bytes, dict[str, Any]]:
    sent = STREAM_HEAD + chunk(b"".join(TOKENS)) + chunk(USAGE + DONE) + STREAM_END
    async with Upstream(replies(sent)) as upstream, start(upstream.url, routes=NEW) as live:
        got = await live.ask("/v1/chat/completions", chat(stream=True, **fields))
        [line] = await live.lines(1)
        return upstream.requests[0], got.body, line


@pytest.mark.parametrize(
    "fields",
    [{}, {"stream_options": None}, {"stream_options": {"include_usage": False}}, {"stream_options": {}}],
    ids=str,
)
async def test_usage_is_asked_for_and_kept_from_who_did_not_ask(start: Starter, fields: dict[str, Any]) -> None:
    seen, body, line = await _stream_with_usage(start, **fields)
    assert seen.json["stream_options"]["include_usage"] is True
    assert {**seen.json, "stream_options": 0} == {**chat(stream=True), "stream_options": 0}
    assert body == b"".join(TOKENS) + DONE
    assert (line["tokens_in"], line["tokens_out"]) == (11, 3)


async def test_usage_that_the_client_asked_for_is_there(start: Starter) -> None:
    options = {"include_usage": True, "continuous_usage_stats": False}
    seen, body, line = await _stream_with_usage(start, stream_options=options)
    assert seen.json["stream_options"] == options
    assert body == b"".join(TOKENS) + USAGE + DONE
    assert (line["tokens_in"], line["tokens_out"]) == (11, 3)


async def test_other_stream_options_survive_the_one_that_is_added(start: Starter) -> None:
    seen, _, _ = await _stream_with_usage(start, stream_options={"include_usage": False, "include_obfuscation": False})
    assert seen.json["stream_options"] == {"include_usage": True, "include_obfuscation": False}


@pytest.mark.parametrize("size", [1, 400_000])
@pytest.mark.parametrize("path", ["/v1/audio/speech", "/api/chat", "/v1/embeddings", "/rerank", "/pooling"])
async def test_nothing_is_added_to_a_stream_of_a_body_that_is_not_known(start: Starter, path: str, size: int) -> None:
    opened = {"/v1/audio/speech": "compute", "/api/chat": "generate"}
    routes = [{"path": each, "treatment": treatment} for each, treatment in opened.items()]
    usage = b'data: {"choices":[],"usage":{"prompt_tokens":11,"completion_tokens":3}}\n\n'
    script = replies(STREAM_HEAD + chunk(TOKENS[1] + usage + DONE) + STREAM_END)
    async with Upstream(script) as upstream, start(upstream.url, routes=routes) as live:
        raw = json.dumps({"model": MODEL, "stream": True, "input": "x", "padding": "x" * size}).encode()
        got = await live.ask(path, raw)
        assert upstream.requests[0].unsalted == raw
        assert got.body == TOKENS[1] + usage + DONE, "what nobody has asked for is not left out"


async def test_an_event_reaches_the_client_before_the_engine_writes_the_next(start: Starter) -> None:
    goes_on = asyncio.Event()

    async def script(seen: Seen, peer: Peer) -> None:
        await peer.send(STREAM_HEAD + chunk(TOKENS[1]))
        await goes_on.wait()
        await peer.send(chunk(TOKENS[2] + DONE) + STREAM_END)

    async with (
        Upstream(script) as upstream,
        start(upstream.url) as live,
        live.post("/v1/chat/completions", chat(stream=True)) as response,
    ):
        assert await response.content.readexactly(len(TOKENS[1])) == TOKENS[1]
        assert not goes_on.is_set()
        goes_on.set()
        assert await response.content.read() == TOKENS[2] + DONE


@pytest.mark.parametrize("path", ["/tokenize", "/detokenize", "/v1/messages/count_tokens", "/v1/responses/r1/cancel"])
async def test_requests_that_need_no_engine_time_pass_a_full_queue(start: Starter, path: str) -> None:
    async def script(seen: Seen, peer: Peer) -> None:
        if b"/chat/" in seen.line:
            await peer.gone()
        else:
            await peer.send(answer(b'{"count":3}', b"X-Engine: yes"))

    async with Upstream(script) as upstream, start(upstream.url, limits={"queue_requests_max": 1}) as live:
        flood = [asyncio.ensure_future(live.ask("/v1/chat/completions", chat(n=128))) for _ in range(3)]
        await asyncio.wait(flood, return_when=asyncio.FIRST_COMPLETED)
        assert live.engine.queued == 1
        live.has_response()
        raw = json.dumps({"model": MODEL, "prompt": "Hello"}).encode()
        got = await live.ask(path, raw)
        assert (got.status, got.body, got.headers["x-engine"]) == (200, b'{"count":3}', "yes")
        assert upstream.requests[-1].unsalted == raw
        for task in flood:
            task.cancel()
        await asyncio.gather(*flood, return_exceptions=True)


async def test_a_get_passes_with_its_query(start: Starter) -> None:
    routes = [{"path": "/v1/videos/*", "methods": ["GET"], "treatment": "pass"}]
    async with Upstream(replies(answer(b"[1, 2]"))) as upstream, start(upstream.url, routes=routes) as live:
        got = await live.get("/v1/videos/v1?limit=3")
        assert (got.status, got.body) == (200, b"[1, 2]")
        assert upstream.requests[0].line == b"GET /v1/videos/v1?limit=3 HTTP/1.1"
        assert "content-length" not in upstream.requests[0].headers


async def test_a_post_without_a_body_passes(start: Starter) -> None:
    async with Upstream(replies(answer(b"{}"))) as upstream, start(upstream.url) as live:
        live.has_response()
        assert (await live.ask("/v1/responses/r1/cancel")).status == 200
        assert upstream.requests[0].headers["content-length"] == "0"


async def test_an_upload_passes_byte_for_byte(start: Starter) -> None:
    form = aiohttp.FormData()
    form.add_field("model", MODEL)
    form.add_field("file", bytes(range(256)) * 300, filename="clip.wav", content_type="audio/wav")
    payload = form()
    raw = b"".join([part async for part in _parts(payload)])
    async with Upstream(replies(answer(b'{"text":"hi"}'))) as upstream, start(upstream.url) as live:
        got = await live.ask("/v1/audio/transcriptions", raw, content_type=str(payload.headers["Content-Type"]))
        assert got.json == {"text": "hi"}
        [seen] = upstream.requests
        assert seen.body == raw
        assert seen.headers["content-type"] == payload.headers["Content-Type"]
        assert live.holds_nothing()


async def _parts(payload: Any) -> Any:
    class Sink:
        def __init__(self) -> None:
            self.parts: list[bytes] = []

        async def write(self, data: bytes) -> None:
            self.parts.append(bytes(data))

    sink = Sink()
    await payload.write(sink)
    for part in sink.parts:
        yield part


async def test_models_of_all_pools_are_listed_and_asked_where_they_are(start: Starter) -> None:
    async with simulated(models=("a",)) as one, simulated(models=("b", "c")) as two:
        pools = [{"name": name, "backends": [{"url": sim.url}]} for name, sim in (("one", one), ("two", two))]
        async with start(pools=pools) as live:
            listed = (await live.get("/v1/models")).json
            assert [(card["id"], card["max_model_len"]) for card in listed["data"]] == [
                ("a", 4096),
                ("b", 4096),
                ("c", 4096),
            ]
            for model in "abc":
                got = await live.ask("/v1/completions", {"model": model, "prompt": "x", "max_tokens": 2})
                assert got.json["model"] == model
            assert {line["model"]: line["backend"] for line in (await live.lines(4))[1:]} == {
                "a": one.url.removeprefix("http://"),
                "b": two.url.removeprefix("http://"),
                "c": two.url.removeprefix("http://"),
            }


@pytest.mark.parametrize("stream", [False, True])
async def test_the_simulated_engine_says_the_same_through_the_gateway(start: Starter, stream: bool) -> None:
    body = chat("Tell me", max_tokens=40, stream=stream)
    async with (
        simulated(time_scale=0) as sim,
        start(pools=[{"name": "p", "isolate_caches": "never", "backends": [{"url": sim.url}]}]) as live,
    ):
        through = await live.ask("/v1/chat/completions", body)
        async with live.http.post(sim.url + "/v1/chat/completions", json=body) as response:
            direct = await response.read()
    assert _without_ids(through.body, stream) == _without_ids(direct, stream)


def _without_ids(body: bytes, stream: bool) -> list[Any]:
    found = events(body) if stream else [json.loads(body)]
    for value in found:
        if isinstance(value, dict):
            value.update(id="", created=0)
            value.get("usage", {}).pop("prompt_tokens_details", None)  # the second run finds the first one's prefix
    return found
