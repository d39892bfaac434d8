"""The readers of request bodies: JSON, forms, and what a conversation shows of its interaction."""

from __future__ import annotations

from gateway.config.interactions import InteractionRules
from gateway.http.errors import ApiError
from gateway.request.interaction_claim import ClaimReader
from gateway.request.payload import read_json, read_multipart
from policies.request import Flow
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


def read_body(data: bytes) -> None:
    payload = read_json(data)
    payload.ask_usage()


def read_form(data: bytes) -> None:
    read_multipart(data)


def read_claim(data: bytes) -> None:
    claims = ClaimReader(InteractionRules(), {})
    claims.read([(b"x-session-affinity", b"s")], read_json(data), FLOW, generates=True)
    claims.read([], read_json(data), FLOW, generates=True)


HARNESSES = (
    Harness("json", read_body, (ApiError,), JSON_TOKENS),
    Harness("form", read_form, (ApiError,), FORM_TOKENS),
    Harness("claim", read_claim, (ApiError,), JSON_TOKENS),
)
