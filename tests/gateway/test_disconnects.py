"""A client that goes away takes nothing with it and leaves nothing behind."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from tests.gateway.capture import STREAM_HEAD, Peer, Seen, Upstream
from tests.gateway.live import MODEL, Starter, chat, long_chat, simulated, until


async def test_while_it_streams_its_engine_is_told_and_no_other_stream_ends(start: Starter) -> None:
    async with simulated() as sim, start(sim.url) as live:
        async with live.post("/v1/chat/completions", long_chat(), key="other") as other:
            async with live.post("/v1/chat/completions", long_chat()) as response:
                for _ in range(20):
                    await response.content.readuntil(b"\n\n")
                assert sim.server.gauges.running == 2
            await until(lambda: sim.server.gauges.running == 1)
            [line] = await live.lines(1)
            await other.content.readuntil(b"\n\n")
            assert (live.engine.dispatched, sim.server.gauges.running) == (1, 1)
        await until(sim.is_idle)
        await until(live.holds_nothing)
        assert (line["outcome"], line["reason"]) == ("abandoned", "client_disconnected")
        assert 15 <= line["tokens_out"] < 2000
        assert {(each.prompt, each.output) for each in live.charged.values()} >= {
            (line["tokens_in"], line["tokens_out"])
        }
        metrics = await live.metrics()
        assert metrics["fairgate_tokens_total", "output", MODEL, "pool", line["tenant"]] == line["tokens_out"]


@pytest.mark.parametrize(
    ("path", "body", "begun"),
    [
        pytest.param("/v1/chat/completions", chat(), b"", id="chat"),
        pytest.param("/v1/responses", {"model": MODEL, "input": "x"}, b"", id="responses"),
        pytest.param("/v1/messages", {"model": MODEL, "max_tokens": 40, "messages": []}, b"", id="messages"),
        pytest.param("/v1/chat/completions", chat(stream=True), STREAM_HEAD, id="a stream without a token"),
        pytest.param("/tokenize", chat(), b"", id="beside the queue"),
        pytest.param("/v1/responses/r1/cancel", chat(), b"", id="to the engine of an earlier answer"),
    ],
)
async def test_before_anything_has_come_it_pays_for_the_prompt_that_an_engine_has_read(
    start: Starter, path: str, body: Any, begun: bytes
) -> None:
    gone = asyncio.Event()

    async def script(seen: Seen, peer: Peer) -> None:
        await peer.send(begun)
        await peer.gone()
        gone.set()

    async with Upstream(script) as upstream, start(upstream.url) as live:
        live.has_response()
        task = asyncio.ensure_future(live.ask(path, body))
        await until(lambda: upstream.requests)
        task.cancel()
        await until(gone.is_set)
        await until(live.holds_nothing)
        [line] = await live.lines(1)
        assert line["outcome"] == "abandoned"
        is_admitted = line["policy"] != ""
        assert (line["tokens_in"] > 0, line["tokens_out"]) == (is_admitted, 0)


async def test_while_it_is_queued(start: Starter) -> None:
    async def script(seen: Seen, peer: Peer) -> None:
        await peer.gone()

    async with Upstream(script) as upstream, start(upstream.url) as live:
        holder = asyncio.ensure_future(live.ask("/v1/chat/completions", chat(n=128), key="holder"))
        await until(lambda: live.engine.dispatched == 1)
        waiting = [asyncio.ensure_future(live.ask("/v1/chat/completions", chat("queued"), key="q")) for _ in range(5)]
        await until(lambda: live.engine.queued == 5)
        for left, task in zip(range(4, -1, -1), waiting, strict=True):
            task.cancel()
            await until(lambda left=left: live.engine.queued == left)  # type: ignore[misc]
        assert live.engine.queued_bytes == 0
        assert len(upstream.requests) == 1
        assert len(live.charged) == 1
        holder.cancel()
        await until(live.holds_nothing)
        lines = await live.lines(6)
        assert [line["outcome"] for line in lines] == ["abandoned"] * 6
        assert [line["tokens_in"] + line["tokens_out"] + line["tries"] for line in lines[:5]] == [0] * 5


async def test_a_stream_of_disconnects_leaks_nothing(start: Starter) -> None:
    async with simulated() as sim, start(sim.url) as live:

        async def visit(number: int) -> None:
            body = long_chat("x" * number) if number % 2 else chat("y" * number, max_tokens=2000, ignore_eos=True)
            async with asyncio.timeout(0.001 * (number % 40)):
                await live.ask("/v1/chat/completions", body, key=f"t{number % 5}")

        outcomes = await asyncio.gather(*(visit(number) for number in range(200)), return_exceptions=True)
        assert all(isinstance(outcome, TimeoutError) for outcome in outcomes)
        await until(live.holds_nothing)
        await until(sim.is_idle)
        got = await live.ask("/v1/chat/completions", chat(max_tokens=3))
        assert got.status == 200
