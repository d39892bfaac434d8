"""What a client says to steer the engine, to be somebody else, or to be read otherwise there, reaches no backend."""

from __future__ import annotations

import json
from typing import Any

from gateway.config.sections.keys import hash_key
from tests.gateway.capture import OK, Upstream, answer, replies
from tests.gateway.live import CHAT, MODEL, Starter, chat, simulated
from tests.kit.forms import AUDIO, COMPLETIONS, END, FILE, FORM, LEGAL, MESSAGES, RESPONSES, STEERING, UPLOAD, part

# --- labels ---

UNHEARD_OF = [{"path": "/v1/unheard-of", "treatment": "generate"}]
"""A route that only the config names."""
FORMS = (FORM, "MULTIPART/form-data; boundary=x", "multipart/form-data")


async def test_json_is_read_as_json_whatever_its_label_says(start: Starter) -> None:
    async with Upstream(replies(OK)) as upstream, start(upstream.url) as live:
        for path in [CHAT, "/v1/embeddings", "/tokenize"]:
            for label in [FORM, "application/x-www-form-urlencoded", "text/plain", "Multipart/Form-Data", ""]:
                assert (await live.ask(path, chat(**STEERING), content_type=label)).status == 200, (path, label)
                assert upstream.requests[0].json == chat(), (path, label)
                assert (await live.ask(path, UPLOAD, content_type=label)).status == 400, (path, label)
                assert len(upstream.requests) == 1, (path, label)
                upstream.requests.clear()


# --- forms ---


def steered(name: str) -> bytes:
    """A form with this field in three places, once without quotes around its name."""
    steering = part(name, '{"a":1}')
    return (
        steering + part("model", MODEL) + steering + FILE + steering.replace(f'"{name}"'.encode(), name.encode()) + END
    )


FOLLOWING = (b"\r\n", b"an epilogue", part("priority"), b"\r\n" + part("priority") + END)
ARRIVING = {
    **{name: (label, body, body) for name, (label, body) in LEGAL.items()},
    **{f"before {rest!r}": (FORM, UPLOAD + rest, UPLOAD) for rest in FOLLOWING},
    **{f"steered by {name}": (FORM, steered(name), part("model", MODEL) + FILE + END) for name in STEERING},
}


async def test_of_a_form_all_arrives_but_what_steers_or_follows_it(start: Starter) -> None:
    async with Upstream(replies(OK)) as upstream, start(upstream.url) as live:
        for number, (name, (label, sent, arrives)) in enumerate(ARRIVING.items(), 1):
            assert (await live.ask(AUDIO, sent, content_type=label)).status == 200, name
            assert upstream.requests[-1].body == arrives, name
            line = (await live.lines(number))[-1]
            assert (line["model"], line["stream"]) == (MODEL, b"true" in sent), name


DOUBTFUL_LABELS = [
    "multipart/form-data", "multipart/form-data; boundary=", "multipart/form-data; boundary=x; boundary=y",
    "multipart/form-data; boundary=x; charset=utf-16", "multipart/form-data; boundary=x; charset=utf-7",
    "multipart/form-data; boundary=x; charset=none-such", 'multipart/form-data; boundary="x',
    f"multipart/form-data; boundary={'x' * 71}", 'multipart/form-data; boundary="x "',
]  # fmt: skip
DOUBTFUL = {
    "no boundary": b"",
    "something before it": b"a\r\n" + UPLOAD,
    "another boundary": UPLOAD.replace(b"--x", b"--z"),
    "no last boundary": UPLOAD[: -len(END)],
    "a longer boundary": UPLOAD.replace(b"--x--", b"--xy\r\n" + END),
    "space behind the boundary": UPLOAD.replace(b"--x\r\n", b"--x \r\n"),
    "bare line feeds": UPLOAD.replace(b"\r\n", b"\n"),
    "no head": b"--x\r\n\r\nv\r\n" + UPLOAD,
    "no name": UPLOAD.replace(b'; name="model"', b""),
    "no disposition": UPLOAD.replace(b"Content-Disposition: form-data", b"X-Other: form-data"),
    "two dispositions": UPLOAD.replace(
        b"\r\nContent-Type", b'\r\nContent-Disposition: form-data; name="rid"\r\nX-Type'
    ),
    "an escaped name": UPLOAD.replace(b'name="model"', b'name="mo\\del"'),
    "another name": UPLOAD.replace(b'name="model"', b'name="model"; name="rid"'),
    "a name behind the file's": UPLOAD.replace(b'.wav"', b'.wav"; name="rid"'),
    "a name in another coding": UPLOAD.replace(b'name="model"', b"name*=utf-8''rid"),
    "a plain name and one in pieces": UPLOAD.replace(b'name="model"', b'name="model"; name*0="r"; name*1="id"'),
    "a name in pieces": UPLOAD.replace(b'name="model"', b'name*0="r"; name*1="id"'),
    "a folded line": UPLOAD.replace(b'; name="model"', b';\r\n name="rid"'),
    "an encoded value": UPLOAD.replace(b"Content-Type: audio/wav", b"Content-Transfer-Encoding: base64"),
    "an empty value without line end": UPLOAD.replace(b"\r\n\r\nfalse\r\n--x", b"\r\n\r\n--x"),
    "a field twice": part("model", "other") + UPLOAD,
    "a long value": UPLOAD.replace(MODEL.encode(), b"m" * 257),
    "a long head": UPLOAD.replace(b"audio/wav", b"a" * 5000),
    "many parts": part("a") * 130 + UPLOAD,
}


JSON = json.dumps(chat(**STEERING)).encode()
REFUSED = [
    *((name, AUDIO, FORM, body) for name, body in DOUBTFUL.items()),
    *((label, AUDIO, label, UPLOAD) for label in DOUBTFUL_LABELS),
    *(("JSON", path, label, JSON) for path in (AUDIO, "/v1/unheard-of") for label in FORMS),
    ("JSON", AUDIO, "application/json", JSON),
]


async def test_what_may_be_no_form_or_another_one_is_refused_where_forms_are_read(start: Starter) -> None:
    async with Upstream(replies(OK)) as upstream, start(upstream.url, routes=UNHEARD_OF) as live:
        for name, path, label, body in REFUSED:
            got = await live.ask(path, body, content_type=label)
            assert (got.status, got.error["code"]) == (400, "invalid_request"), (name, path, label)
            assert len(got.body) < 1000, name
            assert live.holds_nothing(), name
        assert not upstream.requests


# --- how long an answer may be ---

LIMITS: list[tuple[str, dict[str, Any], str | None]] = [
    (CHAT, {"max_tokens": 90000, "max_output_tokens": 1}, "max_tokens"),
    (CHAT, {"max_completion_tokens": 90000, "max_tokens": 1}, "max_completion_tokens"),
    (CHAT, {"max_completion_tokens": None, "max_tokens": 90000}, "max_tokens"),
    (CHAT, {"max_output_tokens": 90000}, None),
    (COMPLETIONS, {"max_tokens": 90000, "max_completion_tokens": 1, "max_output_tokens": 1}, "max_tokens"),
    (COMPLETIONS, {"max_completion_tokens": "x"}, None),
    (RESPONSES, {"max_output_tokens": 90000, "max_tokens": 1}, "max_output_tokens"),
    (RESPONSES, {"max_tokens": 0, "max_completion_tokens": 0, "n": 1000}, None),
    (MESSAGES, {"max_tokens": 90000, "max_completion_tokens": 1}, "max_tokens"),
    (MESSAGES, {"max_tokens": 5, "max_output_tokens": 90000, "n": "x", "best_of": 0}, None),
    ("/v1/embeddings", {"max_tokens": -1, "n": 0}, None),
]


async def test_each_api_reads_its_own_limits(start: Starter) -> None:
    async with Upstream(replies(OK)) as upstream, start(upstream.url) as live:
        for path, fields, wrong in LIMITS:
            body = {"model": MODEL, "messages": [], "input": "x", "prompt": "x", **fields}
            upstream.requests.clear()
            got = await live.ask(path, body)
            if wrong is None:
                assert got.status == 200, path
            else:
                assert got.status == 400, path
                assert f"{fields[wrong]} output tokens" in got.error["message"], path
                assert got.error.get("param", wrong) == wrong, path
                assert not upstream.requests, path


async def test_an_unknown_api_is_counted_with_all_that_the_model_can_say(start: Starter) -> None:
    small = {"max_tokens": 1, "max_output_tokens": 1, "max_completion_tokens": 1}
    async with Upstream(replies(OK)) as upstream, start(upstream.url, routes=UNHEARD_OF) as live:
        for path in ("/v1/unheard-of", CHAT):
            assert (await live.ask(path, chat(**small))).status == 200
        unknown, known = [line["tokens_out_max"] for line in await live.lines(2)]
        assert unknown > 4000
        assert known == 1


async def test_a_field_of_another_api_is_no_prompt(start: Starter) -> None:
    other = {"prompt": "x" * 100_000, "input": "x" * 100_000, "text_1": "x" * 100_000}
    async with Upstream(replies(OK)) as upstream, start(upstream.url) as live:
        assert (await live.ask(CHAT, chat(**other))).status == 200
        assert live.gateway.pools[0].estimator.bytes_per_token < 16
        assert json.loads(upstream.requests[0].body)["prompt"]


# --- what would steer the engine, or make the client somebody else ---

NAMED = answer(b'{"usage":{"prompt_tokens":3,"completion_tokens":1}}', b"Set-Cookie: s=1", b"X-Request-Id: engine-1")
PRIVATE_HEADERS = {
    "x-api-key": "tenant-key-1", "api-key": "tenant-key-2", "cookie": "session=tenant", "x-request-id": "client-id",
    "x-vllm-priority": "-9", "x-data-parallel-rank": "1", "x-session-id": "s", "x-fairgate-app": "default",
    "x-fairgate-user": "u1", "x-fairgate-tenant": "somebody-else", "x-forwarded-for": "10.0.0.1",
    "proxy-authorization": "Basic eA==", "accept-encoding": "gzip", "connection": "keep-alive, x-hop", "x-hop": "1",
    "te": "trailers",
}  # fmt: skip


async def test_no_header_of_identity_or_steering_reaches_the_engine(start: Starter) -> None:
    async with Upstream(replies(NAMED)) as upstream, start(upstream.url) as live:
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
        key = next(iter(live.gateway.minted_keys.values()))
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
