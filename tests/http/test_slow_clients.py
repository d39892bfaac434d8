"""Whoever sends too slowly is not waited for, and whoever reads slowly holds a bounded part of its answer."""

from __future__ import annotations

import asyncio
import socket

import pytest

from gateway.http.accounts import ServerLimits
from gateway.http.http_request import HttpRequest
from tests.http.http_raw import (
    CHUNKED,
    GET,
    GET_CLOSE,
    POST,
    account_of,
    dripped,
    read_answer,
    send,
    serving,
    statuses_of,
    wait,
)
from tests.waiting import WAIT_S, until

HEAD = ServerLimits(client_head_s=0.1, client_idle_s=1000, client_body_s=1000, linger_s=1000)
IDLE = ServerLimits(client_idle_s=0.05)
BODY = ServerLimits(client_body_s=0.1, client_body_bytes_per_s=1.0)
RATE = ServerLimits(body_grace_s=0.1, client_body_bytes_per_s=1e6)
LENGTH = POST + b"Content-Length: 1000000\r\n\r\n"
WHOLE = POST + b"Content-Length: 0\r\n\r\n"


@pytest.mark.parametrize(
    ("limits", "first", "drip", "statuses"),
    [
        pytest.param(HEAD, b"", b"", [], id="nothing"),
        pytest.param(HEAD, b"", b"\r\n", [], id="empty lines"),
        pytest.param(HEAD, b"", b"\r", [408], id="bare CR"),
        pytest.param(HEAD, b"", b"G", [408], id="a method"),
        pytest.param(HEAD, b"\r\n\r", b"", [408], id="half a line"),
        pytest.param(HEAD, b"GET / HTTP/1.1\r\nHo", b"", [408], id="half a head"),
        pytest.param(HEAD, b"GET / HTTP/1.1\r\nA: ", b"a", [408], id="a value"),
        pytest.param(HEAD, b"GET / HTTP/1.1\r\nA: ", b"a\r\nA:", [408], id="fields"),
        pytest.param(HEAD, WHOLE, b"GET", [200, 408], id="a second head"),
        pytest.param(HEAD, WHOLE, b"\r\n", [200], id="empty lines after an answer"),
        pytest.param(IDLE, WHOLE, b"", [200], id="nothing after an answer"),
        pytest.param(BODY, LENGTH + b"a", b"", [408], id="the beginning of a body"),
        pytest.param(BODY, LENGTH, b"a", [408], id="a body"),
        pytest.param(BODY, CHUNKED + b"fffff\r\n", b"a", [408], id="a chunk"),
        pytest.param(RATE, LENGTH + b"a", b"", [408], id="the beginning of a body, by its rate"),
        pytest.param(RATE, LENGTH, b"a", [408], id="a body, by its rate"),
        pytest.param(RATE, CHUNKED + b"fffff\r\n", b"a", [408], id="a chunk, by its rate"),
    ],
)
async def test_who_is_too_slow_is_not_waited_for_however_it_sends(
    quick_sweep: None, limits: ServerLimits, first: bytes, drip: bytes, statuses: list[int]
) -> None:
    async with serving(limits=limits, on_head=account_of) as served:
        assert await dripped(served.port, first, drip) == statuses


async def test_whoever_sends_fast_enough_has_the_time(quick_sweep: None) -> None:
    limits = ServerLimits(body_grace_s=0.05, client_body_bytes_per_s=1000.0)
    async with serving(limits=limits) as served:
        reader, writer = await served.connect()
        writer.write(POST + b"Content-Length: 60000\r\n\r\n" + b"x" * 59_999)  # enough for a minute
        began = served.server.now
        await until(lambda: served.server.now > began + 0.2)
        writer.write(b"x")
        assert statuses_of((await read_answer(reader))[0]) == [200]


async def test_whoever_is_not_known_is_not_waited_for_when_it_takes_no_answers() -> None:
    def refuse(request: HttpRequest) -> tuple[int, list[tuple[bytes, bytes]], bytes]:
        return 404, [], b"x" * 1000

    async with serving(on_head=refuse) as served:
        _, writer = await served.connect()
        with pytest.raises(ConnectionError):
            for _ in range(1000):
                writer.write(b"GET / HTTP/1.1\r\nHost: x\r\n\r\n" * 1000)
                await writer.drain()
        await until(lambda: len(served.server.connections) == 0)


async def test_whoever_connects_and_waits_has_less_time_for_a_head(quick_sweep: None) -> None:
    async with serving(limits=ServerLimits(client_head_s=1000)) as served:
        await served.connect()
        await until(lambda: len(served.server.connections) == 1)
        [connection] = served.server.connections
        was, now = connection.deadline, served.server.now
        await until(lambda: served.server.now > now)
        connection.data_received(b"GET / HT")
        assert connection.deadline == was


async def test_a_half_sent_head_of_nobody_is_gone_when_its_time_is_over(quick_sweep: None) -> None:
    async with serving(limits=HEAD, on_head=account_of) as served:
        reader, _ = await served.connect(b"GET / HTTP/1.1\r\nHo")
        assert statuses_of(await reader.read()) == [408]
        await until(lambda: len(served.server.connections) == 0)


async def test_a_client_that_sends_on_after_its_refusal_is_cut(quick_sweep: None) -> None:
    async with serving(limits=ServerLimits(linger_s=0.05)) as served:
        reader, writer = await served.connect(b"nonsense\r\n\r\n")
        assert statuses_of(await reader.read()) == [400]
        with pytest.raises(ConnectionError):
            await send(writer, 10_000_000_000)


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
        assert 10000 < served.server.answers_bytes < 20000
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
        await until(lambda: len(served.server.connections) == 0)


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
