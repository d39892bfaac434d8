"""Raw bytes to and from a server under test, and a server that records what it was asked."""

from __future__ import annotations

import asyncio
import json
import re
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from gateway.http.accounts import ServerLimits
from gateway.http.connection import Connection
from gateway.http.errors import ApiError
from gateway.http.headers import header_of
from gateway.http.http_request import HttpRequest, RequestReader
from gateway.http.responder import Responder
from gateway.http.server import Handler, HttpServer
from tests.waiting import WAIT_S, until

GET = b"GET /a HTTP/1.1\r\nHost: x\r\n\r\n"
GET_CLOSE = b"GET /a HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n"
POST = b"POST /a HTTP/1.1\r\nHost: x\r\n"
CHUNKED = POST + b"Transfer-Encoding: chunked\r\n\r\n"
SMUGGLED = b"GET /smuggled HTTP/1.1\r\nHost: x\r\n\r\n"


def echo(request: HttpRequest, responder: Responder) -> None:
    """Answer at once with what was asked."""
    body = b"%b %b %b" % (request.method.encode(), request.head.target, request.body)
    responder.respond(200, [(b"content-type", b"text/plain")], body)


class Served:
    """A running server, the requests its handler got and their responders."""

    def __init__(self, behave: Handler, limits: ServerLimits, **hooks: Any) -> None:
        self.requests: list[HttpRequest] = []
        self.responders: list[Responder] = []
        self.clients: list[asyncio.StreamWriter | socket.socket] = []
        """What is closed at the end."""
        self._behave = behave
        self.server = HttpServer(Connection, self._handle, limits, **{"on_refused": lambda *_: None, **hooks})
        self.port = 0

    def _handle(self, request: HttpRequest, responder: Responder) -> None:
        self.requests.append(request)
        self.responders.append(responder)
        self._behave(request, responder)

    async def connect(self, payload: bytes = b"") -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        """A client that has sent so much."""
        reader, writer = await asyncio.open_connection("127.0.0.1", self.port, limit=1 << 24)
        self.clients.append(writer)
        writer.write(payload)
        return reader, writer

    def client_that_sends(self, payload: bytes) -> socket.socket:
        """A client that reads nothing on its own."""
        sock = socket.create_connection(("127.0.0.1", self.port))
        self.clients.append(sock)
        sock.setblocking(False)
        sock.sendall(payload)
        return sock

    async def exchange(self, payload: bytes) -> bytes:
        """Send, and read until the server ends the connection."""
        return await exchange(self.port, payload)

    async def responder(self, index: int = 0) -> Responder:
        """The responder of the index-th request, once that has arrived."""
        await until(lambda: len(self.responders) > index)
        return self.responders[index]


async def exchange(port: int, payload: bytes) -> bytes:
    """Send, and read until the server ends the connection. It may do so before it has read all: what it said counts."""
    loop, said = asyncio.get_running_loop(), b""
    with socket.socket() as client:
        client.setblocking(False)
        async with asyncio.timeout(WAIT_S):
            await loop.sock_connect(client, ("127.0.0.1", port))
            sending = asyncio.ensure_future(loop.sock_sendall(client, payload))
            try:
                while data := await loop.sock_recv(client, 1 << 16):
                    said += data
            except ConnectionError:
                pass
            finally:
                sending.cancel()
                await asyncio.gather(sending, return_exceptions=True)
    return said


async def read_answer(reader: asyncio.StreamReader) -> tuple[bytes, bytes]:
    """One answer with content-length, or a chunked one: its head and its decoded body."""
    async with asyncio.timeout(WAIT_S):
        head = await reader.readuntil(b"\r\n\r\n")
        fields = dict(line.split(b": ", 1) for line in head.split(b"\r\n")[1:-2])
        if b"content-length" in fields:
            return head, await reader.readexactly(int(fields[b"content-length"]))
        body = b""
        while size := int(await reader.readuntil(b"\r\n"), 16):
            body += (await reader.readexactly(size + 2))[:-2]
        await reader.readexactly(2)
        return head, body


async def refusal(reader: asyncio.StreamReader) -> tuple[int, str]:
    """The status and the code of a refusal, which says when to ask again where that helps."""
    head, body = await read_answer(reader)
    [status] = statuses_of(head)
    assert (b"retry-after: " in head) == (status in (429, 503))
    return status, json.loads(body)["error"]["code"]


_STATUS_LINE = re.compile(rb"HTTP/1\.[01] ([0-9]{3}) [A-Za-z '-]+\r\n")


def statuses_of(answers: bytes) -> list[int]:
    """The statuses of all answers, in order."""
    return [int(status) for status in _STATUS_LINE.findall(answers)]


def status_of(answer: bytes) -> int:
    """The status of the first answer; 0 if there is none."""
    return int(answer[9:12]) if answer else 0


@asynccontextmanager
async def serving(behave: Handler = echo, limits: ServerLimits | None = None, **hooks: Any) -> AsyncIterator[Served]:
    """A server with this handler, these limits and what else `HttpServer` takes."""
    served = Served(behave, limits or ServerLimits(), **hooks)
    served.port = await served.server.listen("127.0.0.1", 0)
    try:
        yield served
    finally:
        for client in served.clients:
            client.close()
        await served.server.close(0)
        assert len(served.server.connections) == 0
        assert served.server.bodies_bytes == 0
        assert len(served.server.addresses) == len(served.server.tenants) == 0


async def send(writer: asyncio.StreamWriter, size: int) -> None:
    """So many bytes, as fast as they are taken."""
    for _ in range(size // 100_000):
        writer.write(b"x" * 100_000)
        await writer.drain()


def wire(request: HttpRequest) -> tuple[object, ...]:
    """What of a request comes from the network."""
    return request.method, request.head.target, request.headers, request.body, request.head.version


def found(reader: RequestReader, *pieces: bytes) -> list[object]:
    """Return what the reader reads of these bytes, up to their end or to their refusal."""
    read: list[object] = []
    try:
        for piece in pieces:
            at = 0
            while at < len(piece):
                at = reader.take_head(piece, at) if reader.request is None else reader.take_body(piece, at)
                if reader.complete and reader.request is not None:
                    request = reader.request
                    read.append((*wire(request), request.client_id, request.body_follows, request.head.keep_alive))
                    read.append((request.head.expects_continue, reader.path))
                    reader.reset()
    except ApiError as error:
        return [*read, error.code, str(error)]
    return [*read, "end"]


def account_of(request: HttpRequest) -> None:
    """A head hook: whoever shows a key is known by it."""
    request.tenant = header_of(request.headers, b"authorization").decode()


def wait(request: HttpRequest, responder: Responder) -> None:
    """A handler whose answer the test gives later."""


async def dripped(port: int, first: bytes, drip: bytes) -> list[int]:
    """What is answered to a client that sends a beginning, and then so much again and again, until it is cut?"""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(first)

    async def go_on() -> None:
        while drip:
            writer.write(drip)
            await asyncio.sleep(0.005)

    dripping = asyncio.create_task(go_on())
    answers = b""
    try:
        while piece := await reader.read(65536):
            answers += piece
    except ConnectionResetError:
        pass  # cut while it drips
    dripping.cancel()
    writer.close()
    await asyncio.gather(dripping, writer.wait_closed(), return_exceptions=True)
    return statuses_of(answers)
