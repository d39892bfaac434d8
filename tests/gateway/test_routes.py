"""Only what is named passes: by its route, however it is written, and nobody unknown makes the gateway hold a body."""

from __future__ import annotations

import asyncio
import json
import re
from pathlib import Path
from typing import Any

import pytest

from backends.vllm_plugin import steps
from gateway.config.paths import KNOWN_PATHS, MANAGEMENT
from gateway.config.sections.keys import hash_key
from gateway.http.errors import ApiError
from gateway.request.routes import RouteKind, Routes
from tests.gateway.capture import OK, Peer, Seen, Upstream, answer, replies
from tests.gateway.live import MODEL, Answer, Starter, chat, until
from tests.http.http_raw import exchange, status_of

APIS = Path(__file__).parents[2] / "docs/apis.md"
BODY = json.dumps(chat()).encode()
TENANTS = [{"name": "t", "keys": [hash_key("known")]}, {"name": "u", "keys": [hash_key("other")]}]

MANAGING = [
    "/v1/load_lora_adapter", "/v1/unload_lora_adapter", "/sleep", "/wake_up", "/is_sleeping", "/collective_rpc",
    "/reset_prefix_cache", "/reset_mm_cache", "/pause", "/resume", "/server_info", "/start_profile", "/stop_profile",
    "/scale_elastic_ep", "/abort_requests", "/inference/v1/generate", "/invocations", "/metrics", "/load", "/docs",
    "/openapi.json", "/update_weights_from_disk", "/flush_cache", "/v1/videos/v1/remix", "/v1/videos",
    "/v1/unheard-of", steps.PATH,
]  # fmt: skip
DISGUISES = [
    "{}/", "/{}", "/v1/..{}", "/v1/chat/completions/../../..{}", "/.{}", "{}?", "{}/.", "{}/..{}", "{};a", "{}%2f",
    "{}%00", "/%2e%2e{}", "\\{}",
]  # fmt: skip


def raw(method: str, path: str, body: bytes = BODY, key: str = "known") -> bytes:
    head = f"{method} {path} HTTP/1.1\r\nHost: x\r\nConnection: close\r\nAuthorization: Bearer {key}\r\n"
    return head.encode() + b"Content-Type: application/json\r\nContent-Length: %d\r\n\r\n" % len(body) + body


def test_the_page_of_apis_says_what_the_routes_are() -> None:
    rows = [line.strip("| ").split(" | ") for line in APIS.read_text().splitlines() if "/" in line and line[0] == "|"]
    here = {RouteKind.MODELS, RouteKind.HEALTH, RouteKind.BATCHES, RouteKind.ME, RouteKind.FILE}
    kinds = {"queue": {RouteKind.ADMIT}, "beside": {RouteKind.PASS}, "here": here}
    routes, said = Routes(), set()
    for *_, paths, method, what in rows:
        for path in re.findall("`([^`]+)`", paths):
            said.add(path)
            if what.startswith("refused"):
                with pytest.raises(ApiError) as refused:
                    routes.find(method, path.replace("*", "x"))
                is_managing = not MANAGEMENT.isdisjoint(path.split("/"))
                assert ("with `routes:`" in refused.value.message) is not is_managing
            else:
                assert routes.find(method, path.replace("*", "x")).kind in kinds[what], path
    assert set(KNOWN_PATHS) <= said


MEANT = {
    ("POST", "/chat/completions"): "POST /v1/chat/completions? base_url ends with /v1",
    ("POST", "/v1/v1/chat/completions"): "POST /v1/chat/completions?",
    ("POST", "/v1/chat/completions/chat/completions"): "POST /v1/chat/completions?",
    ("POST", "/api/v1/completions"): "POST /v1/completions?",
    ("POST", "/openai/deployments/gpt/chat/completions"): "POST /v1/chat/completions?",
    ("POST", "/openai/v1/responses"): "POST /v1/responses?",
    ("GET", "/responses/r1"): "GET /v1/responses/*?",
    ("POST", "/api/chat"): "POST /v1/chat/completions?",
    ("GET", "/api/tags"): "GET /v1/models?",
    ("POST", "/api/embeddings"): "POST /v1/embeddings?",
    ("GET", "/models"): "GET /v1/models?",
    ("PUT", "/v1/v1/files"): "GET /v1/files?",
    ("POST", "/v1/v1/messages"): "POST /v1/messages? base_url ends before /v1 for clients of Anthropic's API",
    ("POST", "/v1/audio/speech"): "",
    ("POST", "/v1/reset_prefix_cache/responses"): "",
    ("POST", "/v1/" + "a/" * 4000 + "b"): "",
}


@pytest.mark.parametrize(("asked", "meant"), MEANT.items())
def test_a_wrong_base_url_is_told_the_path_that_was_meant(asked: tuple[str, str], meant: str) -> None:
    with pytest.raises(ApiError) as refused:
        Routes().find(*asked)
    assert refused.value.code == "not_found"
    assert ("Did you mean" in refused.value.message) is bool(meant)
    assert meant in refused.value.message


async def test_the_root_says_what_is_here_and_a_websocket_is_told_to_ask_over_http(start: Starter) -> None:
    async with Upstream(replies(OK)) as upstream, start(upstream.url, tenants=TENANTS) as live:
        got = await live.get("/", key=None)
        assert (got.status, got.json["service"]) == (200, "fairgate")
        assert "/v1" in got.json["message"]
        head = b"GET /v1/responses HTTP/1.1\r\nHost: x\r\nConnection: %b\r\nAuthorization: Bearer known\r\n"
        probe = (
            head % b"Upgrade, close"
            + b"Upgrade: websocket\r\nSec-WebSocket-Version: 13\r\nSec-WebSocket-Key: A==\r\n\r\n"
        )
        got_raw = await exchange(live.gateway.port, probe)
        assert status_of(got_raw) == 426
        assert b"\r\nupgrade:" not in got_raw.lower()
        assert json.loads(got_raw.partition(b"\r\n\r\n")[2])["error"]["code"] == "upgrade_required"
        assert status_of(await exchange(live.gateway.port, head % b"close" + b"\r\n")) == 405
        assert upstream.requests == []


async def test_what_manages_an_engine_never_passes_however_it_is_written(start: Starter) -> None:
    async with Upstream(replies(OK)) as upstream, start(upstream.url, tenants=TENANTS) as live:
        for path in MANAGING:
            encoded = "".join(f"%{byte:02x}" if byte != 0x2F else "/" for byte in path.encode())
            ways = [path, path.upper(), encoded, *(way.replace("{}", path) for way in DISGUISES)]
            for way in ways:
                for method in ("POST", "GET"):
                    got = await exchange(live.gateway.port, raw(method, way, BODY if method != "GET" else b""))
                    assert status_of(got) in (400, 404, 405), (method, way, got)
        assert upstream.requests == []
        assert live.holds_nothing()


ABNORMAL = [
    "//v1/chat/completions", "/v1//chat/completions", "/v1/chat/completions/", "/v1/chat/completions//",
    "/v1/./chat/completions", "/v1/responses/../chat/completions", "/v1/%63hat/completions", "/v1/chat%2Fcompletions",
    "/v1/chat%2fcompletions", "/v1/%2e%2e/v1/chat/completions", "/v1/..%2fv1/chat/completions",
    "/v1/chat/completions%00", "/v1/chat/completions%", "/v1/chat/completions;x=y", "/v1\\chat\\completions",
    "/v1/responses/", "/v1/responses/%2e%2e", "/v1/responses/..", "/v1/responses/../cancel",
]  # fmt: skip


async def test_a_path_that_is_not_normal_is_refused_and_says_so(start: Starter) -> None:
    async with Upstream(replies(OK)) as upstream, start(upstream.url, tenants=TENANTS) as live:
        for number, path in enumerate(ABNORMAL, 1):
            got = await exchange(live.gateway.port, raw("POST", path))
            assert status_of(got) == 400, path
            error = json.loads(got.partition(b"\r\n\r\n")[2])["error"]
            assert error["code"] == "invalid_path", path
            line = (await live.lines(number))[-1]
            assert (line["outcome"], line["reason"]) == ("refused", "invalid_path"), path
        assert upstream.requests == []


async def test_no_other_method_passes(start: Starter) -> None:
    async with Upstream(replies(OK)) as upstream, start(upstream.url, tenants=TENANTS) as live:
        for path in ["/v1/chat/completions", "/v1/responses", "/tokenize"]:
            for method in ["PUT", "PATCH", "DELETE", "TRACE", "PROPFIND", "LOCK", "SOURCE", "QUERY"]:
                got = await exchange(live.gateway.port, raw(method, path))
                assert status_of(got) in (405, 501), (path, method)
                if status_of(got) == 405:
                    assert b"\r\nallow: POST, OPTIONS\r\n" in got, (path, method)
        assert upstream.requests == []


async def test_an_unknown_path_reads_no_body_and_needs_no_key(start: Starter) -> None:
    """Else whoever has no key fills the memory for bodies, and every tenant is refused."""
    heads = [
        b"POST /nowhere HTTP/1.1\r\nHost: x\r\n",
        b"POST /v1/nowhere HTTP/1.1\r\nHost: x\r\n",
        b"GET /health HTTP/1.1\r\nHost: x\r\n",
        b"POST /health HTTP/1.1\r\nHost: x\r\n",
        b"GET /v1/models HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer known\r\n",
        b"GET /version HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer known\r\n",
        b"OPTIONS /v1/chat/completions HTTP/1.1\r\nHost: x\r\n",
        b"OPTIONS * HTTP/1.1\r\nHost: x\r\n",
        b"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\n",
        b"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer wrong\r\n",
        b"PUT /v1/chat/completions HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer known\r\n",
    ]
    async with Upstream(replies(OK)) as upstream, start(upstream.url, tenants=TENANTS) as live:
        for head in heads:
            for framing in (b"Content-Length: 30000000\r\n\r\n", b"Transfer-Encoding: chunked\r\n\r\nffffff\r\n"):
                reader, writer = await asyncio.open_connection("127.0.0.1", live.gateway.port)
                writer.write(head + framing + b"x" * 100_000)
                answered = await reader.readuntil(b"\r\n\r\n")
                assert b"connection: close" in answered, head
                assert status_of(answered) in (204, 400, 401, 404, 405), head
                assert live.server.bodies_bytes == 0
                writer.close()
        assert upstream.requests == []


ROUTES = [
    {"path": "/v1/something/new", "treatment": "generate"},
    {"path": "/v1/videos/*/remix", "treatment": "pass"},
    {"path": "/v1/videos/*", "methods": ["GET", "DELETE"], "treatment": "pass"},
    {"path": "/v1/images/*", "treatment": "compute"},
    {"path": "/v1/*", "treatment": "pass"},
]


async def test_what_the_config_names_passes_as_it_says(start: Starter) -> None:
    async with Upstream(replies(OK)) as upstream, start(upstream.url, tenants=TENANTS, routes=ROUTES) as live:
        for method, path in (
            ("POST", "/v1/something/new"),
            ("POST", "/v1/videos/v1/remix"),
            ("GET", "/v1/videos/v-1"),
            ("HEAD", "/v1/videos/v-1"),
            ("DELETE", "/v1/videos/v-1"),
            ("POST", "/v1/images/generations"),
        ):
            body = BODY if method == "POST" else b""
            assert status_of(await exchange(live.gateway.port, raw(method, path, body))) == 200, path
        assert len(upstream.requests) == 6
        lines = await live.lines(6)
        admitted = {line["path"] for line in lines if line["policy"]}
        assert admitted == {"/v1/something/new", "/v1/images/generations"}
        for method, path in (("POST", "/v1/videos/v-1"), ("DELETE", "/v1/videos/v1/remix")):
            assert status_of(await exchange(live.gateway.port, raw(method, path))) == 405
        for path in ("/v1/batches//cancel", "/v1/batches/../cancel", "/v1/batches/a%2fb/cancel"):
            assert status_of(await exchange(live.gateway.port, raw("POST", path))) == 400
        for path in ("/v1/batches/a/b/cancel", "/v1/load_lora_adapter"):  # a star is one step, and no way to these
            assert status_of(await exchange(live.gateway.port, raw("POST", path))) == 404
        assert len(upstream.requests) == 6


@pytest.mark.parametrize("path", ["/tokenize", "/detokenize", "/v1/messages/count_tokens"])
async def test_a_tenant_has_only_so_many_requests_beside_the_queue(start: Starter, path: str) -> None:
    """Whoever goes away, is refused, or has an answer that fails gives its place back."""
    go_on = asyncio.Event()

    async def script(seen: Seen, peer: Peer) -> None:
        if "broken" in seen.json:
            peer.reset()
            return
        await go_on.wait()
        await peer.send(answer(b"{}"))

    async with Upstream(script) as upstream, start(upstream.url, tenants=TENANTS, limits={"unqueued_max": 2}) as live:

        def ask(key: str, **fields: Any) -> asyncio.Task[Answer]:
            return asyncio.ensure_future(live.ask(path, {"model": MODEL, **fields}, key=key))

        for _ in range(3):
            assert (await ask("other", broken=True)).status == 502
            assert (await ask("other", model="nobody")).status == 404
        upstream.requests.clear()
        running = [ask("known") for _ in range(2)]
        await until(lambda: len(upstream.requests) == 2)
        beyond = await ask("known")
        assert (beyond.status, beyond.json["error"]["type"]) == (429, "rate_limit_error")
        assert "retry-after" in beyond.headers
        running.append(ask("other"))
        gone = ask("other")
        await until(lambda: len(upstream.requests) == 4)
        gone.cancel()
        await asyncio.gather(gone, return_exceptions=True)
        await live.lines(8)
        running.append(ask("other"))
        await until(lambda: len(upstream.requests) == 5)
        go_on.set()
        assert [each.status for each in await asyncio.gather(*running)] == [200] * 4
        assert (await ask("known")).status == 200


@pytest.mark.parametrize("path", ["/tokenize", "/v1/messages/count_tokens", "/v1/models", "/version"])
async def test_a_tenant_may_ask_beside_the_queue_only_so_often(start: Starter, path: str) -> None:
    limits: dict[str, Any] = {"unqueued_per_s": 0.01}

    async with Upstream(replies(OK)) as upstream, start(upstream.url, tenants=TENANTS, limits=limits) as live:

        async def ask(key: str) -> Answer:
            is_read = path in ("/v1/models", "/version")
            return await (live.get(path, key=key) if is_read else live.ask(path, {"model": MODEL}, key=key))

        assert (await ask("known")).status == 200
        beyond = await ask("known")
        assert beyond.status == 429
        assert 90 <= int(beyond.headers["retry-after"]) <= 100
        error = beyond.json["error"]
        assert error["type"] == "rate_limit_error"
        assert "rate_limited" in (error["message"] if path.startswith("/v1/messages") else error["code"])
        assert (await ask("other")).status == 200
        for _ in range(3):  # what waits for its turn has limits of its own
            assert (await live.ask("/v1/chat/completions", chat(), key="known")).status == 200
        lines = await live.lines(6)
        assert [(line["tenant"], line["reason"]) for line in lines[:3]] == [("t", ""), ("t", "rate_limited"), ("u", "")]
