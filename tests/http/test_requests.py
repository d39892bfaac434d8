"""A request is read alike in every form of it, and refused before its body where its head is enough."""

from __future__ import annotations

import pytest

from gateway.http.accounts import ServerLimits
from gateway.http.addresses import TrustedProxies
from gateway.http.headers import header_of
from gateway.http.http_request import HttpRequest
from tests.http.http_raw import POST, echo, read_answer, serving, statuses_of


async def test_the_request_says_what_was_asked() -> None:
    async with serving(echo) as served:
        await served.exchange(
            b"GET /a%20b/c?d=%20e HTTP/1.1\r\nHost: x\r\nX-A: 1\r\nx-a: 2\r\nConnection: close\r\n\r\n"
        )
        (request,) = served.requests
        assert (request.method, request.head.version, request.peer) == ("GET", "1.1", "127.0.0.1")
        assert (request.head.target, request.path, request.head.query) == (b"/a%20b/c?d=%20e", "/a%20b/c", b"d=%20e")
        assert request.headers[:3] == [(b"host", b"x"), (b"x-a", b"1"), (b"x-a", b"2")]
        assert header_of(request.headers, b"x-a") == b"1"
        assert header_of(request.headers, b"x-b") == b""


TARGETS = [
    (b"GET http://x/a/b?c=d", b"/a/b?c=d", "/a/b", b"c=d"),
    (b"GET https://x:443/", b"/", "/", b""),
    (b"GET http://x", b"/", "/", b""),
    (b"GET http://x?c", b"/?c", "/", b"c"),
    (b"OPTIONS *", b"*", "*", b""),
    (b"OPTIONS http://x", b"*", "*", b""),
    (b"OPTIONS http://x/", b"/", "/", b""),
]


@pytest.mark.parametrize(("line", "target", "path", "query"), TARGETS)
async def test_every_form_of_a_target_is_read_as_one(line: bytes, target: bytes, path: str, query: bytes) -> None:
    async with serving(echo) as served:
        await served.exchange(line + b" HTTP/1.1\r\nHost: y\r\nConnection: close\r\n\r\n")
        (request,) = served.requests
        assert (request.head.target, request.path, request.head.query) == (target, path, query)


@pytest.mark.parametrize(
    ("value", "taken"),
    [(b"a-1_b.c:d/e", "a-1_b.c:d/e"), (b"a b", ""), (b"\xc3\xa9", ""), (b"", ""), (b"x" * 129, ""), (b'"a"', "")],
)
async def test_what_a_client_calls_its_request_is_kept_if_it_is_well_formed(value: bytes, taken: str) -> None:
    async with serving(echo) as served:
        answer = await served.exchange(b"GET / HTTP/1.0\r\nX-Request-Id: " + value + b"\r\n\r\n")
        (request,) = served.requests
        assert request.client_id == taken
        assert request.id.startswith("req_")
        assert answer


XFF, FORWARDED = b"x-forwarded-for", b"forwarded"


@pytest.mark.parametrize(
    ("fields", "client"),
    [
        ([], "127.0.0.1"),
        ([(XFF, b"10.1.1.1")], "10.1.1.1"),
        ([(XFF, b"6.6.6.6, 10.1.1.1")], "10.1.1.1"),
        ([(XFF, b"6.6.6.6, 8.8.8.8, 172.16.1.1")], "8.8.8.8"),
        ([(XFF, b"8.8.8.8:4711")], "8.8.8.8"),
        ([(XFF, b"no address")], "127.0.0.1"),
        ([(XFF, b"::ffff:8.8.8.8")], "8.8.8.8"),
        ([(XFF, b"[2001:db8:1234:1234:1234:1234:1234:1234]:12345")], "2001:db8:1234:1234:1234:1234:1234:1234"),
        ([(XFF, b"192.0.2.7:" + b"1" * 60)], "127.0.0.1"),  # longer than any address is
        ([(FORWARDED, b'for=6.6.6.6, for="[2001:db8::1]:4711";proto=https')], "2001:db8::1"),
        ([(FORWARDED, b"For=8.8.8.8"), (XFF, b"6.6.6.6")], "8.8.8.8"),
        ([(FORWARDED, b"for=8.8.8.8, for=unknown")], "127.0.0.1"),
        ([(FORWARDED, b"for=8.8.8.8, proto=http")], "127.0.0.1"),
    ],
    ids=str,
)
def test_the_client_is_the_last_hop_that_no_trusted_proxy_is(fields: list[tuple[bytes, bytes]], client: str) -> None:
    assert TrustedProxies(["127.0.0.0/8", "172.16.0.0/12"]).client("127.0.0.1", fields) == client


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
