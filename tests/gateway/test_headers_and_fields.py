"""What a client sends to steer the engine, or to be taken for somebody else, never reaches a backend."""

from __future__ import annotations

import json

from gateway.config.sections.keys import hash_key
from tests.gateway.capture import Upstream, answer, replies
from tests.gateway.live import MODEL, Starter, chat, simulated
from tests.kit.forms import STEERING

OK = answer(b'{"usage":{"prompt_tokens":3,"completion_tokens":1}}', b"Set-Cookie: s=1", b"X-Request-Id: engine-1")
PRIVATE_HEADERS = {
    "x-api-key": "tenant-key-1", "api-key": "tenant-key-2", "cookie": "session=tenant", "x-request-id": "client-id",
    "x-vllm-priority": "-9", "x-data-parallel-rank": "1", "x-session-id": "s", "x-fairgate-app": "default",
    "x-fairgate-user": "u1", "x-fairgate-tenant": "somebody-else", "x-forwarded-for": "10.0.0.1",
    "proxy-authorization": "Basic eA==", "accept-encoding": "gzip", "connection": "keep-alive, x-hop", "x-hop": "1",
    "te": "trailers",
}  # fmt: skip


async def test_no_header_of_identity_or_steering_reaches_the_engine(start: Starter) -> None:
    async with Upstream(replies(OK)) as upstream, start(upstream.url) as live:
        headers = {**PRIVATE_HEADERS, "authorization": "Bearer tenant-key", "x-harmless": "kept"}
        url = live.url + "/v1/chat/completions"
        async with live.http.post(url, data=json.dumps(chat()), headers=headers) as response:
            assert response.status == 200
            [request_id] = response.headers.getall("x-request-id")
            assert "set-cookie" not in response.headers
        [seen] = upstream.requests
        of_http = {"host", "x-request-id", "content-length", "content-type", "user-agent", "accept"}
        assert set(seen.headers) == {*of_http, "x-harmless"}
        assert seen.headers["host"] == upstream.url.removeprefix("http://")
        assert seen.headers["x-request-id"] == request_id != "client-id"
        assert b"tenant" not in seen.head


async def test_the_backend_gets_its_own_key_from_the_config(start: Starter) -> None:
    async with Upstream(replies(OK)) as upstream:
        pools = [{"name": "p", "backends": [{"url": upstream.url, "api_key": "engine-key"}]}]
        async with start(pools=pools) as live:
            live.has_response(key="tenant-key")
            for path in ("/v1/chat/completions", "/v1/responses/r1/cancel", "/tokenize"):
                assert (await live.ask(path, chat(), key="tenant-key")).status == 200
                seen = upstream.requests.pop()
                assert seen.headers["authorization"] == "Bearer engine-key", path
                assert b"tenant-key" not in seen.head, path


JSON_PATHS = [
    *("/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/messages", "/v1/messages/count_tokens"),
    *("/v1/embeddings", "/v1/rerank", "/v2/rerank", "/rerank", "/v1/score", "/score", "/pooling", "/classify"),
    *("/tokenize", "/detokenize", "/v1/responses/r1/cancel", "/v1/new", "/v1/new-pass"),
]


async def test_no_field_that_steers_the_engine_reaches_it(start: Starter) -> None:
    routes = [{"path": "/v1/new", "treatment": "generate"}, {"path": "/v1/new-pass", "treatment": "pass"}]
    async with Upstream(replies(OK)) as upstream, start(upstream.url, routes=routes) as live:
        live.has_response()
        for path in JSON_PATHS:
            for fields in ({"stream": False}, {"stream": True}, {"comment": "x" * 400_000}):  # which is read in slices
                body = chat(temperature=0.5, **fields)
                await live.ask(path, {**STEERING, **body})
                await live.ask(path, {**body, **STEERING})
                for seen in upstream.requests:
                    assert not set(STEERING) & set(seen.json), path
                    assert {**body, **seen.json, "stream_options": 0} == {**body, "stream_options": 0}, path
                assert len(upstream.requests) == 2, path
                upstream.requests.clear()


async def test_neither_words_nor_keys_are_in_the_log_or_in_the_metrics(start: Starter) -> None:
    secret = "xyzzy-plugh"
    tenants = [{"name": "t"}]
    async with simulated(time_scale=0) as sim, start(sim.url, tenants=tenants) as live:
        key = live.gateway.minted_keys[0].key
        for path, body in (
            ("/v1/chat/completions", chat(secret, stream=True, max_tokens=5)),
            ("/v1/chat/completions", chat(secret, max_tokens=5)),
            ("/v1/embeddings", {"model": MODEL, "input": secret}),
            ("/v1/chat/completions", chat(secret, n=0)),
        ):
            answer = await live.ask(path, body, key=key, x_fairgate_user=secret, cookie=secret)
            assert answer.status in (200, 400)
        await live.ask("/v1/chat/completions", chat(), key=secret)
        await live.lines(3)
        page = (await live.get("/metrics", admin=True)).body
        for text in (live.log.read_bytes(), page):
            assert text
            assert secret.encode() not in text
            assert key.encode() not in text
            assert b" the" not in live.log.read_bytes()  # the simulated engine's words


async def test_a_claim_to_another_app_is_refused(start: Starter) -> None:
    async with Upstream(replies(OK)) as upstream:
        tenants = [{"name": "t", "keys": [{"hash": hash_key("secret-key"), "apps": ["chat", "batch"]}]}]
        async with start(upstream.url, tenants=tenants) as live:
            allowed = await live.ask("/v1/chat/completions", chat(), key="secret-key", x_fairgate_app="batch")
            forged = await live.ask("/v1/chat/completions", chat(), key="secret-key", x_fairgate_app="agents")
            assert (allowed.status, forged.status) == (200, 403)
            assert forged.error["code"] == "app_not_allowed"
            assert len(upstream.requests) == 1
            [line] = [line for line in await live.lines(1) if line["outcome"] == "completed"]
            assert (line["tenant"], line["app"]) == ("t", "batch")
