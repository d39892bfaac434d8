"""The queue has bounds that a flood meets alone, and whoever waits is told how long, and may say how long it will."""

from __future__ import annotations

import asyncio
import os
import re
import shutil
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from hashlib import sha256
from typing import Any

import aiohttp
import openai
import pytest

from bench.stack import nginx
from gateway.config.sections.keys import open_name
from gateway.http.errors import ApiError, Reason
from tests.gateway.capture import OK, STREAM, Upstream, answer
from tests.gateway.live import CHAT, MODEL, Answer, Live, Starter, chat, events, until
from tests.gateway.playbook import ASKED
from tests.kit.busy import busy
from tests.kit.held import CUT, Held
from tests.ports import free_port


async def test_the_flood_is_told_to_slow_down_and_the_steady_tenant_gets_in(start: Starter) -> None:
    async with busy(start, limits={"queue_requests_max": 6}) as gate:
        flood = [task for _ in range(6) for task in await gate.fill(1, "flood")]  # one after the other
        refused = await gate.ask("flood")
        assert (refused.status, refused.error["code"]) == (429, "queue_full")
        assert refused.error["type"] == "rate_limit_error"
        assert 1 <= int(refused.headers["retry-after"]) <= 60
        tenant = open_name(sha256(b"flood").digest())
        metrics = await gate.live.metrics()
        assert metrics["fairgate_queued_requests", "pool", tenant] == 6
        assert metrics["fairgate_queued_bytes", "pool"] == gate.live.engine.queued_bytes > 0
        assert metrics["fairgate_not_completed_total", "refused", "pool", "queue_full", tenant] == 1
        steady = gate.ask("steady", "steady")
        [given_up], _ = await asyncio.wait(flood, return_when=asyncio.FIRST_COMPLETED)
        assert given_up is flood[-1]
        assert given_up.result().status == 429
        assert gate.live.engine.queued == 6
        gate.release.set()
        assert (await steady).status == 200
        assert [task.result().status for task in await _all(flood)] == [200] * 5 + [429]
        order = [seen.json["messages"][0]["content"] for seen in gate.engine.requests]
        assert order[1:3].count("steady") == 1


async def _all(tasks: list[asyncio.Task[Answer]]) -> list[asyncio.Task[Answer]]:
    await asyncio.wait(tasks)
    return tasks


async def test_who_waits_too_long_is_told_when_to_come_back(start: Starter) -> None:
    async with busy(start, limits={"queue_wait_s_max": 0.2}) as gate:
        got = await gate.ask("k")
        assert (got.status, got.error["code"]) == (503, "queue_timeout")
        assert int(got.headers["retry-after"]) >= 1
        [line] = await gate.live.lines(1)
        assert (line["outcome"], line["reason"], line["tries"]) == ("refused", "queue_timeout", 0)
        assert line["queue_ms"] >= 200
        assert (line["tokens_in"], line["tokens_out"], line["backend"]) == (0, 0, "")


EXPECTED, WILLING = "x-fairgate-expected-wait-s", "x-fairgate-wait-s-max"


async def test_what_is_expected_is_told_and_refused_to_who_is_not_willing_to_wait_so_long(start: Starter) -> None:
    """Operators see it, and how often it was true; an answer that did not wait says nothing of it."""
    async with busy(start) as one:
        tasks = await one.fill(5)
        for number, willing in enumerate(("0", "0.001"), 1):
            refused = await one.ask(said={WILLING: willing})
            assert (refused.status, refused.error["code"]) == (429, "wait_too_long")
            assert refused.headers["x-should-retry"] == "false"
            told_s = float(refused.headers[EXPECTED])
            assert int(refused.headers["retry-after"]) - 1 <= told_s <= int(refused.headers["retry-after"])
            assert one.live.engine.queued == 5
            line = (await one.live.lines(number))[-1]
            assert (line["outcome"], line["reason"]) == ("refused", "wait_too_long")
        [pool] = (await one.live.get("/state", admin=True)).json["pools"]
        waits = [each["expected_wait_s"] for each in pool["requests"]]
        assert waits == sorted(waits)
        assert waits[0] > 0
        explained = (await one.live.get(f"/explain/{pool['requests'][0]['request_id']}", admin=True)).json
        assert explained["expected_wait_s"] == waits[0]
        assert explained["numbers"]["expected_wait_s"] > 0
        assert "it was told " in explained["sentence"]
        assert (await one.live.metrics())["fairgate_expected_waits_total", "right", "pool"] == 0
        one.release.set()
        waits = sorted([float((await task).headers[EXPECTED]) for task in tasks])
        assert 0 < waits[0] < waits[-1]
        assert EXPECTED not in (await one.ask()).headers


async def test_what_is_no_number_of_seconds_is_an_error(start: Starter) -> None:
    async with Upstream(lambda seen, peer: peer.send(OK)) as upstream, start(upstream.url) as live:
        for willing in ("", "-1", "1e3", "nan", "inf", "soon", "1.", ".5", "9999999999", "1,5", "٣"):
            got = await live.ask(CHAT, chat(max_tokens=5), **{WILLING: willing})
            assert (got.status, got.error["code"], got.error["param"]) == (400, "invalid_request", WILLING), willing


async def test_a_stream_that_waits_says_about_how_long_and_behind_how_many(start: Starter) -> None:
    async with busy(start, limits={"waiting_comment_s": 0.1}) as one:
        await one.fill(3)
        async with one.live.post(CHAT, chat(max_tokens=5, stream=True)) as response:
            assert float(response.headers[EXPECTED]) > 0
            comment = (await response.content.readuntil(b"\n\n")).decode()
            assert re.fullmatch(r": waiting, between \d+ seconds? and \d+ seconds?, behind 3 requests\n\n", comment)
            one.release.set()
            assert b"[DONE]" in await response.read()


COMMENT_S = 0.1
HELLO: Any = [{"role": "user", "content": "Hello"}]
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
                exchange.stop(ApiError(Reason.DRAINING, "this gateway stops"))  # type: ignore[attr-defined]
            said = await response.read()
            assert events(said)[-1]["error"]["code"] == "draining"
            assert b"[DONE]" not in said
