"""How answers are framed, in which order, and what happens when the client does not read them or goes away."""

from __future__ import annotations

import asyncio
import socket
import struct
from collections.abc import Callable

import pytest

from gateway.http.http_request import HttpRequest
from gateway.http.responder import Responder
from tests.http.http_raw import GET, GET_CLOSE, WAIT_S, read_answer, serving, statuses_of, until, wait


async def test_keep_alive_and_close_and_http_1_0_closes_unless_asked_to_stay() -> None:
    async with serving() as served:
        reader, writer = await served.connect(GET)
        head, body = await read_answer(reader)
        assert head == b"HTTP/1.1 200 OK\r\ncontent-type: text/plain\r\ncontent-length: 7\r\n\r\n"
        assert body == b"GET /a "
        writer.write(GET_CLOSE)
        head, _ = await read_answer(reader)
        assert b"\r\nconnection: close\r\n" in head
        assert await reader.read() == b""
        assert b"connection: close" in await served.exchange(b"GET / HTTP/1.0\r\n\r\n")
        reader, _ = await served.connect(b"GET / HTTP/1.0\r\nConnection: keep-alive\r\n\r\n")
        assert b"connection: keep-alive" in (await read_answer(reader))[0]


async def test_pipelined_requests_are_handled_one_at_a_time_and_answered_in_order() -> None:
    async with serving(wait) as served:
        reader, writer = await served.connect()
        paths = [b"/%d" % i for i in range(20)]
        writer.write(b"".join(b"POST %b HTTP/1.1\r\nHost: x\r\nContent-Length: 2\r\n\r\nhi" % path for path in paths))
        for index, path in enumerate(paths):
            responder = await served.responder(index)
            assert len(served.requests) == index + 1
            responder.respond(200, [], path)
            assert (await read_answer(reader))[1] == path


CLOSES, STAYS = b"Host: x\r\nConnection: close\r\n\r\n", b"Host: x\r\nConnection: keep-alive\r\n\r\n"
CHUNKS = b"3\r\none\r\n3\r\ntwo\r\n0\r\n\r\n"


@pytest.mark.parametrize(
    ("asked", "length", "fields", "body"),
    [
        pytest.param(b"GET / HTTP/1.1\r\n" + CLOSES, None, b"transfer-encoding: chunked\r\n", CHUNKS, id="chunks"),
        pytest.param(b"GET / HTTP/1.0\r\n" + STAYS, None, b"", b"onetwo", id="HTTP/1.0"),
        pytest.param(b"GET / HTTP/1.1\r\n" + CLOSES, 6, b"content-length: 6\r\n", b"onetwo", id="a length"),
        pytest.param(b"HEAD / HTTP/1.1\r\n" + CLOSES, None, b"transfer-encoding: chunked\r\n", b"", id="HEAD"),
    ],
)
async def test_a_stream_is_framed_as_its_reader_can_read_it(
    asked: bytes, length: int | None, fields: bytes, body: bytes
) -> None:
    def stream(request: HttpRequest, responder: Responder) -> None:
        responder.start(200, [(b"a", b"b")], length=length, first=b"one")
        responder.write(b"")
        responder.write(b"two")
        responder.end()
        responder.write(b"late")

    async with serving(stream) as served:
        answer = await served.exchange(asked)
        assert answer == b"HTTP/1.1 200 OK\r\na: b\r\n%bconnection: close\r\n\r\n%b" % (fields, body)


@pytest.mark.parametrize(
    ("method", "status", "framing"),
    [
        (b"HEAD", 200, b"content-length: 5\r\n"),
        (b"GET", 204, b""),
        (b"GET", 304, b""),
    ],
)
async def test_answers_without_a_body(method: bytes, status: int, framing: bytes) -> None:
    async with serving(lambda request, responder: responder.respond(status, [], b"hello")) as served:
        answer = await served.exchange(method + b" / HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n")
        assert answer.endswith(b"\r\n" + framing + b"connection: close\r\n\r\n")


@pytest.mark.parametrize("bad", [b"a\r\nSet-Cookie: b", b"a\nb", b"a\rb", b"a\0b"])
async def test_header_values_cannot_split_the_answer(bad: bytes) -> None:
    def split(request: HttpRequest, responder: Responder) -> None:
        for send in (
            lambda: responder.respond(200, [(b"x", bad)], b""),
            lambda: responder.start(200, [(b"x", bad)]),
        ):
            with pytest.raises(ValueError, match="CR, LF or NUL"):
                send()
        responder.respond(200, [], b"fine")  # else it is a 500

    async with serving(split) as served:
        assert statuses_of(await served.exchange(GET_CLOSE)) == [200]


async def test_a_handler_that_fails_gives_500_or_a_broken_stream(caplog: pytest.LogCaptureFixture) -> None:
    def fail(request: HttpRequest, responder: Responder) -> None:
        if request.path == "/late":
            responder.start(200, [], first=b"x")
        raise LookupError(request.path)

    async with serving(fail) as served:
        assert statuses_of(await served.exchange(GET_CLOSE)) == [500]
        answer = await served.exchange(b"GET /late HTTP/1.1\r\nHost: x\r\n\r\n")
        assert answer.endswith(b"1\r\nx\r\n")
    assert caplog.text.count("the handler failed") == 2


async def test_abort_is_seen_as_a_break() -> None:
    async with serving(wait) as served:
        reader, _ = await served.connect(GET)
        responder = await served.responder()
        responder.start(200, [], first=b"data: error\n\n")
        responder.abort()
        assert responder.closed
        received = await reader.read()
        assert received.endswith(b"data: error\n\n\r\n")  # all that was sent, and no last chunk


async def test_abort_of_an_answer_without_framing_is_a_reset() -> None:
    async with serving(wait) as served:
        reader, _ = await served.connect(b"GET / HTTP/1.0\r\n\r\n")
        responder = await served.responder()
        responder.start(200, [], first=b"x")
        assert (await reader.readuntil(b"x")).endswith(b"\r\n\r\nx")
        responder.abort()
        with pytest.raises(ConnectionResetError):
            await reader.read()


@pytest.mark.parametrize("sent", [b"one", b"more than six"])
async def test_a_body_that_differs_from_its_length_is_a_break(sent: bytes) -> None:
    async with serving(wait) as served:
        reader, _ = await served.connect(GET + GET)
        responder = await served.responder()
        responder.start(200, [], length=6)
        if len(sent) > 6:
            with pytest.raises(RuntimeError):
                responder.write(sent)
        else:
            responder.write(sent)
            responder.end()
        assert (await reader.read()).count(b"HTTP/1.1") == 1
        assert len(served.requests) == 1


def close(writer: asyncio.StreamWriter) -> None:
    writer.close()


def half_close(writer: asyncio.StreamWriter) -> None:
    writer.write_eof()


def reset(writer: asyncio.StreamWriter) -> None:
    sock = writer.get_extra_info("socket")
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    writer.transport.abort()


@pytest.mark.parametrize("leave", [close, half_close, reset])
@pytest.mark.parametrize("behind", [b"", GET, GET[:10], b"x" * 50000])
@pytest.mark.parametrize("streaming", [False, True])
async def test_a_client_that_leaves_is_noticed_once(
    leave: Callable[[asyncio.StreamWriter], None], behind: bytes, streaming: bool
) -> None:
    async with serving(wait) as served:
        _, writer = await served.connect(GET + behind)
        responder = await served.responder()
        calls: list[bool] = []
        responder.on_disconnect = lambda: calls.append(responder.closed)
        if streaming:
            responder.start(200, [], first=b"x")
        leave(writer)
        await until(lambda: bool(calls))
        responder.write(b"late")
        responder.end()
        responder.respond(200, [], b"late")
        await until(lambda: len(served.server.connections) == 0)
        assert calls == [True]
        assert len(served.requests) == 1


async def test_what_is_pipelined_is_bounded_and_hides_no_disconnect(quick_sweep: None) -> None:
    async with serving(wait) as served:
        sock = served.client_that_sends(GET)
        responder = await served.responder()
        gone: list[bool] = []
        responder.on_disconnect = lambda: gone.append(True)
        loop = asyncio.get_running_loop()
        with pytest.raises(TimeoutError):  # the server stops reading, so the kernel's buffers fill
            async with asyncio.timeout(0.3):
                await loop.sock_sendall(sock, b"x" * 100_000_000)
        (connection,) = served.server.connections
        assert len(connection._pending) < 65536 + 256 * 1024
        assert gone == []
        reset_now = struct.pack("ii", 1, 0)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, reset_now)
        sock.close()
        await until(lambda: gone == [True])


async def test_stop_lets_answers_end_and_sends_clients_elsewhere() -> None:
    async with serving(wait) as served:
        reader, writer = await served.connect()
        await served.connect()
        writer.write(GET)
        responder = await served.responder()
        responder.start(200, [], first=b"one")
        closing = asyncio.create_task(served.server.close(WAIT_S))
        await until(lambda: len(served.server.connections) == 1)
        with pytest.raises(OSError):  # noqa: PT011 (its kind is the system's)
            await served.connect()
        responder.end()
        assert (await read_answer(reader))[1] == b"one"
        writer.close()
        await closing
        assert (served.server.stopping, len(served.server.connections)) == (True, 0)


async def test_a_request_that_has_begun_is_waited_for_until_its_answer_has_ended() -> None:
    async with serving(wait) as served:
        server = served.server
        assert not server.awaits_requests()
        _, writer = await served.connect()
        await until(lambda: server.awaits_requests())
        assert not server.awaits_requests(has_begun=True), "no byte has come"
        for part in (b"POST /x HTTP/1.1\r\nhost: x\r\n", b"content-length: 2\r\n\r\n", b"a"):
            writer.write(part)
            await until(lambda: server.awaits_requests(has_begun=True))
        assert not served.requests
        writer.write(b"b")
        responder = await served.responder()
        assert server.awaits_requests(has_begun=True)
        responder.respond(200, [], b"")
        assert not server.awaits_requests(has_begun=True)
        writer.close()


async def test_close_cuts_what_does_not_end_and_closes_what_has_asked_nothing() -> None:
    async with serving() as served:
        reader, _ = await served.connect()
        await until(lambda: len(served.server.connections) == 1)
        await served.server.close(WAIT_S)
        assert await reader.read() == b""
    async with serving(wait) as served:
        await served.connect(GET)
        responder = await served.responder()
        gone: list[bool] = []
        responder.on_disconnect = lambda: gone.append(True)
        await served.server.close(0.01)
        assert gone == [True]
        assert len(served.server.connections) == 0
    async with serving(wait) as served:
        reader, writer = await served.connect(GET)
        responder = await served.responder()
        responder.on_disconnect = lambda: gone.append(True)
        responder.respond(200, [], b"x")
        await read_answer(reader)
        writer.close()
        await until(lambda: len(served.server.connections) == 0)
        assert gone == [True], "who was answered calls no disconnect"


async def test_what_had_connected_before_the_stop_is_answered() -> None:
    async with serving() as served:
        silent = await served.connect()
        await until(lambda: len(served.server.connections) == 1)
        before = socket.create_connection(("127.0.0.1", served.port))  # the kernel accepts; the server has no turn
        before.setblocking(False)
        before.sendall(GET)
        served.server.stop_accepting()
        served.server.close_idle()
        assert served.server.awaits_requests()
        reader, writer = await asyncio.open_connection(sock=before)
        head, body = await read_answer(reader)
        assert (head[:15], body) == (b"HTTP/1.1 200 OK", b"GET /a ")
        assert b"connection: close" in head
        silent[1].write(GET)
        assert (await read_answer(silent[0]))[1] == b"GET /a "
        with pytest.raises(ConnectionRefusedError):
            await served.connect()
        await until(lambda: not served.server.awaits_requests())
        writer.close()
