"""What a client may make the server hold or wait for has a bound, and a refusal reaches the client."""

from __future__ import annotations

import asyncio

import pytest

from gateway.http.accounts import Accounts, ServerLimits
from gateway.http.addresses import TrustedProxies
from gateway.http.http_request import HttpRequest
from gateway.http.responder import Responder
from tests.http.http_raw import CHUNKED, POST, account_of, echo, read_answer, refusal, send, serving, statuses_of, wait
from tests.waiting import until


async def test_a_body_announced_too_large_is_refused_while_the_client_still_sends() -> None:
    async with serving(limits=ServerLimits(body_bytes_max=1000)) as served:
        reader, writer = await served.connect(POST + b"Content-Length: 20000000\r\n\r\n")
        sending = asyncio.create_task(send(writer, 20_000_000))
        assert await refusal(reader) == (413, "body_too_large")
        await sending  # what is sent after the answer is taken and dropped, so nothing resets the answer
        assert await reader.read() == b""
        assert served.requests == []


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


async def test_unfinished_bodies_share_a_bound() -> None:
    async with serving(limits=ServerLimits(bodies_bytes_max=1500)) as served:
        _, first = await served.connect(POST + b"Content-Length: 1001\r\n\r\n" + b"x" * 1000)
        await until(lambda: served.server.bodies_bytes == 1000)
        reader, _ = await served.connect(POST + b"Content-Length: 1001\r\n\r\n" + b"x" * 1000)
        assert await refusal(reader) == (503, "server_busy")
        assert served.server.bodies_bytes == 1000
        first.write(b"x")
        await until(lambda: len(served.requests) == 1)
        assert served.server.bodies_bytes == 0  # it is small, and has come whole


async def test_whole_bodies_share_a_bound_until_they_are_let_go() -> None:
    sent = POST + b"Content-Length: 5000\r\n\r\n" + b"x" * 5000
    async with serving(wait, limits=ServerLimits(bodies_bytes_max=12_000)) as served:
        clients = [await served.connect() for _ in range(2)]
        for number, (_, writer) in enumerate(clients):
            writer.write(sent)
            await served.responder(number)
        assert served.server.bodies_bytes == 10_000
        reader, third = await served.connect(sent)
        assert statuses_of((await read_answer(reader))[0]) == [503]
        assert served.server.bodies_bytes == 10_000
        (await served.responder(0)).let_body_go()
        assert served.server.bodies_bytes == 5000
        (await served.responder(1)).respond(200, [], b"")
        assert served.server.bodies_bytes == 0
        (await served.responder(0)).respond(200, [], b"")
        assert served.server.bodies_bytes == 0
        for _, writer in (*clients, (reader, third)):
            writer.close()


async def test_connections_beyond_the_limit_are_told_so() -> None:
    async with serving(wait, limits=ServerLimits(connections_max=1, linger_s=1000)) as served:
        reader, writer = await served.connect(POST + b"Connection: close\r\nContent-Length: 0\r\n\r\n")
        responder = await served.responder()
        beyond, staying = await served.connect()
        assert await refusal(beyond) == (503, "server_busy")
        await until(lambda: len(served.server.connections) == 1)  # it takes no room, though its client stays
        staying.close()
        responder.respond(200, [], b"")
        assert statuses_of(await reader.read()) == [200]
        writer.close()
        await until(lambda: len(served.server.connections) == 0)
        served.server.handler = echo
        assert statuses_of(await served.exchange(b"GET / HTTP/1.0\r\n\r\n")) == [200]


async def test_the_idlest_connection_makes_room_for_a_new_one(quick_sweep: None) -> None:
    """Idle ones and half-sent heads alike; what is being asked or answered never goes."""

    def behave(request: HttpRequest, responder: Responder) -> None:
        if request.path != "/wait":
            echo(request, responder)

    async with serving(behave, limits=ServerLimits(connections_max=4)) as served:
        clients = []
        for sent in (b"GET /wait HTTP/1.1\r\nHost: x\r\n\r\n", b"GET /half HTTP/1.1\r\nHo", b"", None):
            reader, writer = await served.connect()
            if sent is None:
                writer.write(POST + b"Content-Length: 5\r\n\r\nhel")
                await until(lambda: served.server.bodies_bytes == 3)
            else:
                writer.write(sent)
            clients.append((reader, writer))
            was = served.server.now
            await until(lambda was=was: served.server.now > was)
        await served.responder()
        for gone in (1, 2):
            assert statuses_of(await served.exchange(b"GET / HTTP/1.0\r\n\r\n")) == [200]
            await until(lambda: len(served.server.connections) < 4)
            reader, writer = await served.connect()
            clients.append((reader, writer))
            if gone == 1:
                assert await clients[1][0].read() == b""
                writer.write(b"GET / HTTP/1.1\r\nHost: x\r\n\r\n")
                assert statuses_of((await read_answer(reader))[0]) == [200]
            await until(lambda: len(served.server.connections) == 4)
        assert await clients[2][0].read() == b""
        served.responders[0].respond(200, [], b"")
        assert statuses_of((await read_answer(clients[0][0]))[0]) == [200]
        clients[3][1].write(b"lo")
        assert statuses_of((await read_answer(clients[3][0]))[0]) == [200]


def asked(key: bytes, length: int = 0) -> bytes:
    return POST + b"Authorization: %b\r\nContent-Length: %d\r\n\r\n" % (key, length)


async def test_one_address_has_only_so_many_connections() -> None:
    async with serving(limits=ServerLimits(client_connections_max=2)) as served:
        clients = [await served.connect() for _ in range(2)]
        reader, writer = await served.connect()
        assert await refusal(reader) == (429, "too_many_at_once")
        writer.close()
        clients[0][1].close()
        await until(lambda: len(served.server.connections) == 1)
        assert statuses_of(await served.exchange(b"GET / HTTP/1.0\r\n\r\n")) == [200]


def test_an_account_without_bytes_and_connections_is_forgotten() -> None:
    accounts = Accounts("all", 1, 100)
    for body_bytes in (0, 50, 50, -100, 0):
        accounts.hold("one", body_bytes)
    assert len(accounts) == 0


PROXIES = TrustedProxies(["127.0.0.0/8"])


async def test_one_tenant_has_only_so_many_connections() -> None:
    async with serving(wait, ServerLimits(client_connections_max=2), on_head=account_of) as served:
        served.server.addresses = Accounts("all", 1000, 1 << 30)
        clients = [await served.connect() for _ in range(3)]
        for index, (_, writer) in enumerate(clients[:2]):
            writer.write(asked(b"one"))
            await served.responder(index)
        clients[2][1].write(asked(b"one", 100))
        assert await refusal(clients[2][0]) == (429, "too_many_at_once")
        assert len(served.requests) == 2
        reader, writer = await served.connect(asked(b"two"))
        await served.responder(2)  # another tenant does not notice
        writer.write(asked(b"one"))
        served.responders[2].respond(200, [], b"")
        assert statuses_of((await read_answer(reader))[0]) == [200]
        assert statuses_of((await read_answer(reader))[0]) == [429]  # whoever changes the key is counted again
        clients[0][1].close()
        await until(lambda: len(served.server.connections) <= 3)
        await served.connect(asked(b"one"))
        await served.responder(3)


@pytest.mark.parametrize("same", ["tenant", "address"])
async def test_one_client_holds_only_so_much_of_unfinished_bodies(same: str) -> None:
    """By its key from anywhere, and by its address with any key."""
    async with serving(
        limits=ServerLimits(client_bodies_bytes_max=1500), on_head=account_of, proxies=PROXIES
    ) as served:

        def sent(client: int, size: int) -> bytes:
            key, address = (b"k", b"10.0.0.%d" % client) if same == "tenant" else (b"k%d" % client, b"10.0.0.9")
            return (
                POST + b"Authorization: %b\r\nX-Forwarded-For: %b\r\nContent-Length: 1001\r\n\r\n" % (key, address)
                + b"x" * size
            )  # fmt: skip

        _, first = await served.connect(sent(1, 1000))
        await until(lambda: served.server.bodies_bytes == 1000)
        reader, _ = await served.connect(sent(2, 1000))
        assert await refusal(reader) == (429, "too_many_at_once")
        assert served.server.bodies_bytes == 1000
        _, other = await served.connect(asked(b"somebody else", 1001) + b"x" * 1000)
        await until(lambda: served.server.bodies_bytes == 2000)
        other.write(b"x")
        first.write(b"x")
        await until(lambda: len(served.requests) == 2)
        assert served.server.bodies_bytes == 0


def half_a_head(size: int) -> bytes:
    return POST + b"A: " + b"a" * size


async def test_the_unfinished_heads_of_an_address_share_a_bound() -> None:
    async with serving(limits=ServerLimits(header_bytes_max=2000), on_head=account_of) as served:
        _, first = await served.connect(half_a_head(1500))
        for _ in range(3):  # what was refused is not held
            reader, second = await served.connect(half_a_head(1000))
            assert await refusal(reader) == (429, "too_many_at_once")
            second.close()
        first.close()
        await until(lambda: len(served.server.connections) == 0)
        clients = [await served.connect() for _ in range(3)]
        for reader, writer in clients:  # nor what became a request, or was left behind
            writer.write(half_a_head(1500))
            writer.write(b"\r\nAuthorization: k\r\n\r\n")
            assert statuses_of((await read_answer(reader))[0]) == [200]
        for _, writer in clients:  # these have shown a key
            writer.write(half_a_head(1500))
        for reader, writer in clients:
            writer.write(b"\r\n\r\n")
            assert statuses_of((await read_answer(reader))[0]) == [200]


async def test_a_trusted_proxy_has_as_many_connections_and_unfinished_heads_as_it_needs() -> None:
    limits = ServerLimits(client_connections_max=1, header_bytes_max=2000)
    async with serving(limits=limits, on_head=account_of, proxies=PROXIES) as served:
        clients = [await served.connect(half_a_head(1500)) for _ in range(5)]
        for number, (reader, writer) in enumerate(clients):
            writer.write(b"\r\nAuthorization: k%d\r\n\r\n" % number)
            assert statuses_of((await read_answer(reader))[0]) == [200]


async def test_of_answers_that_are_not_taken_the_tenant_that_has_most_loses_one() -> None:
    most = 20_000_000
    async with serving(wait, limits=ServerLimits(answers_bytes_max=most), on_head=account_of) as served:
        clients = []
        for number in range(12):
            clients.append(await served.connect())
            clients[-1][0]._transport.pause_reading()  # type: ignore[attr-defined]
            clients[-1][1].write(asked(b"flood" if number else b"one"))
            (await served.responder(number)).respond(200, [], b"x" * 7_000_000)
            await until(lambda: served.server.answers_bytes <= most)
        await until(lambda: len(served.server.connections) < 12)
        held = [connection.tenant for connection in served.server.answers]
        assert "one" in held, "who has one answer keeps it, whatever others hold"
        assert len(held) < 12
        for _, writer in clients:
            writer.transport.abort()
        await until(lambda: not served.server.answers_bytes)
