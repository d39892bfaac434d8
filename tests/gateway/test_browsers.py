"""Pages in browsers may call from the origins that the config names, and from no other."""

from __future__ import annotations

import json

import pytest

from tests.gateway.capture import DONE, STREAM_END, STREAM_HEAD, Upstream, answer, chunk, replies, token
from tests.gateway.live import Starter, chat

ENGINES = b"Access-Control-Allow-Origin: *", b"Access-Control-Allow-Credentials: true"  # as vLLM says by default
OK = answer(b'{"usage":{"prompt_tokens":3,"completion_tokens":1}}', *ENGINES)
PATH = "/v1/chat/completions"
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
    async with Upstream(replies(OK)) as upstream, start(upstream.url, cors_origins=origins, tenants=tenants) as live:
        key = live.gateway.minted_keys[0].key
        for path, body, sent, status in (
            (PATH, chat(), key, 200),
            (PATH, b"{", key, 400),
            (PATH, chat(), None, 401),
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
        async with live.http.options(live.url + PATH, headers=headers) as response:
            assert response.status == 204
            assert response.headers.get(ORIGIN) == allowed
            names = response.headers.get("access-control-allow-headers")
            assert names == (headers["access-control-request-headers"] if allowed else None)
            assert response.headers.get("access-control-allow-methods") == ("POST, OPTIONS" if allowed else None)


async def test_a_stream_may_be_read_by_a_page(start: Starter) -> None:
    sent = STREAM_HEAD + chunk(token("a") + DONE) + STREAM_END
    async with Upstream(replies(sent)) as upstream, start(upstream.url, cors_origins=[HERE]) as live:
        got = await live.ask(PATH, chat(stream=True), origin=HERE)
        assert got.headers[ORIGIN] == HERE
        assert got.body == token("a") + DONE


async def test_what_a_page_asks_to_send_is_never_repeated_as_it_is(start: Starter) -> None:
    async with Upstream(replies(OK)) as upstream, start(upstream.url, cors_origins=["*"]) as live:
        for names in ("a b", "a;b", "<script>", "x" * 5000, json.dumps("a")):
            headers = {"origin": HERE, "access-control-request-headers": names}
            async with live.http.options(live.url + PATH, headers=headers) as response:
                assert "access-control-allow-headers" not in response.headers
