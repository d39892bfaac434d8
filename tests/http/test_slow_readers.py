"""A client that reads slowly, or nothing, holds a bounded part of its answer, and in the end nothing."""

from __future__ import annotations

import asyncio
import socket

from gateway.http.server_limits import ServerLimits
from tests.http.http_raw import GET, GET_CLOSE, serving, until, wait
from tests.waiting import WAIT_S


async def test_a_client_that_does_not_read_pauses_the_writer() -> None:
    async with serving(wait, ServerLimits(write_buffer_bytes=10000)) as served:
        sock = served.client_that_sends(GET)
        responder = await served.responder()
        events: list[str] = []
        responder.on_pause = lambda: events.append("pause")
        responder.on_resume = lambda: events.append("resume")
        responder.start(200, [])
        sent = 0
        while not events:
            responder.write(b"x" * 5000)
            sent += 5000
            await asyncio.sleep(0)
        assert events == ["pause"]
        assert 10000 < served.server.state.answers_bytes < 20000
        loop = asyncio.get_running_loop()
        received = b""
        while "resume" not in events:
            received += await loop.sock_recv(sock, 1 << 20)
        responder.end()
        while not received.endswith(b"\r\n0\r\n\r\n"):
            received += await loop.sock_recv(sock, 1 << 20)
        assert received.count(b"x") == sent


async def test_the_next_request_waits_until_the_last_answer_is_taken() -> None:
    async with serving(wait) as served:
        sock = served.client_that_sends(GET + GET)
        body = b"x" * 10_000_000
        (await served.responder()).respond(200, [], body)
        for _ in range(50):
            await asyncio.sleep(0)
        assert len(served.requests) == 1
        loop = asyncio.get_running_loop()
        taken = 0
        while taken < len(body):
            taken += len(await loop.sock_recv(sock, 1 << 20))
        (await served.responder(1)).respond(200, [], b"")


async def test_pipelining_without_reading_does_not_pile_up_answers() -> None:
    body = b"x" * 5_000_000
    async with serving(lambda request, responder: responder.respond(200, [], body)) as served:
        sock = served.client_that_sends(GET * 20)
        await until(lambda: len(served.requests) > 0)
        for _ in range(50):
            await asyncio.sleep(0)
        assert len(served.requests) < 3
        loop = asyncio.get_running_loop()
        taken = 0
        while taken < 20 * len(body):
            taken += len(await loop.sock_recv(sock, 1 << 20))
        assert len(served.requests) == 20


async def test_nothing_is_kept_for_a_client_that_half_closes_and_reads_nothing() -> None:
    async with serving(wait) as served:
        sock = served.client_that_sends(GET)
        responder = await served.responder()
        responder.start(200, [], first=b"x" * 20_000_000)
        sock.shutdown(socket.SHUT_WR)
        await until(lambda: len(served.server.state.connections) == 0)


async def test_a_large_last_answer_reaches_a_slow_reader_whole(quick_sweep: None) -> None:
    body = b"x" * 10_000_000
    limits = ServerLimits(linger_s=0.05, client_stall_s=WAIT_S)
    async with serving(lambda request, responder: responder.respond(200, [], body), limits) as served:
        reader, writer = await asyncio.open_connection("127.0.0.1", served.port, limit=1000)
        writer.write(GET_CLOSE)
        received = 0
        while piece := await reader.read(200_000):
            received += len(piece)
            await asyncio.sleep(0.002)
        assert received > len(body)
        writer.close()
