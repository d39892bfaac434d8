"""A request that waits is told how long, and may say how long it is willing to wait."""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest

from tests.gateway.capture import DONE, STREAM_END, STREAM_HEAD, Peer, Seen, Upstream, answer, chunk, token
from tests.gateway.live import Answer, Live, Starter, chat, until

PATH = "/v1/chat/completions"
EXPECTED, WILLING = "x-fairgate-expected-wait-s", "x-fairgate-wait-s-max"
OK = answer(b'{"usage":{"prompt_tokens":7,"completion_tokens":2}}')
STREAM = STREAM_HEAD + chunk(token("a")) + chunk(DONE) + STREAM_END


class Full:
    """A gateway whose engine is kept busy until `release`, and before which some requests wait."""

    def __init__(self, live: Live) -> None:
        self.live = live
        self.release = asyncio.Event()
        self.asked: list[asyncio.Task[Answer]] = []

    async def answers(self, seen: Seen, peer: Peer) -> None:
        await self.release.wait()
        await peer.send(STREAM if seen.json.get("stream") else OK)

    async def wait(self, count: int, **fields: Any) -> list[asyncio.Task[Answer]]:
        queued = self.live.engine.queued
        tasks = [asyncio.ensure_future(self.live.ask(PATH, chat(max_tokens=5, **fields))) for _ in range(count)]
        self.asked += tasks
        await until(lambda: self.live.engine.queued == queued + count)
        return tasks


@asynccontextmanager
async def full(start: Starter, **limits: Any) -> AsyncIterator[Full]:
    engine: list[Full] = []

    async def script(seen: Seen, peer: Peer) -> None:
        await engine[0].answers(seen, peer)

    async with Upstream(script) as upstream, start(upstream.url, limits=limits) as live:
        engine.append(Full(live))
        holder = asyncio.ensure_future(live.ask(PATH, chat(n=128, max_tokens=1), key="holder"))
        await until(lambda: live.engine.dispatched)
        try:
            yield engine[0]
        finally:
            engine[0].release.set()
        await asyncio.gather(holder, *engine[0].asked)


async def test_an_answer_that_waited_says_what_was_expected_and_one_at_once_says_nothing(start: Starter) -> None:
    async with full(start) as one:
        tasks = await one.wait(5)
        one.release.set()
        waits = sorted([float((await task).headers[EXPECTED]) for task in tasks])
        assert 0 < waits[0] < waits[-1]
        assert EXPECTED not in (await one.live.ask(PATH, chat(max_tokens=5))).headers


@pytest.mark.parametrize("willing", ["0", "0.001"])
async def test_who_is_not_willing_to_wait_so_long_is_refused_at_once(start: Starter, willing: str) -> None:
    async with full(start) as one:
        await one.wait(5)
        refused = await one.live.ask(PATH, chat(max_tokens=5), **{WILLING: willing})
        assert (refused.status, refused.error["code"]) == (429, "wait_too_long")
        assert refused.headers["x-should-retry"] == "false"
        told_s = float(refused.headers[EXPECTED])
        assert int(refused.headers["retry-after"]) - 1 <= told_s <= int(refused.headers["retry-after"])
        assert one.live.engine.queued == 5
        [line] = [line for line in await one.live.lines(1) if line["reason"] == "wait_too_long"]
        assert line["outcome"] == "refused"


async def test_who_is_willing_waits_and_who_need_not_wait_is_not_asked(start: Starter) -> None:
    async with full(start) as one:
        task = asyncio.ensure_future(one.live.ask(PATH, chat(max_tokens=5), **{WILLING: "500"}))
        await until(lambda: one.live.engine.queued == 1)
        one.release.set()
        assert (await task).status == 200
        await until(lambda: not one.live.engine.dispatched)
        assert (await one.live.ask(PATH, chat(max_tokens=5), **{WILLING: "0"})).status == 200


async def test_what_is_no_number_of_seconds_is_an_error(start: Starter) -> None:
    async with Upstream(lambda seen, peer: peer.send(OK)) as upstream, start(upstream.url) as live:
        for willing in ("", "-1", "1e3", "nan", "inf", "soon", "1.", ".5", "9999999999", "1,5", "٣"):
            got = await live.ask(PATH, chat(max_tokens=5), **{WILLING: willing})
            assert (got.status, got.error["code"], got.error["param"]) == (400, "invalid_request", WILLING), willing


async def test_a_refusal_for_a_full_queue_says_when_it_would_be_served(start: Starter) -> None:
    async with full(start, queue_requests_max=5) as one:
        await one.wait(5)
        refused = await one.live.ask(PATH, chat(max_tokens=5))
        assert (refused.status, refused.error["code"]) == (429, "queue_full")
        assert int(refused.headers["retry-after"]) - 1 <= float(refused.headers[EXPECTED])


async def test_a_stream_that_waits_says_about_how_long_and_behind_how_many(start: Starter) -> None:
    async with full(start, waiting_comment_s=0.1) as one:
        await one.wait(3)
        async with one.live.post(PATH, chat(max_tokens=5, stream=True)) as response:
            assert float(response.headers[EXPECTED]) > 0
            comment = (await response.content.readuntil(b"\n\n")).decode()
            assert re.fullmatch(r": waiting, between \d+ seconds? and \d+ seconds?, behind 3 requests\n\n", comment)
            one.release.set()
            assert b"[DONE]" in await response.read()


async def test_operators_see_what_was_expected_and_how_often_that_was_true(start: Starter) -> None:
    async with full(start) as one:
        await one.wait(3)
        [pool] = (await one.live.get("/state", admin=True)).json["pools"]
        waits = [each["expected_wait_s"] for each in pool["requests"]]
        assert waits == sorted(waits)
        assert waits[0] > 0
        assert pool["expected_waits"] == {"right": 0, "longer": 0, "shorter": 0}
        explained = (await one.live.get(f"/explain/{pool['requests'][0]['request_id']}", admin=True)).json
        assert explained["expected_wait_s"] == waits[0]
        assert explained["numbers"]["expected_wait_s"] > 0
        assert "it was told " in explained["sentence"]
        metrics = await one.live.metrics()
        assert metrics["fairgate_expected_waits_total", "right", "pool"] == 0
