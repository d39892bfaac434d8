"""The readers of request bodies: JSON, forms, and what a conversation shows of its interaction."""

from __future__ import annotations

from io import BytesIO

import msgspec

from gateway.config.sections.apps import InteractionRules
from gateway.http.errors import ApiError
from gateway.proxy.batches.batch_objects import FAULTS_MAX, LineChecker, answered, read_line, strip_line
from gateway.request.apis import AUDIO, CHAT, COMPLETIONS, MESSAGES, ONE_PASS, OTHER, RESPONSES
from gateway.request.body.form import read_form, read_parts
from gateway.request.body.payload import STEERING, read_json
from gateway.request.interaction_claim import ClaimReader
from policies.request import Flow
from tests.claims import claim_of
from tests.fuzz.harness import JSON_MARKS, Harness

FLOW = Flow("tenant", "default", "u")
JSON_TOKENS = (
    *JSON_MARKS, b"\\u0070", b'"model"', b'"messages"', b'"prompt"', b'"input"', b'"metadata"', b'"stream_options"',
    b'"max_tokens"', b'"n"', b'"role"', b'"content"', b'"user"', b'"tool_result"', b'"cache_control"', b'"priority"',
    b'"rid"', b";base64,AAAA", b'{"include_usage":true}', b'"fairgate_stage"', b'"user_id"',
)  # fmt: skip
FORM_TOKENS = (
    b"--x", b"\r\n--x\r\n", b"\r\n--x--\r\n", b"\r\n", b"\r\n\r\n", b"\n", b"\r", b'"', b"\\", b";", b"\0", b"\xff",
    b"content-disposition: form-data", b'; name="model"', b"; name=stream", b'; filename="a"', b'; name="vllm_xargs"',
    b"content-disposition:", b"name*=utf-8''model", b"content-transfer-encoding: base64",
)  # fmt: skip
BATCH_TOKENS = (
    *JSON_TOKENS, b'"custom_id"', b'"method":"POST"', b'"url":"/v1/chat/completions"', b'"body"', b"\r\n", b"\n{}\n",
)  # fmt: skip
MEMORY_OF_LINES = 200.0
"""Each line is a value of its own, however short. Their number is bounded (`batches.lines_max`)."""
APIS = (CHAT, COMPLETIONS, RESPONSES, MESSAGES, ONE_PASS, OTHER)


def read_body(data: bytes) -> None:
    """What goes to the engine holds no field that steers it, and is what came but for the edits."""
    payload = read_json(data, APIS[len(data) % len(APIS)])
    if payload.stream:
        payload.ask_usage()
    payload.rename("another")
    try:
        sent, came = msgspec.json.decode(payload.body), msgspec.json.decode(data)
    except (msgspec.DecodeError, UnicodeDecodeError):
        return  # the engine will say so
    assert not STEERING & set(sent)
    edited = {*STEERING, "model", "stream_options"}
    assert {name: sent[name] for name in sent.keys() - edited} == {name: came[name] for name in came.keys() - edited}


def read_body_form(data: bytes) -> None:
    payload = read_form(data, b"multipart/form-data; boundary=x", AUDIO)
    again = read_form(payload.body, b"multipart/form-data; boundary=x", AUDIO)
    assert (again.body, again.model, again.stream) == (payload.body, payload.model, payload.stream)


def read_upload(data: bytes) -> None:
    """The parts of an upload lie behind one another, and each inside of it."""
    at = 0
    parts, end = read_parts(data, b"multipart/form-data; boundary=x")
    for part in parts:
        assert at <= part.begin <= part.end <= end <= len(data)
        at = part.end


def read_batch(data: bytes) -> None:
    """What passes the checks of a file can be read when it is asked, and what an engine answers is one line of JSON."""
    checks, rows = LineChecker("batch_1", "/v1/chat/completions", lambda model: None), list(enumerate(BytesIO(data), 1))
    checks.take(rows)
    assert len(checks.faults) <= FAULTS_MAX
    asked = [read_line(text) for _, text in rows if strip_line(text)] if not checks.faults else []
    for body in (data, *[bytes(line.body) for line in asked]):
        shown = answered("batch_1-1", "id", 200, body)
        assert shown.count(b"\n") == 1
        assert msgspec.json.decode(shown)["response"]["status_code"] == 200


def read_claim(data: bytes) -> None:
    """A conversation is recognised again, in a session and without one."""
    payload = read_json(data, APIS[len(data) % len(APIS)])
    for headers in ([(b"x-session-affinity", b"s")], []):
        found = {claim_of(ClaimReader(InteractionRules(), {}), headers, payload, FLOW, generates=True) for _ in "ab"}
        assert len(found) == 1, found


HARNESSES = (
    Harness("json", read_body, (ApiError,), JSON_TOKENS),
    Harness("form", read_body_form, (ApiError,), FORM_TOKENS),
    Harness("upload", read_upload, (ApiError,), FORM_TOKENS),
    Harness("batch", read_batch, (RecursionError,), BATCH_TOKENS, memory_ratio_max=MEMORY_OF_LINES),
    Harness("claim", read_claim, (ApiError,), JSON_TOKENS),
)
