"""An engine that fails or refuses: tried elsewhere while nothing was seen of an answer, a visible error afterwards."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest

from tests.gateway.capture import OK, Peer, Script, Seen, Upstream, answer, replies
from tests.gateway.live import MODEL, Answer, Live, Simulated, Starter, chat, simulated, until
from tests.gateway.playbook import ASKED, STREAMED
from tests.kit.together import together

FIFTY = {"max_tokens": 50, "max_output_tokens": 50, "ignore_eos": True}
BY_LOAD = {"name": "fairserve", "placement": "least_loaded"}


@asynccontextmanager
async def two_engines(start: Starter) -> AsyncIterator[tuple[Live, Simulated]]:
    """Two engines of one pool, of which `a`, the other value, is asked where both are idle: it comes first by name."""
    async with simulated(time_scale=0) as first, simulated(time_scale=0) as second:
        backends = [{"url": first.url, "name": "a"}, {"url": second.url, "name": "b"}]
        async with start(policy=BY_LOAD, pools=[{"name": "pool", "backends": backends}]) as live:
            yield live, first


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("fault", ["refuses the connection", "resets it before the first byte"])
async def test_an_engine_that_has_said_nothing_is_replaced_by_another(start: Starter, fault: str, stream: bool) -> None:
    async with two_engines(start) as (live, fails):
        if fault == "refuses the connection":
            await fails.server.stop()
        else:
            fails.faults.reset_next = 1
        got = await live.ask("/v1/chat/completions", chat(stream=stream, max_tokens=3))
        assert (got.status, fails.faults.reset_next) == (200, 0)
        [line] = await live.lines(1)
        assert (line["tries"], line["outcome"], line["backend"]) == (2, "completed", "b")


UNQUEUED: dict[str, Any] = {
    "/tokenize": {"model": MODEL, "prompt": "x" * 400_000},
    "/detokenize": {"model": MODEL, "tokens": [1]},
    "/v1/messages/count_tokens": {"model": MODEL, "messages": []},
    "/v1/videos": {"a": 1},
}


async def test_beside_the_queue_a_refused_connection_is_tried_elsewhere(start: Starter) -> None:
    routes = [{"path": "/v1/videos", "treatment": "pass"}]
    async with (
        simulated() as one,
        simulated() as two,
        Upstream(replies(answer(b'{"count":3}'))) as well,
        start(one.url, two.url, well.url, routes=routes) as live,
    ):
        await asyncio.gather(one.server.stop(), two.server.stop())
        paths = (*UNQUEUED, "/version", *UNQUEUED)
        for path in paths:
            assert (await ask_beside(live, path)).body == b'{"count":3}', path
        assert {line["backend"] for line in await live.lines(len(paths))} == {well.url.removeprefix("http://")}
        assert [json.loads(seen.unsalted or b"null") for seen in well.requests] == [
            UNQUEUED.get(path) for path in paths
        ]


async def ask_beside(live: Live, path: str) -> Answer:
    return await (live.ask(path, UNQUEUED[path]) if path in UNQUEUED else live.get(path))


@pytest.mark.parametrize("path", ["/tokenize", "/version"])
async def test_beside_the_queue_each_engine_is_tried_once(start: Starter, path: str) -> None:
    async with simulated() as one, simulated() as two, start(one.url, two.url) as live:
        await asyncio.gather(one.server.stop(), two.server.stop())
        got = await ask_beside(live, path)
        assert (got.status, got.error["code"]) == (503, "no_backend")
        assert [line["tries"] for line in await live.lines(1)] == [2]


async def dies(seen: Seen, peer: Peer) -> None:
    peer.reset()


async def silent(seen: Seen, peer: Peer) -> None:
    await peer.gone()


@pytest.mark.parametrize(
    ("path", "script", "status"), [("/tokenize", dies, 502), ("/v1/chat/completions", silent, 504)]
)
async def test_what_an_engine_may_be_at_work_on_is_sent_to_no_other(
    start: Starter, path: str, script: Script, status: int
) -> None:
    limits = {"upstream_silence_s": 0.1}
    async with Upstream(script) as one, Upstream(script) as two, start(one.url, two.url, limits=limits) as live:
        assert (await live.ask(path, ASKED[path])).status == status
        assert len(one.requests) + len(two.requests) == 1


@pytest.mark.parametrize("attempts_max", [1, 3])
async def test_attempts_to_reach_an_engine_are_bounded(start: Starter, attempts_max: int) -> None:
    async with simulated() as sim, start(sim.url, limits={"attempts_max": attempts_max}) as live:
        await sim.server.stop()
        got = await live.ask("/v1/chat/completions", chat())
        assert (got.status, got.error["code"]) == (503, "no_backend")
        # The third failure in a row puts the engine out of service, for two probes at least.
        again_ms = 1000 if attempts_max == 1 else 4000
        assert again_ms <= int(got.headers["retry-after-ms"]) <= 1.1 * again_ms
        [line] = await live.lines(1)
        assert (line["tries"], line["tokens_in"], line["tokens_out"]) == (attempts_max, 0, 0)


@pytest.mark.parametrize("fault", ["refuse_next", "refuse_in_stream_next"])
@pytest.mark.parametrize("stream", [False, True])
async def test_a_refusal_is_waited_out_and_costs_nothing(start: Starter, fault: str, stream: bool) -> None:
    async with simulated(time_scale=0) as sim, start(sim.url) as live:
        setattr(sim.faults, fault, 2)
        got = await live.ask("/v1/chat/completions", chat(stream=stream, max_tokens=5, ignore_eos=True))
        assert got.status == 200
        assert b'"error"' not in got.body
        [line] = await live.lines(1)
        assert (line["outcome"], line["tries"], line["tokens_out"]) == ("completed", 3, 5)
        metrics = await live.metrics()
        assert metrics["fairgate_tokens_total", "output", MODEL, "pool", line["tenant"]] == 5
        assert [charged.output for charged in live.charged.values()] == [5]


async def test_a_refusal_that_lasts_ends_with_the_waiting_time(start: Starter) -> None:
    async with simulated() as sim, start(sim.url, limits={"queue_wait_s_max": 0.3}) as live:
        sim.faults.refuse_next = 1000
        got = await live.ask("/v1/chat/completions", chat())
        assert (got.status, got.error["code"]) == (503, "queue_timeout")
        assert sim.faults.refuse_next > 990  # it is left alone for longer each time
        assert live.holds_nothing()
        assert all((charged.prompt, charged.output) == (0, 0) for charged in live.charged.values())


class Busy:
    """An engine that refuses what says so, and answers the rest."""

    def __init__(self, status: bytes, again: bytes) -> None:
        self.refusal = answer(b"{}", b"Retry-After: " + again, status=status)
        self.refused = 0

    async def __call__(self, seen: Seen, peer: Peer) -> None:
        is_refused = b"busy" in seen.body
        self.refused += is_refused
        await peer.send(self.refusal if is_refused else OK)


@pytest.mark.parametrize(
    ("count", "status"), [(1, b"429 Too Many Requests"), (2, b"503 Service Unavailable")], ids=["429", "503 of two"]
)
async def test_an_engine_that_says_when_is_not_asked_before_and_its_time_is_told(
    start: Starter, count: int, status: bytes
) -> None:
    engines = [Busy(status, b"700") for _ in range(count)]
    async with together(map(Upstream, engines)) as upstreams, start(*[each.url for each in upstreams]) as live:
        asked = asyncio.ensure_future(live.ask("/v1/chat/completions", chat("busy"), key="a"))
        others = [await live.ask("/v1/chat/completions", chat(), key="b") for _ in range(20)]
        assert {each.status for each in others} == {200}
        got = await asked
        assert (got.status, got.error["code"]) == (503, "server_busy")
        assert 690 <= int(got.headers["retry-after"]) <= 800
        assert [engine.refused for engine in engines] == [1] * count


async def test_a_time_that_can_be_waited_for_is_waited_for_and_holds_up_nobody(start: Starter) -> None:
    engine = Busy(b"429 Too Many Requests", b"1.5")
    async with Upstream(engine) as upstream, start(upstream.url) as live:
        asked = asyncio.ensure_future(live.ask("/v1/chat/completions", chat("busy"), key="a"))
        await until(lambda: live.engine.requests.resting)
        for _ in range(20):
            assert (await live.ask("/v1/chat/completions", chat(), key="b")).status == 200
        assert (engine.refused, live.engine.queued) == (1, 1)
        engine.refusal = OK
        assert (await asked).status == 200
        assert [line["tries"] for line in await live.lines(21)] == [1] * 20 + [2]


async def test_who_leaves_while_its_request_rests_takes_it_along(start: Starter) -> None:
    async with Upstream(Busy(b"429 Too Many Requests", b"60")) as upstream, start(upstream.url) as live:
        asked = asyncio.ensure_future(live.ask("/v1/chat/completions", chat("busy")))
        await until(lambda: live.engine.requests.resting)
        asked.cancel()
        await until(live.holds_nothing)
        assert (await live.ask("/v1/chat/completions", chat())).status == 200


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("path", STREAMED)
async def test_a_draining_engine_s_empty_abort_is_tried_elsewhere(start: Starter, path: str, stream: bool) -> None:
    async with two_engines(start) as (live, drains):
        drains.faults.is_draining = True
        got = await live.ask(path, {**ASKED[path], **FIFTY, "stream": stream})
        assert (got.status, b"abort" in got.body, b"cancelled" in got.body) == (200, False, False)
        [line] = await live.lines(1)
        assert (line["tries"], line["tokens_out"]) == (2, 50)
