"""The readers of request bodies: JSON, forms, and what a conversation shows of its interaction."""

from __future__ import annotations

from dataclasses import replace
from io import BytesIO

import msgspec

from gateway.config.sections.apps import InteractionRules
from gateway.http.errors import ApiError
from gateway.proxy.batches.batch_objects import FAULTS_MAX, Checks, answered, json_of, read_line
from gateway.request.apis import AUDIO, CHAT, COMPLETIONS, MESSAGES, ONE_PASS, OTHER, RESPONSES
from gateway.request.body.form import read_form, read_parts
from gateway.request.body.large_body import LargePayload, read_large_json
from gateway.request.body.payload import LARGE_BODY_BYTES, STEERING, JsonPayload, read_json
from gateway.request.body.slices import at_once
from gateway.request.interaction_claim import ClaimReader
from policies.request import Flow
from tests.claims import claim_of
from tests.fuzz.harness import Harness

FLOW = Flow("tenant", "default", "u")
JSON_TOKENS = (
    *(
        b"{",
        b"}",
        b"[",
        b"]",
        b":",
        b",",
        b'"',
        b"\\",
        b'\\"',
        b"\\u0070",
        b" ",
        b"\n",
        b"\0",
        b"\xff",
        b"null",
        b"true",
    ),
    *(b'"model"', b'"messages"', b'"prompt"', b'"input"', b'"metadata"', b'"stream_options"', b'"max_tokens"', b'"n"'),
    *(
        b'"role"',
        b'"content"',
        b'"user"',
        b'"tool_result"',
        b'"cache_control"',
        b'"priority"',
        b'"rid"',
        b";base64,AAAA",
    ),
    *(b"9" * 40, b"-1", b"1e999", b'{"include_usage":true}', b'"fairgate_stage"', b'"user_id"'),
)
FORM_TOKENS = (
    *(b"--x", b"\r\n--x\r\n", b"\r\n--x--\r\n", b"\r\n", b"\r\n\r\n", b"\n", b"\r", b'"', b"\\", b";", b"\0", b"\xff"),
    *(
        b"content-disposition: form-data",
        b'; name="model"',
        b"; name=stream",
        b'; filename="a"',
        b'; name="vllm_xargs"',
    ),
    *(b"content-disposition:", b"name*=utf-8''model", b"content-transfer-encoding: base64"),
)
BATCH_TOKENS = (
    *JSON_TOKENS, b'"custom_id"', b'"method":"POST"', b'"url":"/v1/chat/completions"', b'"body"', b"\r\n", b"\n{}\n",
)  # fmt: skip
MEMORY_OF_LINES = 200.0
"""Each line is a value of its own, however short. Their number is bounded (`batches.lines_max`)."""
APIS = (CHAT, COMPLETIONS, RESPONSES, MESSAGES, ONE_PASS, OTHER)


def _readings(data: bytes) -> list[JsonPayload | ApiError]:
    """The body as a small one is read, unless it is large, and as a large one."""
    api = APIS[len(data) % len(APIS)]
    found: list[JsonPayload | ApiError] = []
    for read in (read_json, lambda data, api: at_once(read_large_json(data, api)))[len(data) > LARGE_BODY_BYTES :]:
        try:
            found.append(read(data, api))
        except ApiError as error:
            found.append(error)
    return found


def read_body(data: bytes) -> None:
    """A large body is not looked at as closely, but what is read of it is the same."""
    small, large = (_readings(data) * 2)[:2]
    if isinstance(small, ApiError) or small is large:
        return
    if isinstance(large, ApiError):
        assert "nested deeper" in large.message or "more than" in large.message or "at most" in large.message, large
        return
    for name in ("model", "stream", "user", "output_tokens_max", "sequences", "asks_usage", "demands_tool"):
        assert getattr(small, name) == getattr(large, name), name
    for name in ("size", "attachments", "attached_bytes"):
        assert getattr(small.prompt, name) == getattr(large.prompt, name), name
    assert small.prompt.head == large.prompt.head
    for payload in (small, large):
        if payload.stream:
            payload.ask_usage()
        if isinstance(payload, LargePayload):
            at_once(payload.seal())
    try:
        sent, also_sent = msgspec.json.decode(small.body), msgspec.json.decode(large.body)
    except (msgspec.DecodeError, UnicodeDecodeError):
        return  # the engine will say so
    assert sent == also_sent
    assert not STEERING & set(sent)


def read_body_form(data: bytes) -> None:
    payload = at_once(read_form(data, b"multipart/form-data; boundary=x", AUDIO))
    again = at_once(read_form(payload.body, b"multipart/form-data; boundary=x", AUDIO))
    assert (again.body, again.model, again.stream) == (payload.body, payload.model, payload.stream)


def read_upload(data: bytes) -> None:
    """The parts of an upload lie behind one another, and each inside of it."""
    at = 0
    for part in at_once(read_parts(data, b"multipart/form-data; boundary=x")):
        assert at <= part.begin <= part.end <= len(data)
        at = part.end


def read_batch(data: bytes) -> None:
    """What passes the checks of a file can be read when it is asked, and what an engine answers is one line of JSON."""
    checks, rows = Checks("batch_1", "/v1/chat/completions", lambda model: None), list(enumerate(BytesIO(data), 1))
    checks.take(rows)
    assert len(checks.faults) <= FAULTS_MAX
    asked = [read_line(text) for _, text in rows if json_of(text)] if not checks.faults else []
    for body in (data, *[bytes(line.body) for line in asked]):
        shown = answered("batch_1-1", "id", 200, body)
        assert shown.count(b"\n") == 1
        assert msgspec.json.decode(shown)["response"]["status_code"] == 200


def read_claim(data: bytes) -> None:
    """A conversation is recognised again when it has grown, whether it is read at once or in slices."""
    claims = ClaimReader(InteractionRules(), {})
    readings = [each for each in _readings(data) if not isinstance(each, ApiError)]
    for headers in ([(b"x-session-affinity", b"s")], []):
        found = {claim_of(claims, headers, payload, FLOW, generates=True) for payload in readings}
        assert len({replace(each, extends=()) for each in found}) <= 1, found


HARNESSES = (
    Harness("json", read_body, (ApiError,), JSON_TOKENS),
    Harness("form", read_body_form, (ApiError,), FORM_TOKENS),
    Harness("upload", read_upload, (ApiError,), FORM_TOKENS),
    Harness("batch", read_batch, (RecursionError,), BATCH_TOKENS, memory_ratio_max=MEMORY_OF_LINES),
    Harness("claim", read_claim, (ApiError,), JSON_TOKENS),
)
