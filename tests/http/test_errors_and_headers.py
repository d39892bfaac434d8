"""Errors as tenants see them, and which header fields cross the gateway."""

from __future__ import annotations

import json
import time
from email.utils import formatdate

import pytest

from backends.answers.sse import Dialect
from gateway.http.errors import ApiError, Reason, dialect_of
from gateway.http.headers import (
    REQUEST_DROPPED,
    RESPONSE_DROPPED,
    RETRY_AFTER_S_MAX,
    bearer_key,
    forwarded,
    retry_after_s,
)


@pytest.mark.parametrize("reason", Reason)
def test_every_error_has_both_bodies(reason: Reason) -> None:
    error = ApiError(reason, "what happened", param="messages")
    assert 400 <= error.status < 600
    openai = json.loads(error.body())["error"]
    assert openai == {"message": error.message, "type": error.type, "param": error.param, "code": error.code}
    anthropic = json.loads(error.body(Dialect.MESSAGES))
    assert anthropic["type"] == "error"
    assert set(anthropic["error"]) == {"type", "message"}


def test_a_client_text_in_a_message_is_escaped() -> None:
    assert b"\n" not in ApiError(Reason.MODEL_NOT_FOUND, '"}\r\n\r\ndata: [DONE]').body()


@pytest.mark.parametrize(
    ("retry_after_s", "seconds", "milliseconds"),
    [(0.0, b"1", b"1"), (0.2, b"1", b"200"), (1.0, b"1", b"1000"), (1.0001, b"2", b"1001"), (90.5, b"91", b"90500")],
)
def test_retry_after_is_never_earlier_than_meant(retry_after_s: float, seconds: bytes, milliseconds: bytes) -> None:
    fields = dict(ApiError(Reason.QUEUE_FULL, "full", retry_after_s=retry_after_s).headers())
    assert fields == {
        b"content-type": b"application/json",
        b"retry-after": seconds,
        b"retry-after-ms": milliseconds,
        b"x-fairgate-expected-wait-s": b"%.3f" % retry_after_s,
        b"x-fairgate-expected-wait-range-s": b"%.3f-%.3f" % (retry_after_s / 2, retry_after_s * 2),
    }


def test_should_retry_is_said_only_when_known() -> None:
    for should_retry, field in ((None, None), (True, b"true"), (False, b"false")):
        error = ApiError(Reason.QUEUE_FULL, "full", should_retry=should_retry)
        assert dict(error.headers()).get(b"x-should-retry") == field


def test_errors_in_a_stream() -> None:
    error = ApiError(Reason.BACKEND_FAILED, "it\nstopped")
    event = error.sse_event()
    assert event.startswith(b'data: {"error":{')
    assert event.endswith(b"}}\n\n")
    assert event.count(b"\n") == 2
    assert error.sse_event(Dialect.MESSAGES).startswith(b'event: error\ndata: {"type":"error",')


def test_the_dialect_follows_the_path() -> None:
    assert dialect_of("/v1/messages") is dialect_of("/v1/messages/count_tokens") is Dialect.MESSAGES
    assert dialect_of("/v1/chat/completions") is Dialect.OPENAI


@pytest.mark.parametrize(
    ("said", "wait_s"),
    [("700", 700), (" 1.5", 1.5), ("9" * 400, RETRY_AFTER_S_MAX), ("Thu, 01 Jan 1970 00:00:00 GMT", 0),
     ("soon", 0), ("-5", 0), ("nan", 0), ("", 0)],
)  # fmt: skip
def test_when_an_engine_wants_to_be_asked_again(said: str, wait_s: float) -> None:
    assert retry_after_s([(b"retry-after", said.encode())]) == wait_s


def test_an_engine_may_say_at_which_date_it_wants_to_be_asked_again() -> None:
    in_an_hour = formatdate(time.time() + 3600, usegmt=True).encode()
    assert retry_after_s([(b"retry-after", in_an_hour)]) == pytest.approx(3600, abs=60)


HOP_BY_HOP = ["connection", "keep-alive", "te", "trailer", "transfer-encoding", "upgrade"]
KEPT = [(b"content-type", b"application/json"), (b"openai-organization", b"o"), (b"traceparent", b"t")]


PRIVATE = """
    http2-settings content-length host authorization x-api-key api-key cookie proxy-authorization
    proxy-connection x-forwarded-for x-forwarded-host forwarded x-real-ip accept-encoding expect
    x-vllm-priority x-data-parallel-rank x-session-id x-override-priority endpoint-load-metrics-format
    x-fairgate-tenant x-request-id
"""


def test_fields_of_a_request_that_are_the_gateways_or_of_one_hop_are_dropped() -> None:
    dropped = [(name.encode(), b"close") for name in (*HOP_BY_HOP, *PRIVATE.split())]
    assert forwarded([KEPT[0], *dropped, *KEPT[1:]], REQUEST_DROPPED) == KEPT


ENGINES_OWN = """
    content-length server date alt-svc set-cookie endpoint-load-metrics x-request-id proxy-authenticate
    x-fairgate-backend
"""


def test_fields_of_an_answer_that_are_the_engines_own_or_of_one_hop_are_dropped() -> None:
    dropped = [(name.encode(), b"close") for name in (*HOP_BY_HOP, *ENGINES_OWN.split())]
    assert forwarded([KEPT[0], *dropped, *KEPT[1:]], RESPONSE_DROPPED) == KEPT


def test_fields_named_in_connection_are_dropped_wherever_they_stand() -> None:
    named = [(b"connection", b"keep-alive, A ,c"), (b"connection", b"D")]
    headers = [(b"a", b"1"), named[0], (b"b", b"2"), named[1], (b"c", b"3"), (b"d", b"4")]
    assert forwarded(headers, REQUEST_DROPPED) == [(b"b", b"2")]


@pytest.mark.parametrize(
    ("headers", "key"),
    [
        ([(b"authorization", b"Bearer k1")], b"k1"),
        ([(b"authorization", b"bearer  k1 ")], b"k1"),
        ([(b"x-api-key", b"k2")], b"k2"),
        ([(b"api-key", b"k3")], b"k3"),
        ([(b"api-key", b"k3"), (b"x-api-key", b"k2"), (b"authorization", b"Bearer k1")], b"k1"),
        ([(b"x-api-key", b"k2"), (b"api-key", b"k3")], b"k2"),
        ([(b"api-key", b"k3"), (b"x-api-key", b"k2")], b"k2"),
        ([(b"authorization", b"Basic k1")], None),
        ([(b"authorization", b"Bearer ")], None),
        ([(b"x-api-key", b"")], None),
        ([], None),
    ],
)
def test_the_key_a_client_presents(headers: list[tuple[bytes, bytes]], key: bytes | None) -> None:
    assert bearer_key(headers) == key
