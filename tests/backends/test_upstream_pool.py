"""The upstream client keeps connections well, and ends every call exactly once, whatever the backend does."""

from __future__ import annotations

import asyncio
import socket
import time
from itertools import pairwise

import pytest

from backends.client import upstream
from backends.client.upstream import UpstreamCall, UpstreamConnections
from backends.upstream_errors import ConnectFailed, ConnectionLost, ReadTimeout, UpstreamError
from tests.backends.corpus import CHUNKED, TRUNCATED
from tests.backends.raw_server import (
    BODY,
    REQUEST,
    Open,
    Peer,
    RawServer,
    Recorder,
    Script,
    ask,
    close,
    hang,
    reset,
    say,
)
from tests.gateway.capture import answer
from tests.waiting import WAIT_S, until


@pytest.mark.parametrize("ending", [close, reset], ids=["close", "reset"])
async def test_a_stale_connection_is_tried_again_once_on_a_fresh_one(ending: Script, open_pool: Open) -> None:
    """The keep-alive race: the backend closes while the next request is on its way. The second try is the last."""

    async def script(peer: Peer) -> None:
        await peer.request()
        if peer.number < 2:
            await peer.send(answer(b"%d" % peer.number))
            await peer.request()  # taken, and never answered
        await ending(peer)

    async with RawServer(script) as server:
        pool = open_pool(server.url)
        await ask(pool)
        recorder, error = await ask(pool)
        assert (recorder.body, error) == (b"1", None)
        assert server.connections == 2
        _, error = await ask(pool)
        assert isinstance(error, ConnectionLost)
        assert error.before_first_byte
        assert server.connections == 3


@pytest.mark.parametrize("name", TRUNCATED)
async def test_a_truncated_answer_is_never_complete_and_never_tried_again(name: str, open_pool: Open) -> None:
    async def script(peer: Peer) -> None:
        await peer.request()
        await peer.send(answer(b"first"))
        await peer.request()
        await peer.send(TRUNCATED[name])

    async with RawServer(script) as server:
        pool = open_pool(server.url)
        await ask(pool)
        _, error = await ask(pool)
        assert isinstance(error, ConnectionLost)
        assert not error.before_first_byte
        assert server.connections == 1


async def test_nobody_listening_is_a_failed_connect(open_pool: Open) -> None:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        port = sock.getsockname()[1]
        recorder, error = await ask(open_pool(f"http://127.0.0.1:{port}"))
    assert isinstance(error, ConnectFailed)
    assert error.before_first_byte
    assert str(port) in str(error)
    assert recorder.status == 0


async def test_a_connect_that_takes_too_long_fails(open_pool: Open) -> None:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        sock.listen(0)
        port = sock.getsockname()[1]
        with socket.create_connection(("127.0.0.1", port)):  # the backlog is full
            _, error = await ask(open_pool(f"http://127.0.0.1:{port}", connect_timeout_s=0.2))
    assert isinstance(error, ConnectFailed)
    assert "0.2 s" in str(error)


async def test_a_loop_that_is_late_does_not_drop_what_is_connected(
    open_pool: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    limit_s = 0.05
    start = upstream._Connection.start

    def start_late(connection: upstream._Connection, call: UpstreamCall) -> None:
        start(connection, call)
        time.sleep(2 * limit_s)  # a busy loop: the time to connect is over before the connecting task goes on

    monkeypatch.setattr(upstream._Connection, "start", start_late)
    async with RawServer(say(answer(b"hello"))) as server:
        recorder, error = await ask(open_pool(server.url, connect_timeout_s=limit_s))
        assert error is None
        assert recorder.body == b"hello"


async def test_a_silent_backend_times_out_before_and_within_its_answer(open_pool: Open) -> None:
    for sent in (b"", b"HTTP/1.1 200 OK\r\nContent-Length: 10\r\n\r\nhello"):
        async with RawServer(say(sent, then=hang)) as server:
            _, error = await ask(open_pool(server.url, silence_s=0.1))
            assert isinstance(error, ReadTimeout)
            assert error.before_first_byte is (sent == b"")


async def test_a_backend_that_keeps_talking_is_not_silent(open_pool: Open) -> None:
    silence_s, sent_s = 0.3, [0.0]

    async def script(peer: Peer) -> None:
        await peer.request()
        await peer.send(b"HTTP/1.1 200 OK\r\nContent-Length: 8\r\n\r\n")
        sent_s[:] = [time.monotonic()]
        for _ in range(8):
            await asyncio.sleep(0.05)
            await peer.send(b"x")
            sent_s.append(time.monotonic())
        await peer.gone()

    late_s = silence_s
    while late_s >= silence_s:  # the machine was, so there was a silence
        async with RawServer(script) as server:
            recorder, error = await ask(open_pool(server.url, silence_s=silence_s))
        late_s = max(after - before for before, after in pairwise(sent_s))
    assert error is None
    assert recorder.body == b"x" * 8


async def test_idle_connections_are_closed_before_their_time(open_pool: Open) -> None:
    gone = asyncio.Event()

    async def script(peer: Peer) -> None:
        await peer.request()
        await peer.send(answer(b"hello"))
        await peer.gone()
        gone.set()

    async with RawServer(script) as server:
        pool = open_pool(server.url, idle_s=0.2)
        await ask(pool)
        assert "1 idle" in repr(pool)
        await gone.wait()
        assert "0 idle" in repr(pool)


async def test_the_connection_used_last_is_used_first(open_pool: Open) -> None:
    hold = asyncio.Event()

    async def script(peer: Peer) -> None:
        while request := await peer.request():
            if b"/hold" in request:
                await hold.wait()
            await peer.send(answer(b"%d" % peer.number))

    async with RawServer(script) as server:
        pool = open_pool(server.url)
        held = Recorder()
        pool.send(REQUEST.replace(b"/v1/x", b"/hold"), BODY, held)
        await until(lambda: server.connections)
        await ask(pool)
        hold.set()
        await held.end()
        assert [(await ask(pool))[0].body for _ in range(3)] == [b"0", b"0", b"0"]


async def test_no_limit_and_no_queue_of_connections(open_pool: Open) -> None:
    everyone = asyncio.Barrier(80)

    async def script(peer: Peer) -> None:
        await peer.request()
        await everyone.wait()  # passes only when all are in flight together
        await peer.send(answer(b"ok"))
        await peer.gone()

    async with RawServer(script) as server:
        pool = open_pool(server.url)
        results = await asyncio.gather(*(ask(pool) for _ in range(80)))
        assert [error for _, error in results] == [None] * 80


async def test_cancel_closes_at_once_and_nothing_is_called_afterwards(open_pool: Open) -> None:
    gone = asyncio.Event()

    async def script(peer: Peer) -> None:
        await peer.request()
        await peer.send(CHUNKED + b"5\r\nhello\r\n")
        await peer.gone()
        gone.set()

    async with RawServer(script) as server:
        pool = open_pool(server.url)
        recorder = Recorder()
        call = pool.send(REQUEST, BODY, recorder)
        await recorder.first_piece.wait()
        call.cancel()
        call.cancel()
        await gone.wait()
        assert recorder.ends == []
        await ask_nothing(pool)
        assert "0 busy, 0 idle" in repr(pool)


async def ask_nothing(pool: UpstreamConnections) -> None:
    """Let the loop turn until the pool has noticed that its connections are gone."""
    await until(lambda: " 0 busy" in repr(pool) and " 0 connecting" in repr(pool))


async def test_cancel_before_the_connection_is_made(open_pool: Open) -> None:
    async with RawServer(say(answer(b"hello"))) as server:
        pool = open_pool(server.url)
        recorder = Recorder()
        pool.send(REQUEST, BODY, recorder).cancel()
        await ask_nothing(pool)
        later = Recorder()
        call = pool.send(REQUEST, BODY, later)
        await asyncio.sleep(0)
        call.cancel()
        await ask_nothing(pool)
        assert (await ask(pool))[1] is None  # accepted after the two, so the server is done with them as well
        assert recorder.ends == later.ends == []


async def test_cancel_while_the_connection_is_being_made_does_not_lose_sight_of_it(open_pool: Open) -> None:
    """Else closing the pool waits for it for ever."""
    async with RawServer(say(then=hang)) as server:
        pool = open_pool(server.url)
        recorder = Recorder()
        call = pool.send(REQUEST, BODY, recorder)
        await until(lambda: "1 busy" in repr(pool))
        call.cancel()
        async with asyncio.timeout(WAIT_S):
            await pool.close()
        assert (recorder.status, recorder.ends) == (0, [])


class CancelsAtHead(Recorder):
    call: UpstreamCall

    def head_received(self, status: int, headers: list[tuple[bytes, bytes]]) -> None:
        super().head_received(status, headers)
        self.call.cancel()


async def test_cancel_from_within_a_callback_is_the_last_one(open_pool: Open) -> None:
    async with RawServer(say(answer(b"hello"))) as server:
        pool = open_pool(server.url)
        recorder = CancelsAtHead()
        recorder.call = pool.send(REQUEST, BODY, recorder)
        await until(lambda: recorder.status)
        await ask_nothing(pool)
        assert (recorder.pieces, recorder.ends) == ([], [])
        assert "0 idle" in repr(pool)


async def test_a_paused_call_reads_nothing_more_and_is_not_silent(open_pool: Open) -> None:
    size = 16 * 1024 * 1024
    is_stuck = asyncio.Event()

    async def script(peer: Peer) -> None:
        await peer.request()
        peer.writer.write(answer(b"x" * size))
        try:
            await asyncio.wait_for(peer.writer.drain(), 0.5)
        except TimeoutError:
            is_stuck.set()
        await peer.gone()

    async with RawServer(script) as server:
        pool = open_pool(server.url, silence_s=0.1)
        recorder = Recorder()
        call = pool.send(REQUEST, BODY, recorder)
        call.pause()
        await is_stuck.wait()
        assert recorder.status == 0
        call.resume()
        assert await recorder.end() is None
        assert len(recorder.body) == size


async def test_an_answer_before_the_whole_request_was_read_is_kept_and_the_connection_is_not(open_pool: Open) -> None:
    async def script(peer: Peer) -> None:
        await peer.reader.readuntil(b"\r\n\r\n")
        await peer.send(b"HTTP/1.1 413 Too Large\r\nContent-Length: 2\r\n\r\nno")
        await peer.gone()

    size = 16 * 1024 * 1024
    async with RawServer(script) as server:
        pool = open_pool(server.url)
        head = REQUEST.replace(b"length: 2", b"length: %d" % size)
        recorder, error = await ask(pool, head, b"x" * size)
        assert error is None
        assert (recorder.status, recorder.body) == (413, b"no")
        assert "0 idle" in repr(pool)


async def test_a_large_request_arrives_whole(open_pool: Open) -> None:
    async def script(peer: Peer) -> None:
        while request := await peer.request():
            await peer.send(answer(b"%d" % len(request)))

    size = 8 * 1024 * 1024
    async with RawServer(script) as server:
        pool = open_pool(server.url)
        head = REQUEST.replace(b"length: 2", b"length: %d" % size)
        for _ in range(2):
            recorder, error = await ask(pool, head, b"x" * size)
            assert error is None
            assert int(recorder.body) == len(head) + size
        assert server.connections == 1


async def test_closing_the_pool_fails_what_is_in_flight_and_leaves_nothing() -> None:
    async with RawServer(say(then=hang)) as server:
        pool = UpstreamConnections("b1", server.url)
        waiting, connecting = Recorder(), Recorder()
        pool.send(REQUEST, BODY, waiting)
        await until(lambda: server.connections)
        pool.send(REQUEST, BODY, connecting)
        await pool.close()
        assert isinstance(await waiting.end(), ConnectionLost)
        assert isinstance(await connecting.end(), UpstreamError)
        assert "0 busy, 0 idle, 0 connecting" in repr(pool)
        with pytest.raises(RuntimeError, match="closed"):
            pool.send(REQUEST, BODY, Recorder())


async def test_small_writes_are_not_delayed(open_pool: Open) -> None:
    async with RawServer(say(then=hang)) as server:
        recorder = Recorder()
        pool = open_pool(server.url)
        call = pool.send(REQUEST, BODY, recorder)
        await until(lambda: call.connection)
        assert call.connection is not None
        sock = call.connection._transport.get_extra_info("socket")
        assert sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)


@pytest.mark.parametrize(
    ("url", "host"),
    [
        ("http://gpu-1:8000", b"gpu-1:8000"),
        ("http://gpu-1", b"gpu-1"),
        ("https://gpu-1:443/", b"gpu-1"),
        ("https://gpu-1:80", b"gpu-1:80"),
        ("http://[::1]:8000", b"[::1]:8000"),
    ],
)
def test_the_host_header_names_the_port_unless_it_is_the_usual_one(url: str, host: bytes) -> None:
    assert UpstreamConnections("b1", url).host_header == host


async def test_a_request_that_follows_an_answer_s_end_leaves_at_once(open_pool: Open) -> None:
    """The place in the engine that an answer leaves is taken before anything else of this turn is looked at."""
    loop = asyncio.get_running_loop()
    there: list[bytes] = []
    with socket.create_server(("127.0.0.1", 0)) as listener:
        listener.setblocking(False)
        pool = open_pool(f"http://127.0.0.1:{listener.getsockname()[1]}")

        class AsksAgain(Recorder):
            def completed(self) -> None:
                super().completed()
                loop.call_soon(look)  # runs before what the next request may put off
                pool.send(REQUEST, BODY, Recorder())

        def look() -> None:
            try:
                there.append(engine.recv(65536))
            except BlockingIOError:
                there.append(b"(nothing yet)")

        pool.send(REQUEST, BODY, AsksAgain())
        engine, _ = await loop.sock_accept(listener)
        with engine:
            await loop.sock_recv(engine, 65536)
            await loop.sock_sendall(engine, answer(b"hello"))
            await until(lambda: there)
    assert there == [REQUEST + BODY]
