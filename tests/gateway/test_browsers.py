"""Pages in browsers may call from the origins that the config names, and from no other."""

from __future__ import annotations

import asyncio
import json
from itertools import product

import pytest

from tests.gateway.capture import STREAM, Peer, Seen, Upstream, answer, replies
from tests.gateway.live import CHAT, Starter, chat
from tests.http.http_raw import status_of
from tests.waiting import until

ENGINES = b"Access-Control-Allow-Origin: *", b"Access-Control-Allow-Credentials: true"  # as vLLM says by default
OK = answer(b'{"usage":{"prompt_tokens":3,"completion_tokens":1}}', *ENGINES)
HERE = "https://chat.example.com"
ORIGIN = "access-control-allow-origin"


@pytest.mark.parametrize(
    ("origins", "origin", "allowed"),
    [
        ([], HERE, None),
        ([HERE], HERE, HERE),
        ([HERE], "https://evil.example.com", None),
        ([HERE], "https://chat.example.com.evil.com", None),
        ([HERE], "null", None),
        (["*"], "https://evil.example.com", "*"),
    ],
)
async def test_only_named_origins_may_call(
    start: Starter, origins: list[str], origin: str, allowed: str | None
) -> None:
    tenants = [{"name": "t"}]

    async def script(seen: Seen, peer: Peer) -> None:
        await peer.send(STREAM if seen.json.get("stream") else OK)

    async with Upstream(script) as upstream, start(upstream.url, cors_origins=origins, tenants=tenants) as live:
        key = next(iter(live.gateway.minted_keys.values()))
        for path, body, sent, status in (
            (CHAT, chat(), key, 200),
            (CHAT, chat(stream=True), key, 200),
            (CHAT, b"{", key, 400),
            (CHAT, chat(), None, 401),
            ("/tokenize", chat(), key, 200),
            ("/nowhere", None, key, 404),
        ):
            got = await live.ask(path, body, key=sent, origin=origin)
            assert (got.status, got.headers.get(ORIGIN)) == (status, allowed), path
            assert "access-control-allow-credentials" not in got.headers
            assert ("vary" in got.headers) == (bool(origins) and "*" not in origins)
        assert all("origin" not in seen.headers for seen in upstream.requests)
        headers = {
            "origin": origin,
            "access-control-request-method": "POST",
            "access-control-request-headers": "authorization,content-type,x-stainless-os",
        }
        async with live.http.options(live.url + CHAT, headers=headers) as response:
            assert response.status == 204
            assert response.headers.get(ORIGIN) == allowed
            names = response.headers.get("access-control-allow-headers")
            assert names == (headers["access-control-request-headers"] if allowed else None)
            assert response.headers.get("access-control-allow-methods") == ("POST, OPTIONS" if allowed else None)


HEAD = b"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nORIGIN:  %b \r\n"
REFUSED_UNREAD = {
    413: HEAD + b"Content-Length: 99999999\r\n\r\n",
    414: HEAD.replace(b"/v1", b"/" + b"v1" * 10_000) + b"\r\n",
    417: HEAD + b"Expect: more\r\n\r\n",
    431: HEAD + b"X: " + b"x" * 70_000 + b"\r\n\r\n",
}


async def test_a_page_may_read_why_a_head_is_refused_unread(start: Starter) -> None:
    async with Upstream(replies(OK)) as upstream, start(upstream.url, cors_origins=[HERE]) as live:
        connections = live.server.connections
        origins = ((HERE, True), ("https://evil.example.com", False))
        for status, in_two, (origin, allowed) in product(REFUSED_UNREAD, (False, True), origins):
            reader, writer = await asyncio.open_connection("127.0.0.1", live.gateway.port)
            head = REFUSED_UNREAD[status] % origin.encode()
            cut = head.index(b"\r\n", head.index(b"ORIGIN")) if in_two else 0
            writer.write(head[:cut])
            await until(lambda cut=cut: cut in [len(each._reader.partial) for each in connections])  # type: ignore
            writer.write(head[cut:])
            got = await reader.read()
            writer.close()
            assert status_of(got) == status
            assert (b"\r\n%b: %b\r\n" % (ORIGIN.encode(), HERE.encode()) in got) is allowed
            assert b"evil" not in got


async def test_what_a_page_asks_to_send_is_never_repeated_as_it_is(start: Starter) -> None:
    async with Upstream(replies(OK)) as upstream, start(upstream.url, cors_origins=["*"]) as live:
        for names in ("a b", "a;b", "<script>", "x" * 5000, json.dumps("a")):
            headers = {"origin": HERE, "access-control-request-headers": names}
            async with live.http.options(live.url + CHAT, headers=headers) as response:
                assert "access-control-allow-headers" not in response.headers
