"""The admin listener asks for its token, and whatever a client writes, says what is wrong and not that it failed."""

from __future__ import annotations

import asyncio
from pathlib import Path
from urllib.parse import quote

import pytest

from tests.commands import running
from tests.gateway.live import Live, Starter, simulated
from tests.http.http_raw import exchange
from tests.kit.keys import TOKEN
from tests.kit.served import config_file
from tests.ports import free_port

CLOSED = ["/metrics", "/explain/req_1", "/state", "/page/", "/health/", "/ready/x", "//health", "/nowhere"]


async def asked(live: Live, path: str, **headers: str) -> int:
    url = f"http://127.0.0.1:{live.gateway.admin_port}{path}"
    async with live.http.get(url, headers=headers) as response:
        return response.status


async def test_the_token_opens_what_nothing_else_does(start: Starter) -> None:
    wrong = ("", TOKEN, f"Bearer {TOKEN}x", f"Bearer {TOKEN[:-1]}", f"Basic {TOKEN}", "Bearer", "Bearer \u00e9")
    async with simulated() as sim, start(sim.url, admin_token=TOKEN) as live:
        assert [await asked(live, path) for path in ("/health", "/ready")] == [200, 200], "probes have none"
        for path in CLOSED:
            for sent in wrong:
                assert await asked(live, path, **({"authorization": sent} if sent else {})) == 401, (path, sent)
        got = await live.get("/metrics", admin=True, key=None)
        assert got.headers["www-authenticate"] == "Bearer"
        assert TOKEN not in got.body.decode()
        assert (await live.get("/metrics", admin=True, key=TOKEN)).status == 200
        assert (await live.get("/explain/req_1", admin=True, key=TOKEN)).status == 404
        assert await asked(live, "/metrics", authorization=f"bearer  {TOKEN}") == 200


async def test_without_a_token_a_web_page_cannot_read_it_by_a_name_of_its_own(start: Starter) -> None:
    async with simulated() as sim, start(sim.url) as live:
        port = live.gateway.admin_port
        evil = ("evil.example", f"evil.example:{port}", f"127.0.0.1.evil.example:{port}", "localhost.evil.example")
        for path in ("/metrics", "/", "/state", "/health"):
            for host in evil:
                assert await asked(live, path, host=host) == 421, (path, host)
            for host in (f"127.0.0.1:{port}", f"localhost:{port}", "localhost", f"[::1]:{port}", "fairgate.localhost"):
                assert await asked(live, path, host=host) == 200, (path, host)
    async with simulated() as sim, start(sim.url, admin_token=TOKEN) as live:
        assert await asked(live, "/metrics", host="gateway.example", authorization=f"Bearer {TOKEN}") == 200


@pytest.mark.parametrize("workers", [1, 2])
async def test_the_start_warns_of_it_once(tmp_path: Path, workers: int) -> None:
    url = f"http://127.0.0.1:{free_port()}"
    async with running("serve", "-c", config_file(tmp_path, url, admin="0.0.0.0:0", workers=workers)) as command:
        await command.says("serving on")
        assert command.said.count("each client that reaches 0.0.0.0:0 reads /metrics and /explain") == 1


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
    got = await exchange(live.gateway.admin_port, b"\r\n".join(head) + b"\r\n\r\n" + body)
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
