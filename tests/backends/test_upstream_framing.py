"""An answer ends where its framing says; framing in doubt is refused, and nothing of it reaches the next request."""

from __future__ import annotations

import asyncio

import pytest

from backends.upstream_errors import ConnectionLost, ProtocolViolation
from tests.backends.corpus import CHUNKED, ILL_FRAMED
from tests.backends.raw_server import BODY, REQUEST, Open, Peer, RawServer, Recorder, ask, close, hang, say
from tests.gateway.capture import answer

WELL_FRAMED = {
    "length": (answer(b"hello"), b"hello", True),
    "empty length": (answer(b""), b"", True),
    "chunked": (CHUNKED + b"3\r\nhel\r\n2;ext=1\r\nlo\r\n0\r\n\r\n", b"hello", True),
    "chunked with trailer": (CHUNKED + b"5\r\nhello\r\n0\r\nX-Sum: 1\r\n\r\n", b"hello", True),
    "204": (b"HTTP/1.1 204 No Content\r\nContent-Length: 5\r\n\r\n", b"", True),
    "304": (b"HTTP/1.1 304 Not Modified\r\nContent-Length: 5\r\n\r\n", b"", True),
    "after 100 and 103": (
        b"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 103 Early Hints\r\nLink: x\r\n\r\n" + answer(b"hi"),
        b"hi",
        True,
    ),
    "connection close": (answer(b"hello", b"Connection: close"), b"hello", False),
    "HTTP/1.0": (b"HTTP/1.0 200 OK\r\nContent-Length: 5\r\n\r\nhello", b"hello", False),
}


@pytest.mark.parametrize("name", WELL_FRAMED)
async def test_the_answer_ends_where_its_framing_says_and_only_then_is_the_connection_used_again(
    name: str, open_pool: Open
) -> None:
    raw, body, is_kept = WELL_FRAMED[name]
    async with RawServer(say(raw)) as server:
        pool = open_pool(server.url)
        for _ in range(3):
            recorder, error = await ask(pool)
            assert (recorder.body, error) == (body, None)
        assert server.connections == (1 if is_kept else 3)


@pytest.mark.parametrize("name", WELL_FRAMED)
async def test_an_answer_cut_at_every_byte_reads_the_same(name: str, open_pool: Open) -> None:
    raw, body, _ = WELL_FRAMED[name]

    async def script(peer: Peer) -> None:
        while await peer.request():
            for at in range(len(raw)):
                await peer.send(raw[at : at + 1])
                await asyncio.sleep(0)

    async with RawServer(script) as server:
        recorder, error = await ask(open_pool(server.url))
        assert (recorder.body, error) == (body, None)
        assert recorder.status in (200, 204, 304)


async def test_the_head_comes_with_lower_case_names(open_pool: Open) -> None:
    async with RawServer(say(b"HTTP/1.1 418 I'm a Teapot\r\nX-Odd: A, B\r\nCONTENT-LENGTH: 0\r\n\r\n")) as server:
        recorder, error = await ask(open_pool(server.url))
        assert error is None
        assert recorder.status == 418
        assert recorder.headers == [(b"x-odd", b"A, B"), (b"content-length", b"0")]


async def test_all_chunks_of_one_read_come_in_one_piece(open_pool: Open) -> None:
    async with RawServer(say(CHUNKED + b"1\r\nx\r\n" * 500 + b"0\r\n\r\n")) as server:
        recorder, error = await ask(open_pool(server.url))
        assert (recorder.body, error) == (b"x" * 500, None)
        assert len(recorder.pieces) <= 2


async def test_without_framing_the_end_of_the_connection_is_the_end(open_pool: Open) -> None:
    async with RawServer(say(b"HTTP/1.1 200 OK\r\n\r\nhel", b"lo", then=close)) as server:
        recorder, error = await ask(open_pool(server.url))
        assert (recorder.body, error) == (b"hello", None)


async def test_without_framing_a_reset_is_an_error(open_pool: Open) -> None:
    async def script(peer: Peer) -> None:
        await peer.request()
        await peer.send(b"HTTP/1.1 200 OK\r\n\r\nhel")
        await peer.reader.readexactly(1)  # the test has the first piece
        peer.reset()

    async with RawServer(script) as server:
        recorder = Recorder()
        call = open_pool(server.url).send(REQUEST, BODY, recorder)
        await recorder.first_piece.wait()
        call.connection._transport.write(b"!")  # type: ignore[union-attr]
        error = await recorder.end()
        assert isinstance(error, ConnectionLost)
        assert not error.before_first_byte


async def test_what_comes_for_a_body_of_head_is_none_and_its_connection_is_not_used_again(open_pool: Open) -> None:
    head = b"HEAD / HTTP/1.1\r\nhost: t\r\ncontent-length: 0\r\n\r\n"
    async with RawServer(say(answer(b"hello"))) as server:
        pool = open_pool(server.url)
        assert (await ask(pool))[0].body == b"hello"  # so that its head is known
        for connections in (1, 2):
            recorder, error = await ask(pool, head, b"")
            assert (recorder.pieces, error) == ([], None)
            assert (server.connections, " 0 idle" in repr(pool)) == (connections, True)


@pytest.mark.parametrize("name", ILL_FRAMED)
async def test_framing_in_doubt_is_refused_and_the_connection_closed(name: str, open_pool: Open) -> None:
    async with RawServer(say(ILL_FRAMED[name], then=hang)) as server:
        pool = open_pool(server.url)
        recorder, error = await ask(pool)
        assert isinstance(error, ProtocolViolation)
        assert not error.before_first_byte
        assert recorder.body in (b"", b"he")
        assert " 0 idle" in repr(pool)


LATER = {name: raw for name, (raw, _, _) in WELL_FRAMED.items()} | {
    **ILL_FRAMED,
    "longer": answer(b"hello" * 20),
    "another field": answer(b"hello", b"X: y"),
    "another status": answer(b"hello").replace(b"200", b"500"),
    "more than its length": answer(b"hello") + b"evil",
    "digits that are none": answer(b"hello").replace(b": 5", b": 5_"),
    "many digits": answer(b"hello").replace(b": 5", b": " + b"0" * 30 + b"5"),
}


@pytest.mark.parametrize("name", [name for name, raw in LATER.items() if len(raw) < 60_000])
async def test_behind_an_answer_with_a_head_that_is_known_it_is_read_as_if_it_were_the_first(
    name: str, open_pool: Open
) -> None:
    async def script(peer: Peer) -> None:
        while await peer.request():
            await peer.send(says.pop())

    found = []
    for before in ([], [answer(b"known")], [answer(b"known"), answer(b"as well")]):
        says = [LATER[name], *before]
        async with RawServer(script) as server:
            pool = open_pool(server.url)
            for _ in before:
                assert (await ask(pool))[0].status == 200
            recorder, error = await ask(pool)
            found.append(
                (recorder.status, recorder.headers, recorder.body, str(error), repr(pool).partition(": ")[2][:15])
            )
    assert found[0] == found[1] == found[2]


async def test_an_answer_with_a_head_that_is_known_may_come_in_pieces(open_pool: Open) -> None:
    whole = answer(b"hello")

    async def script(peer: Peer) -> None:
        await peer.request()
        await peer.send(whole)
        for cut in range(1, len(whole)):
            await peer.request()
            await peer.send(whole[:cut])
            await asyncio.sleep(0.001)
            await peer.send(whole[cut:])

    async with RawServer(script) as server:
        pool = open_pool(server.url)
        for _ in whole:
            recorder, error = await ask(pool)
            assert (recorder.body, error) == (b"hello", None)
        assert server.connections == 1


EXTRA = {"whole answer": answer(b"evil"), "half a head": b"HTTP/1.1 2", "garbage": b"xyz"}


@pytest.mark.parametrize("name", EXTRA)
@pytest.mark.parametrize("framed", [answer(b"hello"), CHUNKED + b"5\r\nhello\r\n0\r\n\r\n"], ids=["length", "chunked"])
async def test_bytes_after_the_answer_never_reach_the_next_request(name: str, framed: bytes, open_pool: Open) -> None:
    async with RawServer(say(framed + EXTRA[name])) as server:
        pool = open_pool(server.url)
        for _ in range(3):
            recorder, error = await ask(pool)
            assert (recorder.body, error) == (b"hello", None)
        assert server.connections == 3


async def test_bytes_on_an_idle_connection_close_it(open_pool: Open) -> None:
    more = asyncio.Event()
    closed = asyncio.Event()

    async def script(peer: Peer) -> None:
        await peer.request()
        await peer.send(answer(b"hello"))
        if peer.number == 0:
            await more.wait()
            await peer.send(answer(b"evil"))
            await peer.gone()
            closed.set()
        else:
            await peer.gone()

    async with RawServer(script) as server:
        pool = open_pool(server.url)
        await ask(pool)
        more.set()
        await closed.wait()
        recorder, error = await ask(pool)
        assert (recorder.body, error) == (b"hello", None)
        assert server.connections == 2
