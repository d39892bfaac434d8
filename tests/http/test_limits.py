"""What a client may make the server hold or wait for has a bound, and a refusal reaches the client."""

from __future__ import annotations

import asyncio
import json

import pytest

import gateway.http.server
from gateway.http.errors import ApiError, Reason
from gateway.http.server import HttpRequest, ServerLimits
from tests.http.http_raw import echo, read_answer, serving, statuses_of, until

POST = b"POST /a HTTP/1.1\r\nHost: x\r\n"
CHUNKED = POST + b"Transfer-Encoding: chunked\r\n\r\n"


@pytest.fixture
def quick_sweep(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gateway.http.server, "_SWEEP_S", 0.01)


async def test_a_body_announced_too_large_is_refused_while_the_client_still_sends() -> None:
    async with serving(limits=ServerLimits(body_bytes_max=1000)) as served:
        reader, writer = await served.connect()
        writer.write(POST + b"Content-Length: 20000000\r\n\r\n")
        sending = asyncio.create_task(send(writer, 20_000_000))
        head, body = await read_answer(reader)
        assert statuses_of(head) == [413]
        assert json.loads(body)["error"]["code"] == "body_too_large"
        await sending  # what is sent after the answer is taken and dropped, so nothing resets the answer
        assert await reader.read() == b""
        assert served.requests == []
        writer.close()


async def send(writer: asyncio.StreamWriter, size: int) -> None:
    for _ in range(size // 100_000):
        writer.write(b"x" * 100_000)
        await writer.drain()


async def test_a_chunked_body_is_refused_as_soon_as_it_is_too_large() -> None:
    async with serving(limits=ServerLimits(body_bytes_max=1000)) as served:
        reader, writer = await served.connect()
        writer.write(CHUNKED + b"3e8\r\n" + b"x" * 1000 + b"\r\n")
        writer.write(b"1\r\nx\r\n")
        head, _ = await read_answer(reader)
        assert statuses_of(head) == [413]
        assert served.requests == []
        writer.close()


async def test_a_body_of_just_the_limit_is_served() -> None:
    async with serving(limits=ServerLimits(body_bytes_max=1000)) as served:
        reader, writer = await served.connect()
        for payload in (
            POST + b"Content-Length: 1000\r\n\r\n" + b"x" * 1000,
            CHUNKED + b"3e8\r\n" + b"x" * 1000 + b"\r\n0\r\n\r\n",
        ):
            writer.write(payload)
            assert statuses_of((await read_answer(reader))[0]) == [200]
        assert [request.body for request in served.requests] == [b"x" * 1000] * 2
        writer.close()


async def test_unfinished_bodies_share_a_bound() -> None:
    async with serving(limits=ServerLimits(bodies_bytes_max=1500)) as served:
        _, first = await served.connect()
        first.write(POST + b"Content-Length: 1001\r\n\r\n" + b"x" * 1000)
        await until(lambda: served.server.bodies_bytes == 1000)
        reader, second = await served.connect()
        second.write(POST + b"Content-Length: 1001\r\n\r\n" + b"x" * 1000)
        head, body = await read_answer(reader)
        assert statuses_of(head) == [503]
        assert b"retry-after: " in head
        assert json.loads(body)["error"]["code"] == "server_busy"
        assert served.server.bodies_bytes == 1000
        first.write(b"x")
        await until(lambda: len(served.requests) == 1)
        assert served.server.bodies_bytes == 0  # the handler's from here on
        first.close()
        second.close()


async def test_connections_beyond_the_limit_are_told_so() -> None:
    async with serving(limits=ServerLimits(connections_max=1, linger_s=1000)) as served:
        reader, writer = await served.connect()
        writer.write(POST + b"Content-Length: 0\r\n\r\n")
        await read_answer(reader)
        beyond, staying = await served.connect()
        assert statuses_of(await beyond.read()) == [503]
        await until(lambda: served.server.connections == 1)  # it takes no room, though its client stays
        staying.close()
        writer.close()
        await until(lambda: served.server.connections == 0)
        assert statuses_of(await served.exchange(b"GET / HTTP/1.0\r\n\r\n")) == [200]


@pytest.mark.parametrize(
    ("sent", "status", "limits"),
    [
        (b"GET / HTTP/1.1\r\nHo", [408], ServerLimits(head_timeout_s=0.05)),
        (POST + b"Content-Length: 5\r\n\r\nhel", [408], ServerLimits(body_timeout_s=0.05)),
        (CHUNKED + b"5\r\nhel", [408], ServerLimits(body_timeout_s=0.05)),
        (b"", [], ServerLimits(head_timeout_s=0.05)),
        (POST + b"Content-Length: 0\r\n\r\n", [200], ServerLimits(idle_s=0.05)),
        (POST + b"Content-Length: 0\r\n\r\nGET", [200, 408], ServerLimits(head_timeout_s=0.05)),
    ],
)
async def test_who_is_too_slow_is_not_waited_for(
    quick_sweep: None, sent: bytes, status: list[int], limits: ServerLimits
) -> None:
    async with serving(limits=limits) as served:
        assert statuses_of(await served.exchange(sent)) == status


async def test_dribbling_does_not_extend_the_time_for_a_head(quick_sweep: None) -> None:
    async with serving(limits=ServerLimits(head_timeout_s=0.1)) as served:
        reader, writer = await served.connect()

        async def dribble() -> None:
            writer.write(b"GET / HTTP/1.1\r\nA: ")
            while True:
                writer.write(b"a")
                await asyncio.sleep(0.005)

        dribbling = asyncio.create_task(dribble())
        assert statuses_of(await reader.read()) == [408]
        dribbling.cancel()
        writer.close()


async def test_a_client_that_sends_on_after_its_refusal_is_cut(quick_sweep: None) -> None:
    async with serving(limits=ServerLimits(linger_s=0.05)) as served:
        reader, writer = await served.connect()
        writer.write(b"nonsense\r\n\r\n")
        assert statuses_of(await reader.read()) == [400]
        with pytest.raises(ConnectionError):
            await send(writer, 10_000_000_000)
        writer.close()


@pytest.mark.parametrize("framing", [b"Content-Length: 5\r\n", b"Transfer-Encoding: chunked\r\n"])
async def test_100_continue_is_sent_when_the_body_is_wanted(framing: bytes) -> None:
    async with serving() as served:
        reader, writer = await served.connect()
        writer.write(POST + framing + b"Expect: 100-continue\r\n\r\n")
        assert await reader.readuntil(b"\r\n\r\n") == b"HTTP/1.1 100 Continue\r\n\r\n"
        writer.write(b"hello" if b"Length" in framing else b"5\r\nhello\r\n0\r\n\r\n")
        assert (await read_answer(reader))[1] == b"POST /a hello"
        writer.close()


async def test_100_continue_is_not_sent_when_the_body_is_there_or_refused() -> None:
    expecting = POST + b"Connection: close\r\nExpect: 100-continue\r\nContent-Length: "
    async with serving(limits=ServerLimits(body_bytes_max=1000)) as served:
        assert statuses_of(await served.exchange(expecting + b"5\r\n\r\nhello")) == [200]
        assert statuses_of(await served.exchange(expecting + b"0\r\n\r\n")) == [200]
        assert statuses_of(await served.exchange(expecting + b"1001\r\n\r\n")) == [413]


def refuse_without_key(request: HttpRequest) -> tuple[int, list[tuple[bytes, bytes]], bytes] | None:
    assert request.body == b""
    if request.header(b"authorization") is None:
        error = ApiError(Reason.INVALID_API_KEY, "who?")
        return error.status, error.headers(), error.body()
    return None


async def test_the_head_hook_refuses_before_the_body_is_read() -> None:
    async with serving(on_head=refuse_without_key) as served:
        reader, writer = await served.connect()
        writer.write(POST + b"Expect: 100-continue\r\nContent-Length: 10000000\r\n\r\n")
        head, _ = await read_answer(reader)
        assert statuses_of(head) == [401]
        assert b"connection: close" in head
        assert served.server.bodies_bytes == 0
        writer.close()


async def test_the_head_hook_keeps_a_connection_without_a_body_and_lets_others_pass() -> None:
    async with serving(on_head=refuse_without_key) as served:
        reader, writer = await served.connect()
        writer.write(b"GET /a HTTP/1.1\r\nHost: x\r\n\r\n")
        assert statuses_of((await read_answer(reader))[0]) == [401]
        assert served.requests == []
        writer.write(POST + b"Authorization: Bearer k\r\nContent-Length: 5\r\n\r\nhello")
        assert (await read_answer(reader))[1] == b"POST /a hello"
        writer.close()


async def test_a_head_hook_that_fails_gives_500(caplog: pytest.LogCaptureFixture) -> None:
    def fail(request: HttpRequest) -> None:
        raise LookupError

    async with serving(on_head=fail) as served:
        assert statuses_of(await served.exchange(b"GET / HTTP/1.0\r\n\r\n")) == [500]
        assert "the head hook failed" in caplog.text


async def test_refusals_speak_the_dialect_of_the_path() -> None:
    async with serving(echo, ServerLimits(body_timeout_s=0)) as served:
        served.server.on_head = raise_busy
        answer = await served.exchange(b"POST /v1/messages HTTP/1.0\r\n\r\n")
        assert json.loads(answer.partition(b"\r\n\r\n")[2])["type"] == "error"


def raise_busy(request: HttpRequest) -> None:
    raise ApiError(Reason.SERVER_BUSY, "busy")
