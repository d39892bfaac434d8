"""No byte behind a doubtful request is ever read as a request, and all that aiohttp refuses is refused."""

from __future__ import annotations

import asyncio
import json
import random
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress

import pytest
from aiohttp import web

from gateway.http.accounts import ServerLimits
from gateway.http.headers import header_of
from gateway.http.http_request import RequestReader
from tests.http.conformance import ASKED
from tests.http.corpus import REFUSED, G, P
from tests.http.http_raw import GET_CLOSE, SMUGGLED, exchange, found, serving, status_of, statuses_of, wire

VALID = {
    "get": b"GET /v1/models?a=b HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n",
    "length": P + b"Connection: close\r\nContent-Length: 11\r\n\r\nhello\r\n\r\nyo",
    "chunked": (
        P + b"Connection: close\r\nTransfer-Encoding: chunked\r\n\r\n"
        b"5;a=b\r\nhello\r\n6\r\n\r\n\r\nyo\r\n0\r\nTrailer: t\r\n\r\n"
    ),
}


@pytest.mark.parametrize("name", REFUSED)
async def test_behind_a_good_request_it_is_refused_and_the_connection_ends(name: str) -> None:
    """`test_conformance.py` sends it first."""
    payload, status = REFUSED[name]
    async with serving() as served:
        answer = await served.exchange(G + b"\r\n" + payload + SMUGGLED)
        assert [request.path for request in served.requests] == ["/version"]
        assert statuses_of(answer) == [200, status]
        head, _, body = answer.rpartition(b"\r\n\r\n")
        assert b"connection: close" in head
        assert set(json.loads(body)["error"]) == {"message", "type", "param", "code"}


async def test_a_trailer_is_no_header_field() -> None:
    async with serving() as served:
        await served.exchange(
            P + b"Connection: close\r\nTransfer-Encoding: chunked\r\n\r\n0\r\nX-Api-Key: other\r\n\r\n"
        )
        assert header_of(served.requests[0].headers, b"x-api-key") == b""


@pytest.mark.parametrize("name", VALID)
async def test_a_request_may_come_byte_by_byte(name: str) -> None:
    async with serving() as served:
        whole = await served.exchange(VALID[name])
        assert status_of(whole) == 200
        reader, writer = await served.connect()
        for byte in VALID[name]:
            writer.write(bytes([byte]))
            await asyncio.sleep(0)
        assert await reader.read() == whole
        first, second = served.requests
        assert wire(first) == wire(second)


def read_without_words(*pieces: bytes) -> list[object]:
    """Return the requests in these bytes and the code of their refusal, whose message may depend on the cuts."""
    return found(RequestReader(ServerLimits(), "peer"), *pieces)[:-1]


def test_the_reader_finds_the_same_however_the_bytes_are_cut() -> None:
    short = [sent for sent, _ in REFUSED.values() if len(sent) < 300]
    valid = [sent.replace(b"Connection: close\r\n", b"") for sent in VALID.values()]
    for payload in (*short, *(case.sent for case in ASKED.values()), *valid):
        stream = payload + SMUGGLED
        whole = read_without_words(stream)
        assert read_without_words(*(bytes([byte]) for byte in stream)) == whole, payload
        for cut in range(1, len(stream)):
            last = min(cut + 5, len(stream)) if payload in valid else cut + 1
            for second in range(cut, last):
                assert read_without_words(stream[:cut], stream[cut:second], stream[second:]) == whole, (payload, cut)


@asynccontextmanager
async def aiohttp_serving() -> AsyncIterator[int]:
    async def handle(request: web.BaseRequest) -> web.StreamResponse:
        await request.read()
        return web.Response(text="ok")

    runner = web.ServerRunner(web.Server(handle, access_log=None))
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    try:
        yield runner.addresses[0][1]
    finally:
        await runner.cleanup()


async def at_once(port: int, payloads: list[bytes]) -> list[list[int]]:
    """What does a server answer at once to each of these, while the client keeps the connection open?"""
    answered = []
    for start in range(0, len(payloads), 16):
        clients = [socket.create_connection(("127.0.0.1", port)) for _ in payloads[start : start + 16]]
        for client, payload in zip(clients, payloads[start:], strict=False):
            client.sendall(payload)
        for _ in range(3):
            await exchange(port, GET_CLOSE)  # once these are answered, so is all that came before them
        for client in clients:
            client.setblocking(False)
            answers = b""
            with client, suppress(BlockingIOError, ConnectionResetError):
                while piece := client.recv(65536):
                    answers += piece
            answered.append(statuses_of(answers))
    return answered


async def assert_as_strict(payloads: list[bytes]) -> int:
    """Both servers get the same; returns how many payloads aiohttp refuses."""
    async with serving() as served, aiohttp_serving() as port:
        ours, theirs = [await at_once(at, payloads) for at in (served.port, port)]
    refused = [max(answers, default=0) >= 400 for answers in theirs]
    served_by_us = [max(answers, default=500) < 400 for answers in ours]
    lenient = [p for p, no, yes in zip(payloads, refused, served_by_us, strict=True) if no and yes]
    assert lenient == []
    return sum(refused)


async def test_what_aiohttp_refuses_is_refused() -> None:
    payloads = [payload for payload, _ in REFUSED.values() if len(payload) < 9000]
    legal = [case.sent for case in ASKED.values() if case.status == 200 and b"Host: evil" not in case.sent]
    refused = await assert_as_strict([*payloads, *legal])  # but for a trailer, which aiohttp takes for a field
    assert refused > len(payloads) / 2  # else the comparison says nothing


INSERTS = [b"", b"\r", b"\n", b"\r\n", b" ", b"\t", b"\0", b":", b",", b"0", b"5", b"+", b"-", b";", b"\x7f", b"\xff"]
BASES = [
    P + b"Content-Length: 5\r\n\r\nhello",
    P + b"Transfer-Encoding: chunked\r\n\r\n5;a=b\r\nhello\r\n0\r\nT: u\r\n\r\n",
    G + b"Accept: */*\r\nConnection: keep-alive\r\n\r\n",
]


def mutated(rng: random.Random) -> bytes:
    payload = rng.choice(BASES)
    for _ in range(rng.randint(1, 3)):
        at = rng.randrange(len(payload))
        payload = payload[:at] + rng.choice(INSERTS) + payload[at + rng.randint(0, 3) :]
    return payload


@pytest.mark.parametrize("seed", range(2))
async def test_what_aiohttp_refuses_of_mutated_requests_is_refused(seed: int) -> None:
    rng = random.Random(seed)
    refused = await assert_as_strict([mutated(rng) for _ in range(200)])
    assert refused > 50


@pytest.mark.parametrize(
    "start", [b"\x16\x03\x01\x02", b"{", b"GET / HTTP/1.1\nHost: x\n\n", b"GET / HTTP/1.1\r\nA: \0"]
)
async def test_a_head_beyond_hope_is_refused_before_it_ends(start: bytes) -> None:
    async with serving() as served:
        assert statuses_of(await served.exchange(start)) == [400]
