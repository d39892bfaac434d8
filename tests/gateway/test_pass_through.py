"""What the client gets is what the engine wrote, as it wrote it; the official client works as against the engine."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import openai
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
    streamed,
    token,
    usage_event,
)
from tests.gateway.live import MODEL, Live, Starter, chat, simulated
from tests.gateway.playbook import ASKED, QUEUED

TOKENS = [token(""), token("Hel"), token("lo “there”, \\n"), token("", "stop")]
USAGE = usage_event(11, 3)
UNICODE = '{"object":"x", "text" : "déjà\\u0000 \\ud83d\\ude00",  "usage":{"prompt_tokens":3,"completion_tokens":1}}'

FRESH = "/v1/something/new"
NEW = [{"path": FRESH, "treatment": "generate"}]
WORK: dict[str, dict[str, Any]] = {
    **{path: ASKED[path] for path in QUEUED if path != "/v1/new"},
    "/rerank": ASKED["/v1/rerank"],
    "/v1/score": {"model": MODEL, "text_1": "a", "text_2": "b"},
    "/pooling": {"model": MODEL, "input": "a"},
    FRESH: {"model": MODEL, "prompt": "Hello"},
}
STREAMS: dict[str, list[bytes]] = {
    "/v1/chat/completions": [b": a comment\n\n", *TOKENS, DONE],
    "/v1/completions": [*TOKENS, DONE],
    "/v1/responses": responses_stream("Hel", "lo “x”"),
    "/v1/messages": messages_stream("Hel", "lo “x”"),
    FRESH: [b'data: {"type":"new","part":1}\n\n', b'data: {"type":"new","part":2}\n\n', DONE],
}


async def test_a_whole_answer_and_its_request_cross_unchanged(start: Starter) -> None:
    whole = answer(UNICODE.encode(), b"X-Engine: yes")
    async with Upstream(replies(whole)) as upstream, start(upstream.url, routes=NEW) as live:
        for path, body in WORK.items():
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
        for path, pieces in STREAMS.items():
            sent = b"".join(pieces)
            for width in (len(sent), 120, 7):
                parts[:] = [sent[at : at + width] for at in range(0, len(sent), width)]
                got = await live.ask(path, {**WORK[path], "stream": True})
                assert got.body == sent, (path, width)
                assert got.headers["content-type"] == "text/event-stream; charset=utf-8", path
                assert live.holds_nothing(), path
        assert len(upstream.requests) == 3 * len(STREAMS)


ANOTHER = {"include_obfuscation": False}
OPTIONS: dict[str, dict[str, Any]] = {
    "none": {},
    "null": {"stream_options": None},
    "no option": {"stream_options": {}},
    "not wanted": {"stream_options": {"include_usage": False}},
    "another": {"stream_options": ANOTHER},
    "wanted": {"stream_options": {"include_usage": True, **ANOTHER}},
}


@pytest.mark.parametrize("name", OPTIONS)
async def test_usage_is_asked_for_and_kept_from_who_did_not_ask(start: Starter, name: str) -> None:
    asked = OPTIONS[name].get("stream_options") or {}
    sent = streamed(b"".join(TOKENS), USAGE + DONE)
    async with Upstream(replies(sent)) as upstream, start(upstream.url, routes=NEW) as live:
        got = await live.ask("/v1/chat/completions", chat(stream=True, **OPTIONS[name]))
        [seen] = upstream.requests
        assert seen.json == chat(stream=True, stream_options={**asked, "include_usage": True})
        assert got.body == b"".join(TOKENS) + USAGE * asked.get("include_usage", False) + DONE
        [line] = await live.lines(1)
        assert (line["tokens_in"], line["tokens_out"]) == (11, 3)


@pytest.mark.parametrize("size", [1, 400_000])
@pytest.mark.parametrize("path", ["/v1/audio/speech", "/api/chat", "/v1/embeddings", "/rerank", "/pooling"])
async def test_nothing_is_added_to_a_stream_of_a_body_that_is_not_known(start: Starter, path: str, size: int) -> None:
    opened = {"/v1/audio/speech": "compute", "/api/chat": "generate"}
    routes = [{"path": each, "treatment": treatment} for each, treatment in opened.items()]
    usage = b'data: {"choices":[],"usage":{"prompt_tokens":11,"completion_tokens":3}}\n\n'
    script = replies(streamed(TOKENS[1] + usage + DONE))
    body = {"model": MODEL, "stream": True, "input": "x", "padding": "x" * size}
    async with Upstream(script) as upstream, start(upstream.url, routes=routes) as live:
        for left_out in ("", "model") if path == "/api/chat" else ("",):
            raw = json.dumps({name: value for name, value in body.items() if name != left_out}).encode()
            got = await live.ask(path, raw)
            assert upstream.requests[-1].unsalted == raw
            assert got.body == TOKENS[1] + usage + DONE, "what nobody has asked for is not left out"
        assert {line["model"] for line in await live.lines(len(upstream.requests))} == {MODEL}


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


async def test_what_has_no_body_passes_with_its_query(start: Starter) -> None:
    routes = [{"path": "/v1/videos/*", "methods": ["GET"], "treatment": "pass"}]
    async with Upstream(replies(answer(b"[1, 2]"))) as upstream, start(upstream.url, routes=routes) as live:
        live.has_response()
        for got in (await live.get("/v1/videos/v1?limit=3"), await live.ask("/v1/responses/r1/cancel")):
            assert (got.status, got.body) == (200, b"[1, 2]")
        read, cancelled = upstream.requests
        assert read.line == b"GET /v1/videos/v1?limit=3 HTTP/1.1"
        assert "content-length" not in read.headers
        assert cancelled.headers["content-length"] == "0"


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


HELLO: Any = [{"role": "user", "content": "Hello"}]


def client(live: Live, key: str = "k") -> openai.AsyncOpenAI:
    return openai.AsyncOpenAI(base_url=live.url + "/v1", api_key=key, max_retries=0)


async def test_every_api_that_it_knows(start: Starter) -> None:
    async with simulated(time_scale=0) as sim, start(sim.url) as live, client(live) as api:
        options: Any = {"extra_body": {"ignore_eos": True}, "max_tokens": 7, "model": MODEL, "messages": HELLO}
        whole: Any = await api.chat.completions.create(**options)
        assert whole.choices[0].message.content
        assert whole.usage.completion_tokens == 7
        assert whole._request_id.startswith("req_")
        chunks = [chunk async for chunk in await api.chat.completions.create(stream=True, **options)]
        assert sum(bool(each.choices[0].delta.content) for each in chunks) == 7
        assert all(each.usage is None for each in chunks)
        counted = await api.chat.completions.create(stream=True, stream_options={"include_usage": True}, **options)
        last = [chunk async for chunk in counted][-1]
        assert (last.choices, last.usage.completion_tokens) == ([], 7)
        text = await api.completions.create(model=MODEL, prompt="Hello", max_tokens=5)
        assert text.choices[0].text
        vectors = await api.embeddings.create(model=MODEL, input=["a", "b"], encoding_format="float")
        assert [len(each.embedding) for each in vectors.data] == [8, 8]
        assert [card.id async for card in api.models.list()] == [MODEL]
        response = await api.responses.create(model=MODEL, input="Hi", max_output_tokens=6)
        assert response.usage is not None
        assert response.output
        stream = await api.responses.create(model=MODEL, input="Hi", max_output_tokens=6, stream=True)
        events: list[Any] = [event async for event in stream]
        assert (events[0].type, events[-1].type) == ("response.created", "response.completed")
        assert events[-1].response.usage is not None


async def test_the_error_classes(start: Starter) -> None:
    async with simulated() as sim, start(sim.url, tenants=[{"name": "t"}]) as live:
        key = next(iter(live.gateway.minted_keys.values()))
        async with client(live, key) as api, client(live, "wrong") as stranger:
            with pytest.raises(openai.AuthenticationError) as unknown:
                await stranger.completions.create(model=MODEL, prompt="x")
            assert unknown.value.code == "invalid_api_key"
            with pytest.raises(openai.NotFoundError) as missing:
                await api.completions.create(model="gpt-9", prompt="x")
            assert (missing.value.code, missing.value.param) == ("model_not_found", "model")
            with pytest.raises(openai.BadRequestError) as bad:
                await api.completions.create(model=MODEL, prompt="x", n=0)
            assert (bad.value.code, bad.value.param) == ("invalid_request", "n")
            assert bad.value.request_id
            nonsense: Any = 5
            with pytest.raises(openai.BadRequestError):
                await api.chat.completions.create(model=MODEL, messages=nonsense)
            with pytest.raises(openai.PermissionDeniedError):
                await api.completions.create(model=MODEL, prompt="x", extra_headers={"x-fairgate-app": "forged"})
            sim.faults.cut_body_next = 1
            with pytest.raises(openai.InternalServerError) as broken:
                await api.completions.create(model=MODEL, prompt="x")
            assert broken.value.code == "backend_failed"
            sim.faults.truncate_after_events = 10
            streams: list[Any] = [
                await api.chat.completions.create(model=MODEL, messages=HELLO, stream=True, max_tokens=90),
                await api.responses.create(model=MODEL, input="x", stream=True, max_output_tokens=90),
            ]
            for stream in streams:
                with pytest.raises(openai.APIError, match="broke off"):
                    [_ async for _ in stream]
