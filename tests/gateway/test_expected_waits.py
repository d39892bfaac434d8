"""A request that waits is told how long, and may say how long it is willing to wait."""

from __future__ import annotations

import re

import pytest

from tests.gateway.capture import Upstream
from tests.gateway.live import CHAT, Starter, chat, until
from tests.kit.busy import OK, busy

EXPECTED, WILLING = "x-fairgate-expected-wait-s", "x-fairgate-wait-s-max"


async def test_an_answer_that_waited_says_what_was_expected_and_one_at_once_says_nothing(start: Starter) -> None:
    async with busy(start) as one:
        tasks = await one.fill(5)
        one.release.set()
        waits = sorted([float((await task).headers[EXPECTED]) for task in tasks])
        assert 0 < waits[0] < waits[-1]
        assert EXPECTED not in (await one.ask()).headers


@pytest.mark.parametrize("willing", ["0", "0.001"])
async def test_who_is_not_willing_to_wait_so_long_is_refused_at_once(start: Starter, willing: str) -> None:
    async with busy(start) as one:
        await one.fill(5)
        refused = await one.ask(said={WILLING: willing})
        assert (refused.status, refused.error["code"]) == (429, "wait_too_long")
        assert refused.headers["x-should-retry"] == "false"
        told_s = float(refused.headers[EXPECTED])
        assert int(refused.headers["retry-after"]) - 1 <= told_s <= int(refused.headers["retry-after"])
        assert one.live.engine.queued == 5
        [line] = [line for line in await one.live.lines(1) if line["reason"] == "wait_too_long"]
        assert line["outcome"] == "refused"


async def test_who_is_willing_waits_and_who_need_not_wait_is_not_asked(start: Starter) -> None:
    async with busy(start) as one:
        task = one.ask(said={WILLING: "500"})
        await until(lambda: one.live.engine.queued == 1)
        one.release.set()
        assert (await task).status == 200
        await until(lambda: not one.live.engine.dispatched)
        assert (await one.ask(said={WILLING: "0"})).status == 200


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


async def test_operators_see_what_was_expected_and_how_often_that_was_true(start: Starter) -> None:
    async with busy(start) as one:
        await one.fill(3)
        [pool] = (await one.live.get("/state", admin=True)).json["pools"]
        waits = [each["expected_wait_s"] for each in pool["requests"]]
        assert waits == sorted(waits)
        assert waits[0] > 0
        explained = (await one.live.get(f"/explain/{pool['requests'][0]['request_id']}", admin=True)).json
        assert explained["expected_wait_s"] == waits[0]
        assert explained["numbers"]["expected_wait_s"] > 0
        assert "it was told " in explained["sentence"]
        metrics = await one.live.metrics()
        assert metrics["fairgate_expected_waits_total", "right", "pool"] == 0
