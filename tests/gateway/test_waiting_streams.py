"""A stream that waits hears of it before anybody in between gives it up, and what becomes of it then."""

from __future__ import annotations

import asyncio
import os
import re
import shutil
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import aiohttp
import openai
import pytest

from bench.stack import nginx
from gateway.http.errors import ApiError, Reason
from tests.gateway.capture import DONE, STREAM_END, STREAM_HEAD, Upstream, answer, chunk, token
from tests.gateway.live import MODEL, Live, Starter, chat, events, until
from tests.gateway.playbook import ASKED
from tests.kit.held import CUT, Held
from tests.ports import free_port

COMMENT_S = 0.1
HELLO: Any = [{"role": "user", "content": "Hello"}]
STREAM = STREAM_HEAD + chunk(token("a")) + chunk(DONE) + STREAM_END
REFUSED = answer(b'{"error":{"message":"busy","type":"x","code":503}}', status=b"503 Service Unavailable")
PROXY = """
    server {{
        listen 127.0.0.1:{port};
        location / {{
            proxy_pass {upstream};
            proxy_http_version 1.1;
            proxy_read_timeout 2s;
        }}
    }}
"""
PATHS = ["/v1/chat/completions", "/v1/responses", "/v1/messages"]


@asynccontextmanager
async def held(start: Starter, engine: Held, **limits: Any) -> AsyncIterator[Live]:
    async with Upstream(engine) as upstream:
        async with start(upstream.url, limits={"waiting_comment_s": COMMENT_S, **limits}) as live:
            yield live


@asynccontextmanager
async def queued(start: Starter, **limits: Any) -> AsyncIterator[Live]:
    """One whose engine has no room: what is asked waits in the queue."""
    async with held(start, Held(STREAM), **limits) as live:
        taken = asyncio.ensure_future(live.ask("/v1/chat/completions", chat(n=128)))
        await until(lambda: live.engine.dispatched)
        yield live
        taken.cancel()


async def comments(response: aiohttp.ClientResponse, count: int) -> None:
    for _ in range(count):
        comment = await response.content.readuntil(b"\n\n")
        assert re.fullmatch(rb": waiting(, between .+ and .+, behind \d+ requests?)?\n\n", comment)


@pytest.mark.skipif(shutil.which("nginx", path=f"{os.environ['PATH']}:/usr/sbin") is None, reason="there is no nginx")
async def test_a_queued_stream_outlives_the_patience_of_a_proxy(start: Starter) -> None:
    engine, port = Held(STREAM), free_port()
    async with held(start, engine) as live:
        async with nginx(PROXY.format(port=port, upstream=live.url), port, "/health"):
            url = f"http://127.0.0.1:{port}/v1/chat/completions"
            headers = {"authorization": "Bearer k"}
            async with live.http.post(url, json=chat(stream=True), headers=headers) as response:
                await comments(response, 25)  # longer than the proxy waits for a byte
                engine.may.set()
                assert response.status == 200
                assert response.content_type == "text/event-stream"
                assert events(await response.read())[-1] == "[DONE]"
        [line] = await live.lines(1)
        assert (line["outcome"], line["tokens_out"]) == ("completed", 1)


async def test_a_stream_that_is_served_in_time_hears_nothing(start: Starter) -> None:
    engine = Held(STREAM)
    engine.may.set()
    async with held(start, engine, waiting_comment_s=600) as live:
        got = await live.ask("/v1/chat/completions", chat(stream=True))
        assert b"waiting" not in got.body
        assert "x-accel-buffering" not in got.headers


@pytest.mark.parametrize("is_answered", [True, False])
async def test_a_client_that_strips_what_it_reads_loses_nothing(start: Starter, is_answered: bool) -> None:
    """As `vllm bench serve` reads: each piece stripped and joined, ends of events by what is left between them."""
    engine = Held(STREAM) if is_answered else Held(answer(b"{}", status=b"400 Bad Request"))
    async with held(start, engine) as live:
        async with live.post("/v1/chat/completions", chat(stream=True)) as response:
            joined, seen, pieces = b"", [], 0
            async for piece in response.content.iter_any():
                pieces += 1
                if pieces == 3:
                    engine.may.set()
                joined += piece.strip()
                *whole, joined = joined.split(b"\n\n")
                seen += whole
                if joined.startswith(b"data: "):
                    seen.append(joined)
                    joined = b""
        heard = [event for event in seen if event.strip() and not event.startswith(b":")]
        assert heard[0].startswith(b'data: {"')
        assert (heard[-1] == b"data: [DONE]") is is_answered


async def test_an_answer_in_one_piece_is_not_begun_before_it_is_there(start: Starter) -> None:
    engine = Held(answer(b'{"usage":{"prompt_tokens":1,"completion_tokens":1}}'))
    async with held(start, engine) as live:
        async with live.post("/v1/chat/completions", chat(stream=True)) as streamed:
            whole = asyncio.ensure_future(live.ask("/v1/chat/completions", chat()))
            vectors = asyncio.ensure_future(live.ask("/v1/embeddings", {"model": MODEL, "input": "x", "stream": True}))
            await comments(streamed, 3)
            engine.may.set()
            assert (await whole).json["usage"]["prompt_tokens"] == 1
            assert (await vectors).headers["content-type"] == "application/json"
            [error] = events(await streamed.read())
            assert (error["error"]["code"], "in one piece" in error["error"]["message"]) == ("backend_failed", True)
        await until(live.holds_nothing)


@pytest.mark.parametrize("path", PATHS)
async def test_a_refusal_after_comments_is_an_event_and_costs_nothing(start: Starter, path: str) -> None:
    async with queued(start, queue_wait_s_max=3 * COMMENT_S) as live:
        got = await live.ask(path, {**ASKED[path], "stream": True})
        assert (got.status, b": waiting" in got.body) == (200, True)
        [event] = events(got.body)
        if path == "/v1/messages":
            assert event["type"] == "error"
            assert event["error"]["type"] == "overloaded_error"
            assert "queue_timeout" in event["error"]["message"]
        else:
            assert event["error"]["code"] == "queue_timeout"
        if path == "/v1/responses":
            assert (event["type"], event["code"]) == ("error", "queue_timeout")
        assert got.headers["x-request-id"]
        [line] = await live.lines(1)
        assert (line["outcome"], line["reason"]) == ("refused", "queue_timeout")
        assert (line["tokens_in"], line["tokens_out"], line["tries"]) == (0, 0, 0)
        assert live.engine.queued == 0


async def test_the_official_clients_raise_a_refusal_after_comments(start: Starter) -> None:
    import anthropic  # takes two seconds, which are spared where this test does not run

    async with queued(start, queue_wait_s_max=2 * COMMENT_S) as live:
        openais = openai.AsyncOpenAI(base_url=live.url + "/v1", api_key="k", max_retries=0)
        anthropics = anthropic.AsyncAnthropic(base_url=live.url, api_key="k", max_retries=0)
        async with openais as api, anthropics as other:
            with pytest.raises(openai.APIError, match="no engine could take") as refused:
                await _read(await api.chat.completions.create(model=MODEL, messages=HELLO, stream=True))
            assert refused.value.code == "queue_timeout"
            with pytest.raises(openai.APIError, match="no engine could take") as refused:
                await _read(await api.responses.create(model=MODEL, input="Hello", stream=True))
            assert refused.value.code == "queue_timeout"
            with pytest.raises(anthropic.APIStatusError, match="queue_timeout"):
                await _read(await other.messages.create(model=MODEL, messages=HELLO, max_tokens=9, stream=True))


async def _read(stream: Any) -> None:
    async for _ in stream:
        pass


WRONG = b'{"error":{"message":"no such tool","type":"BadRequestError","param":"tools","code":400}}'
AFTERWARDS: dict[str, tuple[list[bytes], str, dict[str, Any]]] = {
    "another try": ([REFUSED, REFUSED, STREAM], "", {"outcome": "completed", "tries": 3}),
    "what is wrong": ([answer(WRONG, status=b"400 Bad Request")], "no such tool", {"reason": "status_400"}),
    "a break": ([CUT], "the engine broke off", {"outcome": "failed", "reason": "backend_failed"}),
}


@pytest.mark.parametrize("name", AFTERWARDS)
async def test_after_comments_it_goes_on_or_the_error_is_an_event(start: Starter, name: str) -> None:
    answers, message, logged = AFTERWARDS[name]
    engine = Held(*answers)
    async with held(start, engine) as live:
        async with live.post("/v1/chat/completions", chat(stream=True)) as response:
            await comments(response, 2)
            engine.may.set()
            last = events(await response.read())[-1]
        assert message in last["error"]["message"] if message else last == "[DONE]"
        [line] = await live.lines(1)
        assert line.items() >= logged.items()


async def test_who_leaves_after_comments_leaves_nothing_and_a_gateway_that_stops_says_so(start: Starter) -> None:
    async with queued(start) as live:
        async with live.post("/v1/chat/completions", chat(stream=True)) as response:
            await comments(response, 2)
            assert live.engine.queued == 1
            response.close()
        [line] = await live.lines(1)
        assert (line["outcome"], line["reason"]) == ("abandoned", "client_disconnected")
        assert live.engine.queued == 0
        async with live.post("/v1/chat/completions", chat(stream=True)) as response:
            await comments(response, 1)
            for exchange in live.gateway.pools[0].dispatcher.exchanges():
                exchange.give_up(ApiError(Reason.DRAINING, "this gateway stops"))  # type: ignore[attr-defined]
            said = await response.read()
            assert events(said)[-1]["error"]["code"] == "draining"
            assert b"[DONE]" not in said
