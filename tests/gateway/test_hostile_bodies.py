"""What a body claims to be, and what it asks for, is not believed where an engine would read it otherwise."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.gateway.capture import Upstream, answer, replies
from tests.gateway.live import MODEL, Starter, chat
from tests.gateway.test_headers_and_fields import STEERING

OK = answer(b'{"usage":{"prompt_tokens":3,"completion_tokens":1}}')
CHAT, COMPLETIONS, RESPONSES, MESSAGES = "/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/messages"
AUDIO = "/v1/audio/transcriptions"
FORM = "multipart/form-data; boundary=x"


def part(name: str, value: str = "v", more: str = "") -> bytes:
    return f'--x\r\nContent-Disposition: form-data; name="{name}"{more}\r\n\r\n{value}\r\n'.encode()


FILE = part("file", "RIFF\r\n--y\r\n\r\n", '; filename="a \\"b\\".wav"\r\nContent-Type: audio/wav')
END = b"--x--\r\n"
UPLOAD = part("model", MODEL) + FILE + part("stream", "false") + END


# --- labels ---

UNHEARD_OF = [{"path": "/v1/unheard-of", "treatment": "generate"}]
"""A route that only the config names."""


@pytest.mark.parametrize("label", [FORM, "application/x-www-form-urlencoded", "text/plain", "Multipart/Form-Data", ""])
@pytest.mark.parametrize("path", [CHAT, "/v1/embeddings", "/tokenize"])
async def test_json_is_read_as_json_whatever_its_label_says(start: Starter, path: str, label: str) -> None:
    async with Upstream(replies(OK)) as upstream, start(upstream.url) as live:
        assert (await live.ask(path, chat(**STEERING), content_type=label)).status == 200
        assert upstream.requests[0].json == chat()
        assert (await live.ask(path, UPLOAD, content_type=label)).status == 400
        assert len(upstream.requests) == 1


@pytest.mark.parametrize("path", [AUDIO, "/v1/unheard-of"])
async def test_json_that_is_labelled_as_a_form_is_refused_where_forms_are_read(start: Starter, path: str) -> None:
    async with Upstream(replies(OK)) as upstream, start(upstream.url, routes=UNHEARD_OF) as live:
        for label in (FORM, "MULTIPART/form-data; boundary=x", "multipart/form-data"):
            got = await live.ask(path, chat(**STEERING), content_type=label)
            assert (got.status, got.error["code"]) == (400, "invalid_request")
        assert not upstream.requests
        assert live.holds_nothing()


async def test_an_upload_is_a_form(start: Starter) -> None:
    async with Upstream(replies(OK)) as upstream, start(upstream.url) as live:
        got = await live.ask(AUDIO, {"model": MODEL, "file": "x"})
        assert (got.status, got.error["code"]) == (400, "invalid_request")
        assert not upstream.requests


# --- forms ---


async def test_a_form_passes_as_it_is(start: Starter) -> None:
    async with Upstream(replies(OK)) as upstream, start(upstream.url, routes=UNHEARD_OF) as live:
        for path in (AUDIO, "/v1/audio/translations", "/v1/unheard-of"):
            assert (await live.ask(path, UPLOAD, content_type=FORM)).status == 200
            assert upstream.requests.pop().body == UPLOAD
        line = (await live.lines(1))[0]
        assert line["model"] == MODEL


_FILE_FIRST = FILE.replace(b'name="file"; filename="a \\"b\\".wav"', b'filename="a.wav"; name="file"')
LEGAL: dict[str, tuple[str, bytes]] = {
    "curl": (FORM, part("model", MODEL) + part("file", "x", '; filename="a"\r\nContent-Type: audio/x') + END),
    ".NET": (
        'multipart/form-data; boundary="x"',
        UPLOAD.replace(b'name="model"', b"name=model").replace(b'"stream"', b"stream"),
    ),
    "two names": (FORM, part("model", MODEL) + part("file", "x", "; filename=\"a\"; filename*=utf-8''%61") + END),
    "lower case, no last line end": (FORM, UPLOAD.replace(b"Content-D", b"content-d")[:-2]),
    "charset": ("multipart/form-data; charset=utf-8; boundary=x", UPLOAD),
    "line ends before it": (FORM, b"\r\n\r\n" + UPLOAD),
    "the file's name first": (FORM, part("model", MODEL) + _FILE_FIRST + END),
    "a size": (FORM, part("model", MODEL, "; size=9") + FILE + END),
    "two spaces": ("multipart/form-data;  boundary=x", UPLOAD.replace(b"form-data; name", b"form-data;  name")),
    "a tab": ("multipart/form-data;\tboundary=x", UPLOAD.replace(b"form-data; name", b"form-data;\tname")),
    "spaces behind the colon": (FORM, UPLOAD.replace(b"Disposition: ", b"Disposition: \t ")),
    "no space": ("multipart/form-data;boundary=x", UPLOAD.replace(b"form-data; name", b"form-data;name")),
    "a semicolon at the end": ("multipart/form-data; boundary=x;", UPLOAD),
    "a boundary of two words": ('multipart/form-data; boundary="a b"', UPLOAD.replace(b"--x", b"--a b")),
    "another charset": ("multipart/form-data; boundary=x; charset=iso-8859-1", UPLOAD),
    "streamed": (FORM, UPLOAD.replace(b"false", b"true")),
}


@pytest.mark.parametrize(("label", "body"), LEGAL.values(), ids=LEGAL)
async def test_forms_as_clients_write_them(start: Starter, label: str, body: bytes) -> None:
    async with Upstream(replies(OK)) as upstream, start(upstream.url) as live:
        assert (await live.ask(AUDIO, body, content_type=label)).status == 200
        assert upstream.requests[0].body == body
        [line] = await live.lines(1)
        assert (line["model"], line["stream"]) == (MODEL, b"true" in body)


@pytest.mark.parametrize("rest", [b"\r\n", b"an epilogue", part("priority"), b"\r\n" + part("priority") + END], ids=str)
async def test_what_follows_a_form_is_left_out(start: Starter, rest: bytes) -> None:
    async with Upstream(replies(OK)) as upstream, start(upstream.url) as live:
        assert (await live.ask(AUDIO, UPLOAD + rest, content_type=FORM)).status == 200
        assert upstream.requests[0].body == UPLOAD


@pytest.mark.parametrize(
    "label",
    [
        "multipart/form-data", "multipart/form-data; boundary=", "multipart/form-data; boundary=x; boundary=y",
        "multipart/form-data; boundary=x; charset=utf-16", "multipart/form-data; boundary=x; charset=utf-7",
        "multipart/form-data; boundary=x; charset=none-such", 'multipart/form-data; boundary="x',
        f"multipart/form-data; boundary={'x' * 71}", 'multipart/form-data; boundary="x "',
    ],
)  # fmt: skip
async def test_a_label_in_doubt_is_refused(start: Starter, label: str) -> None:
    async with Upstream(replies(OK)) as upstream, start(upstream.url) as live:
        got = await live.ask(AUDIO, UPLOAD, content_type=label)
        assert (got.status, got.error["code"]) == (400, "invalid_request")
        assert not upstream.requests


@pytest.mark.parametrize("name", STEERING)
async def test_no_part_of_a_form_steers_the_engine(start: Starter, name: str) -> None:
    steering = part(name, '{"a":1}')
    async with Upstream(replies(OK)) as upstream, start(upstream.url) as live:
        body = steering + part("model", MODEL) + steering + FILE + steering.replace(f'"{name}"'.encode(), name.encode())
        assert (await live.ask(AUDIO, body + END, content_type=FORM)).status == 200
        assert upstream.requests[0].body == part("model", MODEL) + FILE + END


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


@pytest.mark.parametrize("body", DOUBTFUL.values(), ids=DOUBTFUL)
async def test_a_form_in_doubt_is_refused(start: Starter, body: bytes) -> None:
    async with Upstream(replies(OK)) as upstream, start(upstream.url) as live:
        got = await live.ask(AUDIO, body, content_type=FORM)
        assert (got.status, got.error["code"]) == (400, "invalid_request")
        assert len(got.body) < 1000
        assert not upstream.requests
        assert live.holds_nothing()


@pytest.mark.parametrize(
    "unit", [b"content-disposition:", b'content-disposition: form-data; name="model"', b"--x\r\n", b"\r\n"]
)
async def test_a_form_of_nothing_but_heads_is_refused_at_once(start: Starter, unit: bytes) -> None:
    async with Upstream(replies(OK)) as upstream, start(upstream.url) as live:
        for before in (b"--x\r\n", part("model", MODEL), b""):
            body = before + unit * (1_000_000 // len(unit))
            assert (await live.ask(AUDIO, body, content_type=FORM)).status == 400
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


@pytest.mark.parametrize(("path", "fields", "wrong"), LIMITS, ids=str)
async def test_each_api_reads_its_own_limits(
    start: Starter, path: str, fields: dict[str, Any], wrong: str | None
) -> None:
    body = {"model": MODEL, "messages": [], "input": "x", "prompt": "x", **fields}
    async with Upstream(replies(OK)) as upstream, start(upstream.url) as live:
        got = await live.ask(path, body)
        if wrong is None:
            assert got.status == 200
        else:
            assert got.status == 400
            assert f"{fields[wrong]} output tokens" in got.error["message"]
            assert got.error.get("param", wrong) == wrong
            assert not upstream.requests


@pytest.mark.interpreted_only("watches what the engine is told")
async def test_an_unknown_api_is_counted_with_all_that_the_model_can_say(start: Starter) -> None:
    async with Upstream(replies(OK)) as upstream, start(upstream.url, routes=UNHEARD_OF) as live:
        small = {"max_tokens": 1, "max_output_tokens": 1, "max_completion_tokens": 1}
        counted = []
        submit = live.engine.arrived

        def arrived(request: Any, now: float) -> Any:
            counted.append(request.output_tokens_max)
            return submit(request, now)

        live.engine.arrived = arrived  # type: ignore[method-assign]
        for path in ("/v1/unheard-of", CHAT):
            assert (await live.ask(path, chat(**small))).status == 200
        assert counted[0] > 4000
        assert counted[1] == 1


async def test_a_field_of_another_api_is_no_prompt(start: Starter) -> None:
    other = {"prompt": "x" * 100_000, "input": "x" * 100_000, "text_1": "x" * 100_000}
    async with Upstream(replies(OK)) as upstream, start(upstream.url) as live:
        assert (await live.ask(CHAT, chat(**other))).status == 200
        assert live.gateway.pools[0].estimator.bytes_per_token < 16
        assert json.loads(upstream.requests[0].body)["prompt"]
