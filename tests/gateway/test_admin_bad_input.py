"""Whatever an operator's client writes: the admin listener says what is wrong with it, and never that it failed."""

from __future__ import annotations

import asyncio
from pathlib import Path
from urllib.parse import quote

import pytest

from tests.gateway.live import Live, Starter, raw_exchange, simulated
from tests.kit.keys import TOKEN

LOCAL = b"Host: localhost"
HOSTS = [
    "a:b", "a:99999", "a:-1", "[::1]:x", "[::1", "[gggg]", "[v1.a]", "\u00e9", "\xff", "xn--", "http://[", "a@b", "",
    "a,b",
]  # fmt: skip
TIMES = [
    *("9999-12-31T23:59", "9999-12-31", "0001-01-01", "0001-01-01T00:00+14:00", "9999-12-31T23:59-14:00", "99999d"),
    *("99999h", "0d", "", "-1", "\0", "2027-W01-1", "1969-12-31T23:59", "2027-01-31T12:00+23:59:59.999999"),
]
TARGETS = ["*", "http://[/usage", "http://a:b/usage", "//", "/%", "/%00", "/explain/%ff", "/drain/%00", "/usage?by=%ff"]
ORIGINS = ["http://[", "http://[::1", "http://a]b", "null", "", "http://a:b", "\xff"]
FIELDS = ["Last-Event-ID: x", "Authorization: Bearer \xff", "Accept: \xff", "Range: bytes=9-1", "Forwarded: ["]


async def status(live: Live, line: str, *fields: bytes, body: bytes = b"") -> int:
    """What is answered to these bytes. Text is written as latin-1."""
    head = [line.encode("latin-1"), *fields, b"Connection: close", b"Content-Length: %d" % len(body)]
    got = await raw_exchange(live.gateway.admin_port, b"\r\n".join(head) + b"\r\n\r\n" + body)
    return int(got.split(b" ", 2)[1])


@pytest.mark.parametrize("token", [None, TOKEN])
async def test_no_head_is_a_fault_of_the_gateway(start: Starter, tmp_path: Path, token: str | None) -> None:
    asks = [f"Authorization: Bearer {token}".encode()] if token else []
    async with simulated() as sim, start(sim.url, usage=str(tmp_path / "usage.db"), admin_token=token) as live:
        for host in HOSTS:
            for path in ("/", "/health", "/state", "/usage"):
                got = await status(live, f"GET {path} HTTP/1.1", b"Host: " + host.encode("latin-1"), *asks)
                assert got in (200, 400, 421), (host, path)
        for name in ("a:b", "\u00e9", "http://["):
            assert await status(live, "GET /state HTTP/1.1", b"Host: " + name.encode("latin-1"), *asks) == 400
        for time in TIMES:
            for query in (
                f"since={quote(time)}",
                f"until={quote(time)}",
                f"since={quote(time)}&until={quote(time)}&by=day",
            ):
                assert await status(live, f"GET /usage?{query} HTTP/1.1", LOCAL, *asks) in (200, 400), query
        assert await status(live, "GET /usage?until=9999-12-31T23:59 HTTP/1.1", LOCAL, *asks) == 400
        for target in TARGETS:
            for method in ("GET", "HEAD", "POST", "DELETE", "OPTIONS"):
                assert await status(live, f"{method} {target} HTTP/1.1", LOCAL, *asks) < 500, (method, target)
        for origin in ORIGINS:
            for path in ("/reload", "/drain/x", "/resume/x"):
                sent = b"Origin: " + origin.encode("latin-1")
                assert await status(live, f"POST {path} HTTP/1.1", LOCAL, sent, *asks) in (400, 403), (origin, path)
        for field in FIELDS:
            assert await status(live, "GET /state HTTP/1.1", LOCAL, field.encode("latin-1")) < 500, field


async def test_what_is_no_http_leaves_no_traceback(start: Starter, caplog: pytest.LogCaptureFixture) -> None:
    asks = b"POST /reload HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer " + TOKEN.encode() + b"\r\n"
    sent = [
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03", b"GET / HTTP/1.1\r\nHost: a\r\nContent-Length: x\r\n\r\n",
        b"GET //[ HTTP/1.1\r\nHost: localhost\r\n\r\n", asks + b"Transfer-Encoding: chunked\r\n\r\nzz\r\n",
        asks + b"Content-Encoding: gzip\r\nContent-Length: 5\r\n\r\nabcde", asks + b"Content-Length: 50\r\n\r\nabcde",
    ]  # fmt: skip
    async with simulated() as sim, start(sim.url, admin_token=TOKEN) as live:
        for each in sent:
            reader, writer = await asyncio.open_connection("127.0.0.1", live.gateway.admin_port)
            writer.write(each)
            writer.write_eof()
            await reader.read()
            writer.close()
        assert await status(live, "GET /health HTTP/1.1", LOCAL) == 200
    assert [record.getMessage() for record in caplog.records if record.exc_info] == []
