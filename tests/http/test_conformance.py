"""The whole gateway keeps to HTTP: every case of the table, and what reached the engine."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from gateway.config.sections.keys import hash_key
from tests.gateway.capture import Upstream, answer, replies
from tests.gateway.live import Starter
from tests.http.conformance import ASKED, BODY
from tests.http.http_raw import WAIT_S, status_of

OK = answer(b'{"usage":{"prompt_tokens":3,"completion_tokens":1}}')
NO_BODY = b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\n"
TENANTS = [{"name": "t", "keys": [hash_key("known")]}]
NEXT = b"GET /health HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n"


@pytest.mark.parametrize("name", ASKED)
async def test_a_case(name: str, tmp_path: Path) -> None:
    case = ASKED[name]
    upstream = Upstream(replies(NO_BODY if case.sent.startswith(b"HEAD") else OK))
    async with upstream, Starter(tmp_path)(upstream.url, tenants=TENANTS) as live:
        reader, writer = await asyncio.open_connection("127.0.0.1", live.gateway.port)
        writer.write(case.sent)
        async with asyncio.timeout(WAIT_S):
            head = await reader.readuntil(b"\r\n\r\n")
        assert status_of(head) == case.status
        assert (b"connection: close\r\n" in head) == case.closes
        writer.write(NEXT)
        async with asyncio.timeout(WAIT_S):
            rest = await reader.read()
        assert (b"HTTP/1.1 200 OK" in rest) == (not case.closes)  # the next request is answered, or never read
        assert [seen.line for seen in upstream.requests] == ([case.reaches] if case.reaches is not None else [])
        for seen in upstream.requests:
            assert seen.unsalted == (BODY if case.reaches is not None and case.reaches.startswith(b"POST") else b"")
            assert not {"upgrade", "http2-settings", "transfer-encoding", "expect"} & set(seen.headers)
        writer.close()
        await asyncio.gather(writer.wait_closed(), return_exceptions=True)
