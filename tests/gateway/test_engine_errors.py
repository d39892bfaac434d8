"""Of an engine's error the tenant sees what is wrong with its request, in the API's shape, nothing of the engine."""

from __future__ import annotations

import json
import logging
from contextlib import suppress
from itertools import product
from typing import Any

import aiohttp
import pytest

from tests.gateway.capture import (
    DONE,
    STREAM_HEAD,
    Peer,
    Seen,
    Upstream,
    answer,
    chunk,
    named,
    replies,
    streamed,
    token,
)
from tests.gateway.live import Answer, Starter, chat, events, until
from tests.gateway.playbook import ASKED, Sent, stage

SECRET = "engine-7.internal"
TRACE = f'Traceback (most recent call last):\n  File "/srv/{SECRET}/engine.py", line 12, in step\nKeyError: 5'
HTML = f"<!DOCTYPE html><html><head><title>{SECRET}</title></head></html>".encode()
PLAIN = f"Internal Server Error at {SECRET}".encode()
FIELDS = [
    f"Server: {SECRET}".encode(),
    f"Location: http://{SECRET}/v1/x".encode(),
    f"Content-Location: http://{SECRET}/v1/x".encode(),
    f'WWW-Authenticate: Bearer realm="{SECRET}"'.encode(),
    f'Proxy-Authenticate: Basic realm="{SECRET}"'.encode(),
    f"Via: 1.1 {SECRET}".encode(),
    f"X-Powered-By: {SECRET}".encode(),
    f"Set-Cookie: s={SECRET}".encode(),
    b"Access-Control-Allow-Origin: *",
]
HIDDEN = {"server", "location", "www-authenticate", "access-control-allow-origin", "via", "set-cookie"}
PATHS = (
    "/v1/chat/completions", "/v1/responses", "/v1/messages", "/v1/embeddings", "/tokenize", "/v1/messages/count_tokens",
)  # fmt: skip
TROUBLE: dict[str, tuple[bytes, bytes, int]] = {
    "its 401": (b"401 Unauthorized", b'{"error":{"message":"Invalid key sk-engine-7.internal"}}', 502),
    "its 403": (b"403 Forbidden", HTML, 502),
    "its 407": (b"407 Proxy Authentication Required", b"", 502),
    "a redirect": (b"307 Temporary Redirect", b"", 502),
    "a redirect for ever": (b"301 Moved Permanently", HTML, 502),
    "choices": (b"300 Multiple Choices", HTML, 502),
    "a plain 404": (b"404 Not Found", PLAIN, 404),
    "FastAPI's 404": (b"404 Not Found", b'{"detail":"Not Found"}', 404),
    "an HTML 404": (b"404 Not Found", HTML, 404),
    "FastAPI's 405": (b"405 Method Not Allowed", b'{"detail":"Method Not Allowed"}', 405),
    "an HTML 400": (b"400 Bad Request", HTML, 400),
    "an empty 400": (b"400 Bad Request", b"", 400),
    "a 400 with a trace": (b"400 Bad Request", json.dumps({"error": {"message": TRACE}}).encode(), 400),
    "a 400 of another kind": (b"400 Bad Request", json.dumps([SECRET]).encode(), 400),
    "a 400 nested deep": (b"400 Bad Request", b"[" * 100_000, 400),
    "a 400 without end": (b"400 Bad Request", PLAIN * 50_000, 400),
    "a plain 500": (b"500 Internal Server Error", PLAIN, 502),
    "a 500 with a trace": (b"500 Internal Server Error", TRACE.encode(), 502),
    "a 500 in the right shape": (b"500 Oh", json.dumps({"error": {"message": SECRET}}).encode(), 502),
    "a 500 without end": (b"500 Internal Server Error", PLAIN * 50_000, 502),
    "an HTML 502": (b"502 Bad Gateway", HTML, 502),
    "a 504": (b"504 Gateway Timeout", HTML, 502),
    "a 599": (b"599 What", PLAIN, 502),
}


def in_shape(got: Answer, path: str) -> dict[str, Any]:
    """The error in an answer, which must have the form of the API asked."""
    error = got.error
    if path.startswith("/v1/messages"):
        assert set(got.json) == {"type", "error"}
        assert (got.json["type"], set(error)) == ("error", {"type", "message"})
    else:
        assert set(got.json) == {"error"}
        assert set(error) == {"message", "type", "param", "code"}
    assert error["message"]
    assert error["type"]
    assert got.headers["content-type"] == "application/json"
    assert got.headers["x-request-id"]
    return error


@pytest.mark.parametrize("path", PATHS)
async def test_the_engine_s_own_trouble_is_a_plain_error_of_ours(start: Starter, path: str) -> None:
    async with stage(start) as on:
        for name, (status, body, seen) in TROUBLE.items():
            played = await on.play(path, Sent(answer(body, *FIELDS, status=status)))
            outcome = "refused" if seen < 500 else "failed"
            assert played.end == (seen, outcome, f"status_{status[:3].decode()}"), name
            assert played.tokens == (0, 0), name
            in_shape(played.got, path)
            assert SECRET not in played.got.body.decode() + str(played.got.headers), name
            assert not HIDDEN & played.got.headers.keys(), name


REFUSED_IN_STREAM = b'data: {"error":{"message":"no","code":400}}\n\n'
NO_TOKENS: dict[str, bytes] = {
    "an answer without tokens": answer(b'{"choices":[],"usage":{"prompt_tokens":0,"completion_tokens":0}}'),
    "an empty object": answer(b"{}"),
    "an error in the stream": streamed(REFUSED_IN_STREAM, DONE),
    "a stream whose framing breaks": STREAM_HEAD + DONE,
    "a stream that breaks off": STREAM_HEAD,
    **{name: answer(body, status=status) for name, (status, body, _) in TROUBLE.items()},
    "a 413": answer(b"{}", status=b"413 Content Too Large"),
    "a 422": answer(b"{}", status=b"422 Unprocessable Entity"),
}


@pytest.mark.parametrize("policy", ["fairserve", "vtc", "dlpm"])
async def test_what_was_dispatched_has_cost_its_prompt_however_the_engine_refuses_it(
    start: Starter, policy: str
) -> None:
    sent: list[bytes] = []

    async def script(seen: Seen, peer: Peer) -> None:
        await peer.send(sent[-1])
        peer.reset()

    async with Upstream(script) as upstream, start(upstream.url, policy={"name": policy}) as live:
        for number, (name, raw) in enumerate(NO_TOKENS.items(), 1):
            sent.append(raw)
            live.gateway.pools[0].breaks.forget(next(iter(live.gateway.pools[0].backends)))
            with suppress(aiohttp.ClientPayloadError):  # a stream that breaks off
                body = chat("word " * 100, stream=raw.startswith(STREAM_HEAD))
                await live.ask("/v1/chat/completions", body, key=f"key-{number}")
            await until(live.holds_nothing)
            assert len(upstream.requests) == number, name
            backlog = live.engine.policy.order.backlog
            counters = {each: backlog.tenant(each).counter for each in backlog.tenant_names()}
            assert len(counters) == number, name
            assert min(counters.values()) > 90, (name, counters)


async def test_fields_of_a_good_answer_tell_nothing_either(start: Starter) -> None:
    sent = Sent(answer(b'{"usage":{"prompt_tokens":1,"completion_tokens":1}}', *FIELDS, b"X-Engine: yes"))
    async with stage(start) as on:
        for path in ("/v1/chat/completions", "/tokenize"):
            got = (await on.play(path, sent)).got
            assert (got.status, got.headers["x-engine"]) == (200, "yes")
            assert SECRET not in str(got.headers)
            assert "access-control-allow-origin" not in got.headers


WORDS: dict[str, tuple[int, dict[str, Any], tuple[str, str, str | None, int | None]]] = {
    "vLLM": (
        404,
        {"error": {"message": "no such model", "type": "NotFoundError", "param": "model", "code": 404}},
        ("no such model", "NotFoundError", "model", 404),
    ),
    "older vLLM, SGLang": (
        400,
        {"object": "error", "message": "too long", "type": "BadRequestError", "param": None, "code": 400},
        ("too long", "BadRequestError", None, 400),
    ),
    "TGI": (422, {"error": "too long", "error_type": "validation"}, ("too long", "validation", None, None)),
    "FastAPI": (
        422,
        {"detail": [{"loc": ["body", "n"], "msg": "must be less than 4", "input": SECRET}, {"msg": "x"}, 5]},
        ("n: must be less than 4; x", "invalid_request_error", None, None),
    ),
    "FastAPI, in one sentence": (409, {"detail": "too long"}, ("too long", "invalid_request_error", None, None)),
    "Anthropic": (
        400,
        {"type": "error", "error": {"type": "invalid_request_error", "message": "too long"}, "debug": SECRET},
        ("too long", "invalid_request_error", None, None),
    ),
    "odd kinds": (
        413,
        {"error": {"message": "too long", "type": 5, "param": [], "code": {"a": SECRET}}},
        ("too long", "invalid_request_error", None, None),
    ),
}


@pytest.mark.parametrize("path", PATHS)
async def test_what_is_wrong_with_the_request_is_said_in_the_engine_s_words(start: Starter, path: str) -> None:
    async with stage(start) as on:
        for name, (status, said, seen) in WORDS.items():
            sent = answer(json.dumps(said).encode(), *FIELDS, status=b"%d Wrong" % status)
            got = (await on.play(path, Sent(sent))).got
            assert got.status == status, name
            error = in_shape(got, path)
            assert error["message"] == seen[0], name
            shown = tuple(error.get(field) for field in ("message", "type", "param", "code"))
            assert path.startswith("/v1/messages") or shown == seen, name
            assert SECRET not in got.body.decode() + str(got.headers), name


async def test_who_must_mend_it_reads_which_key_is_wrong_and_reads_it_once(
    start: Starter, caplog: pytest.LogCaptureFixture
) -> None:
    whole = answer(b"{}", status=b"401 Unauthorized")
    async with Upstream(replies(whole)) as upstream:
        pools = [{"name": "pool", "backends": [{"url": upstream.url, "name": "gpu-7"}]}]
        async with start(pools=pools) as live:
            with caplog.at_level(logging.ERROR, "fairgate"):
                for _ in range(3):
                    assert (await live.ask("/v1/chat/completions", chat())).status == 502
    said = [record.getMessage() for record in caplog.records if record.levelno == logging.ERROR]
    assert said == [
        "backend gpu-7 does not accept the gateway: the api_key of this backend is missing or wrong (status 401)"
    ]


async def test_an_error_without_end_ends_where_the_bound_is(start: Starter) -> None:
    async def script(seen: Seen, peer: Peer) -> None:
        await peer.send(b"HTTP/1.1 500 Oh\r\nTransfer-Encoding: chunked\r\n\r\n")
        while not peer.writer.is_closing():
            await peer.send(chunk(PLAIN * 1000))

    async with Upstream(script) as upstream, start(upstream.url) as live:
        for path in ("/v1/chat/completions", "/tokenize"):
            got = await live.ask(path, ASKED[path])
            assert got.status == 502
            in_shape(got, path)


AGAIN: dict[bytes, str | None] = {b"500 Oh": "1", b"599 Odd": "1", b"401 Who": None, b"302 Go": None}


async def test_what_a_repeat_may_mend_says_when_to_repeat(start: Starter) -> None:
    async with stage(start) as on:
        for path, (status, again) in product(("/v1/chat/completions", "/tokenize"), AGAIN.items()):
            got = (await on.play(path, Sent(answer(PLAIN, *FIELDS, status=status)))).got
            assert (got.status, got.headers.get("retry-after")) == (502, again), (path, status)
        for status in (b"429 Too Many Requests", b"503 Service Unavailable"):  # not the tenant has asked too much
            got = (await on.play("/tokenize", Sent(answer(PLAIN, *FIELDS, status=status)))).got
            assert (got.status, got.error["code"], got.headers["retry-after"]) == (503, "server_busy", "1")


async def test_that_a_copy_still_holds_is_no_error(start: Starter) -> None:
    async with stage(start) as on:
        got = (await on.fetch("/v1/responses/r1", Sent(b"HTTP/1.1 304 Not Modified\r\nEtag: x\r\n\r\n"))).got
        assert (got.status, got.headers["etag"]) == (304, "x")


TRACED: dict[str, tuple[bytes, bytes, bytes]] = {
    "/v1/chat/completions": (
        token("a"),
        b'data: {"error":{"message":%b,"type":"InternalServerError","param":null,"code":500}}\n\n',
        DONE,
    ),
    "/v1/responses": (
        named("response.output_text.delta", delta="a"),
        b'event: response.failed\ndata: {"type":"response.failed","response":{"status":"failed",'
        b'"error":{"code":"server_error","message":%b}}}\n\n',
        b"",
    ),
    "/v1/messages": (
        named("content_block_delta", delta={"text": "a"}),
        b'event: error\ndata: {"type":"error","error":{"type":"api_error","message":%b}}\n\n',
        b"",
    ),
}


async def test_a_trace_inside_a_stream_is_an_error_of_ours(start: Starter) -> None:
    async with stage(start) as on:
        for (path, (first, fault, last)), together in product(TRACED.items(), (True, False)):
            parts = [first, fault % json.dumps(TRACE).encode(), last]
            pieces = [b"".join(parts)] if together else parts
            sent = streamed(*pieces)
            played = await on.play(path, Sent(sent), stream=True)
            assert (played.line["outcome"], played.tokens[1]) == ("failed", 1), path
            body = played.got.body
            assert SECRET not in body.decode(), path
            assert body.startswith(first), path
            assert body.endswith(last), path
            assert events(body)[1]["error"]["message"], path
            assert body.count(b'"error":') == 1, path
