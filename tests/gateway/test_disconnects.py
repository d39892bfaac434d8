"""A client that goes away takes nothing with it, and one that reads slowly stops its own answer and nobody else's."""

from __future__ import annotations

import asyncio
import json
import socket
import ssl
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from itertools import pairwise
from typing import Any, NamedTuple

import pytest

from tests.certificates import Authority
from tests.gateway.capture import DONE, STREAM_HEAD, Peer, Seen, Upstream, silent
from tests.gateway.live import MODEL, Live, Starter, chat, events, long_chat, simulated, until
from tests.kit.slow_readers import KERNEL_BYTES, PIECE, Floods, stuck, whole


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
    async with Upstream(silent) as upstream, start(upstream.url) as live:
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


HELD_BYTES_MAX = 65536 + 262144
"""Per stream: the high-water mark, and the one read of the backend that crosses it."""


async def slow_reader(
    live: Live, context: ssl.SSLContext | None = None, **fields: object
) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    """A client with a small receive buffer that has asked for a chat, and reads when it is told to."""
    sock = socket.socket()
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, KERNEL_BYTES)
    sock.connect(("127.0.0.1", live.gateway.port))
    name = None if context is None else "127.0.0.1"
    reader, writer = await asyncio.open_connection(sock=sock, ssl=context, server_hostname=name, limit=KERNEL_BYTES)
    body = json.dumps(chat(**fields)).encode()
    head = b"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer k\r\n"
    head += b"Content-Type: application/json\r\nConnection: close\r\nContent-Length: %d\r\n\r\n" % len(body)
    writer.write(head + body)
    return reader, writer


def held_bytes(live: Live) -> list[int]:
    """What waits in the gateway for each client."""
    return [connection._transport.get_write_buffer_size() for connection in live.server.connections]


class Spoken(NamedTuple):
    """What is spoken to clients: the section of the config, and a context that trusts it; None without TLS."""

    tls: dict[str, str] | None = None
    context: ssl.SSLContext | None = None


@asynccontextmanager
async def flooded(
    start: Starter, engine: Floods, spoken: Spoken, **limits: float
) -> AsyncIterator[tuple[Live, Upstream]]:
    async with Upstream(engine) as upstream:
        limits = {"response_buffer_bytes_max": 65536, **limits}
        async with start(upstream.url, tls=spoken.tls, trusting=spoken.context, limits=limits) as live:
            yield live, upstream


@pytest.fixture(params=["http", "https"])
def spoken(request: pytest.FixtureRequest, authority: Authority) -> Spoken:
    if request.param == "http":
        return Spoken()
    certificate, key = authority.sign("listener")
    return Spoken({"cert_file": certificate, "key_file": key}, authority.client())


@pytest.mark.parametrize("framed", [True, False], ids=["stream", "whole"])
async def test_a_slow_reader_stops_its_own_engine_and_no_other_request_and_loses_nothing(
    start: Starter, spoken: Spoken, framed: bool
) -> None:
    engine = Floods(pieces=2000, framed=framed)
    async with flooded(start, engine, spoken) as (live, _):
        slow, writer = await slow_reader(live, spoken.context, stream=framed)
        [sent] = await stuck(engine, 1)
        assert sent < engine.pieces * len(PIECE)
        for _ in range(5):
            brief = await live.ask("/v1/chat/completions", chat(stream=True, user="brief"))
            assert (brief.status, len(events(brief.body))) == (200, 17)
        assert spoken.tls or 0 < max(held_bytes(live)) <= HELD_BYTES_MAX
        answer = await slow.read()
        assert whole(answer, engine)
        assert not framed or DONE in answer
        writer.transport.abort()


@pytest.mark.parametrize("framed", [True, False], ids=["stream", "whole"])
async def test_a_client_that_reads_nothing_is_cut_and_pays_for_what_was_sent(
    start: Starter, quick_sweep: None, spoken: Spoken, framed: bool
) -> None:
    engine = Floods(pieces=1 << 30, framed=framed)
    async with flooded(start, engine, spoken, client_stall_s=0.2) as (live, upstream):
        _, writer = await slow_reader(live, spoken.context, stream=framed)
        [line] = await live.lines(1)
        assert (line["outcome"], line["reason"]) == ("abandoned", "client_disconnected")
        assert not framed or line["tokens_out"] > 0
        assert live.holds_nothing()
        await until(lambda: engine.gone == 1)  # the engine is told by a closed connection
        assert len(upstream.requests) == 1
        writer.transport.abort()


async def test_a_client_that_reads_a_little_now_and_then_is_not_cut(start: Starter, quick_sweep: None) -> None:
    stall_s, late_s, taken = 0.3, 0.3, b""
    while late_s >= stall_s:  # the machine was, so the client stalled
        engine = Floods(pieces=1000, framed=True)
        async with flooded(start, engine, Spoken(), client_stall_s=stall_s) as (live, _):
            (slow, writer), clock = await slow_reader(live, stream=True), asyncio.get_running_loop().time
            read_s = [clock()]
            await stuck(engine, 1)
            taken = b""
            while read_s[-1] < read_s[0] + 2 * stall_s:
                taken += await slow.read(1 << 18)
                await asyncio.sleep(0.05)
                read_s.append(clock())
            taken += await slow.read()
            writer.transport.abort()
        late_s = max(after - before for before, after in pairwise(read_s))
    assert whole(taken, engine)
