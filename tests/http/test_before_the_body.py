"""What is said before a body is read: 100 Continue, or a refusal by the head alone."""

from __future__ import annotations

import pytest

from gateway.http.errors import ApiError
from gateway.http.http_request import HttpRequest
from gateway.http.server_limits import ServerLimits
from tests.http.http_raw import CHUNKED, POST, read_answer, serving, statuses_of


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


async def test_a_head_hook_that_fails_gives_500(caplog: pytest.LogCaptureFixture) -> None:
    def fail(request: HttpRequest) -> None:
        raise LookupError

    async with serving(on_head=fail) as served:
        assert statuses_of(await served.exchange(b"GET / HTTP/1.0\r\n\r\n")) == [500]
        assert "the head hook failed" in caplog.text
