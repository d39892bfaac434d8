"""A client that goes away takes nothing with it and leaves nothing behind."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from functools import partial
from typing import Any

import pytest

from backends.client.upstream import UpstreamPool
from backends.upstream_errors import UpstreamError
from tests.gateway.capture import STREAM_HEAD, Peer, Seen, Upstream, chunk, token
from tests.gateway.live import MODEL, Live, Simulated, Starter, chat, long_chat, simulated, until
from tests.waiting import WAIT_S


@contextlib.asynccontextmanager
async def _served(start: Starter, **fields: Any) -> AsyncIterator[tuple[Simulated, Live]]:
    async with simulated() as sim, start(sim.url, **fields) as live:
        yield sim, live


async def test_while_it_streams(start: Starter) -> None:
    async with _served(start) as (sim, live):
        async with live.post("/v1/chat/completions", long_chat()) as response:
            for _ in range(20):
                await response.content.readuntil(b"\n\n")
            assert sim.server.gauges.running == 1
        await until(sim.is_idle)
        await until(live.holds_nothing)
        [line] = await live.lines(1)
        assert (line["outcome"], line["reason"]) == ("abandoned", "client_disconnected")
        assert 15 <= line["tokens_out"] < 2000
        [charged] = live.charged.values()
        assert (charged.prompt, charged.output) == (line["tokens_in"], line["tokens_out"])
        metrics = await live.metrics()
        assert metrics["fairgate_tokens_total", "output", MODEL, "pool", line["tenant"]] == line["tokens_out"]


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/chat/completions", chat(max_tokens=4000, ignore_eos=True)),
        ("/v1/responses", {"model": MODEL, "input": "x", "max_output_tokens": 4000, "ignore_eos": True}),
        ("/v1/messages", {"model": MODEL, "max_tokens": 4000, "ignore_eos": True, "messages": []}),
    ],
    ids=["chat", "responses", "messages"],
)
async def test_while_it_waits_for_a_whole_answer(start: Starter, path: str, body: Any) -> None:
    async with _served(start) as (sim, live):
        task = asyncio.ensure_future(live.ask(path, body))
        await until(lambda: sim.server.gauges.running == 1)
        task.cancel()
        await until(sim.is_idle)
        await until(live.holds_nothing)
        [line] = await live.lines(1)
        assert line["outcome"] == "abandoned"
        [charged] = live.charged.values()
        assert charged.prompt > 0  # the engine has read the prompt: that much is known
        assert (line["tokens_in"], line["tokens_out"]) == (charged.prompt, charged.output)


class Recorder:
    """A receiver that expects nothing."""

    def head_received(self, status: int, headers: list[tuple[bytes, bytes]]) -> None:
        raise AssertionError("an answer to a request that was given up")

    def body_received(self, data: bytes) -> None:
        raise AssertionError("an answer to a request that was given up")

    def completed(self) -> None:
        raise AssertionError("an answer to a request that was given up")

    def failed(self, error: UpstreamError) -> None:
        raise AssertionError("an answer to a request that was given up")


def _has_queued(live: Live, requests: int) -> bool:
    return live.engine.queued == requests


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
            await until(partial(_has_queued, live, left))
        assert live.engine.queued_bytes == 0
        assert len(upstream.requests) == 1
        assert len(live.charged) == 1
        holder.cancel()
        await until(live.holds_nothing)
        lines = await live.lines(6)
        assert [line["outcome"] for line in lines] == ["abandoned"] * 6
        assert [line["tokens_in"] + line["tokens_out"] + line["tries"] for line in lines[:5]] == [0] * 5


async def test_the_connection_to_the_engine_is_closed_and_no_other_is(start: Starter) -> None:
    gone: list[str] = []

    async def script(seen: Seen, peer: Peer) -> None:
        await peer.send(STREAM_HEAD + chunk(token("a")))
        await peer.gone()
        gone.append(seen.json["user"])

    async with Upstream(script) as upstream, start(upstream.url) as live:
        responses = {
            user: await live.post("/v1/chat/completions", chat(stream=True, user=user)).__aenter__() for user in "ab"
        }
        for response in responses.values():
            await response.content.readuntil(b"\n\n")
        responses["a"].close()
        await until(lambda: gone == ["a"])
        assert live.engine.dispatched == 1
        responses["b"].close()
        await until(lambda: gone == ["a", "b"])
        await until(live.holds_nothing)


async def test_before_the_first_token(start: Starter) -> None:
    gone = asyncio.Event()

    async def script(seen: Seen, peer: Peer) -> None:
        await peer.send(STREAM_HEAD)
        await peer.gone()
        gone.set()

    async with Upstream(script) as upstream, start(upstream.url) as live:
        task = asyncio.ensure_future(live.ask("/v1/chat/completions", chat(stream=True)))
        await until(lambda: upstream.requests)
        task.cancel()
        await until(gone.is_set)
        await until(live.holds_nothing)


@pytest.mark.parametrize("path", ["/tokenize", "/v1/responses/r1/cancel"])
async def test_where_nothing_is_admitted(start: Starter, path: str) -> None:
    gone = asyncio.Event()

    async def script(seen: Seen, peer: Peer) -> None:
        await peer.gone()
        gone.set()

    async with Upstream(script) as upstream, start(upstream.url) as live:
        live.has_response()
        task = asyncio.ensure_future(live.ask(path, chat()))
        await until(lambda: upstream.requests)
        task.cancel()
        await until(gone.is_set)


async def test_while_the_connection_to_the_engine_is_being_made() -> None:
    """The pool must not lose sight of such a connection: closing the pool would wait for it for ever."""

    async def script(seen: Seen, peer: Peer) -> None:
        await peer.gone()

    async with Upstream(script) as upstream:
        pool = UpstreamPool("engine", upstream.url)
        call = pool.send(b"POST /v1/x HTTP/1.1\r\nhost: x\r\ncontent-length: 2\r\n\r\n", b"{}", Recorder())
        while "1 busy" not in repr(pool):  # noqa: ASYNC110 (the very turn of the loop is what matters)
            await asyncio.sleep(0)
        call.cancel()
        async with asyncio.timeout(WAIT_S):
            await pool.close()


async def test_a_stream_of_disconnects_leaks_nothing(start: Starter) -> None:
    async with _served(start) as (sim, live):

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
