"""A head that a client sends again is recognised by its bytes, and reads as if it had never been seen."""

from __future__ import annotations

from contextlib import suppress

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from backends.client.recurring_head import HEAD_BYTES_KEPT
from gateway.http.accounts import ServerLimits
from gateway.http.errors import ApiError
from gateway.http.headers import header_of
from gateway.http.http_request import RequestReader
from tests.http.conformance import ASKED
from tests.http.corpus import REFUSED, P
from tests.http.http_raw import POST, found, read_answer, serving

FIRST = P + b"X-A: 1\r\nContent-Length: 5\r\n\r\nhello"
LIMITS = ServerLimits(body_bytes_max=1000)


def warmed(first: bytes = FIRST, limits: ServerLimits = LIMITS) -> RequestReader:
    """A reader that has read this request."""
    reader = RequestReader(limits, "peer")
    assert found(reader, first)[-1] == "end"
    return reader


def is_recognised(first: bytes, again: bytes) -> bool:
    """Whether the second head is, after which all reads as if the first had not been there."""
    assert found(warmed(first), again) == found(RequestReader(LIMITS, "peer"), again)
    reader = warmed(first)
    with suppress(ApiError):
        reader.take_head(again, 0)
    return reader.is_known


@pytest.mark.parametrize("size", [1, 5, 10, 999, 1000, 1001, 10**17])
def test_the_length_of_the_body_may_differ(size: int) -> None:
    assert is_recognised(FIRST, FIRST.replace(b": 5\r\n\r\nhello", b": %d\r\n\r\n%b" % (size, b"x" * min(size, 1001))))


OTHERS = {
    "a byte of the key": FIRST.replace(b"known", b"knowm"),
    "a byte of the path": FIRST.replace(b"completions", b"completionz"),
    "the case of a name": FIRST.replace(b"X-A", b"x-A"),
    "a field more": FIRST.replace(b"X-A", b"Y: 1\r\nX-A"),
    "a field less": FIRST.replace(b"X-A: 1\r\n", b""),
    "a space before the length": FIRST.replace(b"Length: 5", b"Length:  5"),
    "no digits": FIRST.replace(b": 5", b": "),
    "a sign": FIRST.replace(b": 5", b": +5"),
    "a separator": FIRST.replace(b": 5", b": 5_0"),
    "more digits than any length has": FIRST.replace(b": 5", b": " + b"9" * 19),
    "no body": FIRST.replace(b": 5\r\n\r\nhello", b": 0\r\n\r\n"),
    "a length twice": FIRST.replace(b"X-A: 1\r\n", b"Content-Length: 5\r\n"),
    "chunks": P + b"X-A: 1\r\nTransfer-Encoding: chunked\r\n\r\n5\r\nhello\r\n0\r\n\r\n",
    "an empty line before": b"\r\n" + FIRST,
}


@pytest.mark.parametrize("name", OTHERS)
def test_a_head_with_another_byte_is_read_anew(name: str) -> None:
    assert not is_recognised(FIRST, OTHERS[name])


def test_behind_a_head_that_is_kept_all_is_read_as_without() -> None:
    for payload in (*(sent for sent, _ in REFUSED.values()), *(case.sent for case in ASKED.values())):
        is_recognised(FIRST, payload)
        is_recognised(FIRST, FIRST + payload)


@settings(max_examples=200)
@given(st.integers(0, len(FIRST) - 1), st.integers(0, 3), st.binary(max_size=3))
@example(FIRST.index(b"5\r\n"), 1, b"6")
def test_wherever_it_differs_it_reads_as_if_it_were_the_first(at: int, removed: int, inserted: bytes) -> None:
    is_recognised(FIRST, FIRST[:at] + inserted + FIRST[at + removed :] + FIRST)


@pytest.mark.parametrize("begun", [b"G", b"GET /a HTTP/1.1\r\n", b"GET /a HTTP/1.1\r\nHost: x\r\nX-Y: "])
def test_what_follows_the_beginning_of_another_head_is_part_of_that(begun: bytes) -> None:
    kept, fresh = warmed(), RequestReader(LIMITS, "peer")
    assert [found(kept, begun), found(kept, FIRST)] == [found(fresh, begun), found(fresh, FIRST)]


@pytest.mark.parametrize(("field", "value"), [(b"Expect", b"100-continue"), (b"X-Request-Id", b"mine")])
def test_what_was_read_of_the_head_is_so_of_the_next_one(field: bytes, value: bytes) -> None:
    again = FIRST.replace(b"X-A: 1", field + b": " + value)
    assert is_recognised(again, again.replace(b": 5\r\n\r\nhello", b": 6\r\n\r\nhello!"))


def test_a_field_that_means_something_only_with_a_body_is_judged_with_each() -> None:
    packed = FIRST.replace(b"X-A: 1", b"Content-Encoding: gzip")
    assert not is_recognised(packed.replace(b": 5\r\n\r\nhello", b": 0\r\n\r\n"), packed)


def test_the_length_is_no_field_of_what_is_kept() -> None:
    reader = warmed()
    reader.take_head(FIRST.replace(b": 5", b": 6"), 0)
    assert reader.request is not None
    assert header_of(reader.request.headers, b"content-length") == b""


def test_a_head_that_is_longer_than_a_small_body_is_not_kept() -> None:
    for more, is_kept in ((HEAD_BYTES_KEPT - len(FIRST) + 5, True), (HEAD_BYTES_KEPT - len(FIRST) + 6, False)):
        longer = FIRST.replace(b"X-A: 1", b"X-A: 1" + b"1" * more)
        assert is_recognised(longer, longer) is is_kept
    assert HEAD_BYTES_KEPT == 4096  # with the connections that a server has by default: 80 MB


def test_the_limit_of_heads_holds_for_one_that_is_kept() -> None:
    limits = ServerLimits(header_bytes_max=FIRST.index(b"\r\n\r\n"))
    longer = FIRST.replace(b": 5\r\n\r\nhello", b": 10\r\n\r\nhellohello")
    assert found(warmed(limits=limits), longer) == found(RequestReader(limits, "peer"), longer)


async def test_a_kept_connection_answers_each_with_its_own_body() -> None:
    async with serving() as served:
        reader, writer = await served.connect()
        for body in (b"one", b"another", b"x" * 100_000, b"one"):
            writer.write(POST + b"Content-Length: %d\r\n\r\n%b" % (len(body), body))
            assert (await read_answer(reader))[1] == b"POST /a " + body
        writer.write(b"".join(POST + b"Content-Length: %d\r\n\r\n%b" % (n, b"y" * n) for n in (1, 2, 3)))
        assert [(await read_answer(reader))[1] for _ in range(3)] == [b"POST /a " + b"y" * n for n in (1, 2, 3)]
