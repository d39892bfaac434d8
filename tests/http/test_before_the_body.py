"""What is said before a body is read: 100 Continue, or a refusal by the head alone."""

from __future__ import annotations

import json

import pytest

from gateway.http.errors import ApiError, Reason
from gateway.http.http_request import HttpRequest
from gateway.http.server_limits import ServerLimits
from tests.http.http_raw import CHUNKED, POST, echo, read_answer, serving, statuses_of


async def test_who_is_refused_before_it_is_read_is_told_to_whoever_wants_to_know() -> None:
    refused: list[tuple[str, str, str, str]] = []

    def note(request: HttpRequest, error: ApiError) -> None:
        refused.append((error.code.value, request.path, request.client, request.id))

    async with serving(limits=ServerLimits(body_bytes_max=10), on_refused=note) as served:
        for payload in (b"nonsense\r\n\r\n", POST + b"Content-Length: 11\r\n\r\n", CHUNKED + b"b\r\n"):
            answer = await served.exchange(payload)
            assert b"x-request-id: " + refused[-1][3].encode() in answer
    assert [(code, path) for code, path, _, _ in refused] == [
        ("malformed_http", ""),
        ("body_too_large", "/a"),
        ("body_too_large", "/a"),
    ]
    assert {client for _, _, client, _ in refused} == {"127.0.0.1"}


@pytest.mark.parametrize("framing", [b"Content-Length: 5\r\n", b"Transfer-Encoding: chunked\r\n"])
async def test_100_continue_is_sent_when_the_body_is_wanted(framing: bytes) -> None:
    async with serving() as served:
        reader, writer = await served.connect(POST + framing + b"Expect: 100-continue\r\n\r\n")
        assert await reader.readuntil(b"\r\n\r\n") == b"HTTP/1.1 100 Continue\r\n\r\n"
        writer.write(b"hello" if b"Length" in framing else b"5\r\nhello\r\n0\r\n\r\n")
        assert (await read_answer(reader))[1] == b"POST /a hello"


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
        reader, _ = await served.connect(POST + b"Expect: 100-continue\r\nContent-Length: 10000000\r\n\r\n")
        head, _ = await read_answer(reader)
        assert statuses_of(head) == [401]
        assert b"connection: close" in head
        assert served.server.state.bodies_bytes == 0


async def test_the_head_hook_keeps_a_connection_without_a_body_and_lets_others_pass() -> None:
    async with serving(on_head=refuse_without_key) as served:
        reader, writer = await served.connect(b"GET /a HTTP/1.1\r\nHost: x\r\n\r\n")
        assert statuses_of((await read_answer(reader))[0]) == [401]
        assert served.requests == []
        writer.write(POST + b"Authorization: Bearer k\r\nContent-Length: 5\r\n\r\nhello")
        assert (await read_answer(reader))[1] == b"POST /a hello"


async def test_a_head_hook_that_fails_gives_500(caplog: pytest.LogCaptureFixture) -> None:
    def fail(request: HttpRequest) -> None:
        raise LookupError

    async with serving(on_head=fail) as served:
        assert statuses_of(await served.exchange(b"GET / HTTP/1.0\r\n\r\n")) == [500]
        assert "the head hook failed" in caplog.text


async def test_refusals_speak_the_dialect_of_the_path() -> None:
    async with serving(echo, ServerLimits(client_body_s=0)) as served:
        served.server.state.on_head = raise_busy
        answer = await served.exchange(b"POST /v1/messages HTTP/1.0\r\n\r\n")
        assert json.loads(answer.partition(b"\r\n\r\n")[2])["type"] == "error"


def raise_busy(request: HttpRequest) -> None:
    raise ApiError(Reason.SERVER_BUSY, "busy")
