"""A request that is wrong is told what is wrong with it; nothing is queued, asked of an engine or charged."""

from __future__ import annotations

import asyncio
import json
from itertools import product
from typing import Any

import pytest

from tests.gateway.capture import OK, Upstream, answer, replies
from tests.gateway.live import MODEL, Answer, Live, Starter, chat, simulated

LONG = "words " * 40_000
CHAT, COMPLETIONS, EMBEDDINGS = "/v1/chat/completions", "/v1/completions", "/v1/embeddings"


def prompt(**fields: Any) -> dict[str, Any]:
    return {"model": MODEL, "prompt": "x", **fields}


NO_JSON: dict[str, bytes] = {
    "empty": b"",
    "malformed": b'{"model": ',
    "a string": b'"hello"',
    "deep in a field it reads": b'{"messages":' + b"[" * 200_000,
    "deep and balanced": b'{"model":"simulated","messages":' + b"[" * 200_000 + b"]" * 200_000 + b"}",
    "deep in a field it does not read": b'{"x":' + b'{"x":' * 200_000,
}
WRONG: list[tuple[str, dict[str, Any], str]] = [
    (CHAT, chat() | {"model": 5}, "model"),
    (CHAT, chat(stream="maybe"), "stream"),
    (CHAT, chat(stream=True, stream_options="x"), "stream_options"),
    (CHAT, chat(user=5), "user"),
    (CHAT, chat(max_tokens=1.5), "max_tokens"),
    (CHAT, chat(n=0), "n"),
    (CHAT, chat(n=10**12), "n"),
    (COMPLETIONS, prompt(best_of=10**6), "best_of"),
    (COMPLETIONS, prompt(prompt=["x"] * 129), "prompt"),
    (COMPLETIONS, prompt(prompt=["x"] * 20, n=20), "prompt"),
]
TOO_LONG: list[tuple[str, dict[str, Any], str]] = [
    (CHAT, chat(max_tokens=10**30), "max_tokens"),
    (CHAT, chat(max_tokens=4097), "max_tokens"),
    (CHAT, chat(max_completion_tokens=4097), "max_completion_tokens"),
    (CHAT, chat(LONG), "messages"),
    (COMPLETIONS, prompt(prompt=LONG), "prompt"),
    (COMPLETIONS, prompt(prompt=[7] * 4097), "prompt"),
    (EMBEDDINGS, {"model": MODEL, "input": [[7] * 4097, [7] * 4097]}, "input"),
    (EMBEDDINGS, {"model": MODEL, "input": LONG}, "input"),
]
CASES: list[tuple[str, Any, int, str, str | None]] = [
    *((CHAT, body, 400, "invalid_json", None) for body in NO_JSON.values()),
    *((path, body, 400, "invalid_request", param) for path, body, param in WRONG),
    *((path, body, 400, "context_length_exceeded", param) for path, body, param in TOO_LONG),
    (CHAT, chat() | {"model": "gpt-9"}, 404, "model_not_found", "model"),
    ("/chat", chat(), 404, "not_found", None),
]


FITS: list[tuple[str, dict[str, Any]]] = [
    (COMPLETIONS, prompt(prompt=[7] * 4096)),
    (COMPLETIONS, prompt(prompt=[100_000] * 4000)),
    (COMPLETIONS, prompt(prompt="7, " * 4097)),
    (EMBEDDINGS, {"model": MODEL, "input": [7] * 5000, "truncate_prompt_tokens": -1}),
]


async def test_what_may_fit_or_is_to_be_shortened_is_for_the_engine_to_judge(start: Starter) -> None:
    async with Upstream(replies(OK)) as upstream, start(upstream.url) as live:
        assert [(await live.ask(path, body)).status for path, body in FITS] == [200] * len(FITS)
        assert len(upstream.requests) == len(FITS)


def _untouched(live: Live, upstream: Upstream) -> bool:
    return live.holds_nothing() and not live.watched and not upstream.requests


async def test_the_error_says_what_is_wrong(start: Starter) -> None:
    def counted(metrics: dict[tuple[str, ...], float]) -> dict[tuple[str, ...], float]:
        return {name: value for name, value in metrics.items() if "tokens" in name[0] or "queue" in name[0]}

    async with Upstream(replies(OK)) as upstream, start(upstream.url) as live:
        before = await live.metrics()
        for path, body, status, code, param in CASES:
            got, name = await live.ask(path, body), f"{path} {str(body)[:80]}"
            assert (got.status, got.error["code"], got.error["param"]) == (status, code, param), name
            assert got.error["type"] == "invalid_request_error", name
            assert got.error["message"], name
            assert len(got.body) < 2000, f"{name}: it is named, not repeated"
            assert got.headers["content-type"] == "application/json", name
            assert _untouched(live, upstream), name
        assert counted(await live.metrics()) == counted(before)
        assert (await live.ask(CHAT, chat())).status == 200


async def test_what_only_the_engine_can_judge_is_judged_there_and_costs_its_prompt(start: Starter) -> None:
    async with simulated() as sim, start(sim.url) as live:
        for body in [{"messages": 5}, {"messages": [5]}, {}, chat("x" * 17_000)]:
            got = await live.ask(CHAT, {"model": MODEL, **body})
            assert got.status == 400, body
            assert got.error["message"], body
            assert live.holds_nothing(), body
        assert [(charged.prompt > 0, charged.output) for charged in live.charged.values()] == [(True, 0)] * 4


async def test_without_a_known_key_nothing_is_done(start: Starter) -> None:
    async with Upstream(replies(OK)) as upstream, start(upstream.url, tenants=[{"name": "t"}]) as live:
        for path in [CHAT, "/v1/models", "/tokenize", "/v1/responses/r1/cancel"]:
            for key in [None, "fg-unknown", ""]:
                got = await (live.get(path, key=key) if path == "/v1/models" else live.ask(path, chat(), key=key))
                assert (got.status, got.error["code"]) == (401, "invalid_api_key"), (path, key)
                assert got.error["type"] == "authentication_error", (path, key)
                assert _untouched(live, upstream), (path, key)


MESSAGES_CASES: dict[str, tuple[Any, str | None, int, str]] = {
    "malformed": (b"{", "known", 400, "invalid_request_error"),
    "max_tokens wrong": ({"model": MODEL, "max_tokens": 1.5, "messages": []}, "known", 400, "invalid_request_error"),
    "unknown model": ({"model": "x", "max_tokens": 5, "messages": []}, "known", 404, "not_found_error"),
    "no key": ({"model": MODEL, "max_tokens": 5, "messages": []}, None, 401, "authentication_error"),
    "too large": (b"x" * 300_000, "known", 413, "request_too_large"),
}


async def test_a_client_of_messages_gets_anthropic_s_form(start: Starter) -> None:
    fields: dict[str, Any] = {"tenants": [{"name": "t"}], "limits": {"body_bytes_max": 262_144}}
    async with Upstream(replies(OK)) as upstream, start(upstream.url, **fields) as live:
        for body, key, status, kind in MESSAGES_CASES.values():
            known = {"x_api_key": next(iter(live.gateway.minted_keys.values()))} if key else {}
            got: Answer = await live.ask("/v1/messages", body, key=None, **known)
            assert (got.status, got.json["type"], got.error["type"]) == (status, "error", kind), body
            assert got.error["message"], body
            assert _untouched(live, upstream), body


def _head(*more: bytes) -> bytes:
    lines = [b"POST /v1/chat/completions HTTP/1.1", b"host: x", b"authorization: Bearer k", *more]
    return b"\r\n".join(lines) + b"\r\n\r\n"


async def test_a_body_that_breaks_off_never_reaches_an_engine(start: Starter) -> None:
    body = json.dumps(chat()).encode()
    framings = {b"content-length: %d" % len(body): b"", b"transfer-encoding: chunked": b"%x\r\n" % len(body)}
    async with Upstream(replies(OK)) as upstream, start(upstream.url) as live:
        for (field, begun), sent in product(framings.items(), (0, 1, len(body) - 1)):
            reader, writer = await asyncio.open_connection("127.0.0.1", live.gateway.port)
            writer.write(_head(field) + begun + body[:sent])
            writer.write_eof()
            assert await reader.read() == b"", (field, sent)
            writer.close()
        assert (await live.ask(CHAT, chat())).status == 200
        assert len(upstream.requests) == 1


async def test_json_that_is_too_large_is_refused_and_a_reload_says_how_large(start: Starter) -> None:
    body = chat("x" * 5000)
    async with Upstream(replies(OK)) as upstream, start(upstream.url, limits={"json_bytes_max": 5000}) as live:
        for path in (CHAT, "/tokenize"):
            got = await live.ask(path, body)
            assert (got.status, got.error["code"]) == (413, "body_too_large")
            assert "5000" in got.error["message"]
        assert _untouched(live, upstream)
        config = live.gateway.config
        limits = config.limits.model_copy(update={"json_bytes_max": 6000})
        await live.gateway.take_over(config.model_copy(update={"limits": limits}))
        assert (await live.ask(CHAT, body)).status == 200


@pytest.mark.parametrize("limit", [0, -1])
async def test_whether_a_limit_means_none_is_for_the_engine_to_say(start: Starter, limit: int) -> None:
    """Of 0 a token is expected, of a negative number as many as the context has room for; all that came is charged."""
    usage = answer(b'{"usage":{"prompt_tokens":3,"completion_tokens":500}}')
    async with Upstream(replies(usage)) as upstream, start(upstream.url) as live:
        assert (await live.ask(COMPLETIONS, prompt(max_tokens=limit, echo=True))).status == 200
        assert upstream.requests[0].json["max_tokens"] == limit
        [line] = await live.lines(1)
        assert line["tokens_out"] == 500
