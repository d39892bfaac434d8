"""Nobody waits for the access log: what cannot be written is counted, and said once it can be."""

from __future__ import annotations

import errno
import json
import os
import stat

import pytest

from gateway.config.sections.keys import hash_key
from gateway.telemetry import log_writer
from tests.gateway.capture import OK, Upstream, replies
from tests.gateway.live import Starter, chat, raw_exchange, until
from tests.http.http_raw import status_of
from tests.kit.pipes import piped

LOST = ("fairgate_access_log_lines_lost_total",)


async def test_a_reader_of_standard_output_that_stalls_stops_nobody(
    start: Starter, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(log_writer, "BUFFER_BYTES_MAX", 20_000)
    with piped(1) as pipe:
        async with Upstream(replies(OK)) as upstream, start(upstream.url, access_log="stdout") as live:
            for _ in range(60):  # some 30 kB of lines, of which the pipe takes 4 and the buffer 20
                assert (await live.ask("/v1/chat/completions", chat())).status == 200
                live.gateway._access_log.flush()
            lost = (await live.metrics())[LOST]
            assert lost > 0
            found = b""
            while "were lost" not in caplog.text:
                found += await pipe.read()
            assert f"{lost:.0f} lines of the access log were lost" in caplog.text
            last = (await live.ask("/v1/chat/completions", chat())).headers["x-request-id"]
            found += await pipe.said(last.encode())
            assert (await live.metrics())[LOST] == lost
    lines = [json.loads(line) for line in found.splitlines()]
    assert len(lines) == 61 - lost
    assert lines[-1]["request_id"] == last


async def test_a_gateway_ends_though_nobody_reads_its_log(start: Starter, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(log_writer, "CLOSE_S", 0.05)
    with piped(1):
        async with Upstream(replies(OK)) as upstream, start(upstream.url, access_log="stdout") as live:
            for _ in range(20):
                assert (await live.ask("/v1/chat/completions", chat())).status == 200


async def test_a_disk_that_is_full_stops_nobody(start: Starter, caplog: pytest.LogCaptureFixture) -> None:
    async with Upstream(replies(OK)) as upstream, start(upstream.url, access_log="/dev/full") as live:
        for _ in range(3):
            assert (await live.ask("/v1/chat/completions", chat())).status == 200
        await until(lambda: os.strerror(errno.ENOSPC) in caplog.text)  # the thread of another gateway may end here, too
        assert (await live.metrics())[LOST] > 0


async def test_a_log_is_for_its_owner_only(start: Starter) -> None:
    state = start.directory / "learned.json"
    async with Upstream(replies(OK)) as upstream, start(upstream.url, state_file=str(state)) as live:
        assert (await live.ask("/v1/chat/completions", chat())).status == 200
        await live.lines(1)
    assert [stat.S_IMODE(os.stat(path).st_mode) for path in (live.log, state)] == [0o600] * 2


HEAD = b"Host: x\r\nConnection: close\r\n"
REFUSED = {
    "malformed": (b"nonsense\r\n\r\n", 400, "malformed_http", ""),
    "method": (b"FROB /v1/models HTTP/1.1\r\n%b\r\n" % HEAD, 501, "not_implemented", "/v1/models"),
    "version": (b"GET /v1/models HTTP/3.0\r\n%b\r\n" % HEAD, 505, "version_not_supported", ""),
    "large head": (b"GET /a HTTP/1.1\r\nA: %b\r\n%b\r\n" % (b"a" * 9000, HEAD), 431, "headers_too_large", ""),
    "large body": (b"POST /v1/a HTTP/1.1\r\n%bContent-Length: 99999999\r\n\r\n" % HEAD, 413, "body_too_large", "/v1/a"),
    "no key": (b"GET /v1/models HTTP/1.1\r\n%b\r\n" % HEAD, 401, "invalid_api_key", "/v1/models"),
    "nowhere": (b"GET /nowhere HTTP/1.1\r\n%b\r\n" % HEAD, 404, "not_found", "/nowhere"),
}


async def test_whatever_is_refused_has_its_line_and_counts(start: Starter) -> None:
    fields = {"tenants": [{"name": "t"}], "limits": {"header_bytes_max": 4096}}
    async with Upstream(replies(OK)) as upstream, start(upstream.url, **fields) as live:
        for number, (name, (payload, status, reason, path)) in enumerate(REFUSED.items(), 1):
            got = await raw_exchange(live.gateway.port, payload)
            assert status_of(got) == status, name
            line = (await live.lines(number))[-1]
            assert (line["outcome"], line["reason"], line["path"]) == ("refused", reason, path), name
            assert b"x-request-id: " + line["request_id"].encode() + b"\r\n" in got, name
            assert (line["client"], line["tenant"]) == ("127.0.0.1", ""), name
            assert (await live.metrics())["fairgate_not_completed_total", "refused", "", reason, ""] == 1, name


KNOWN = [{"name": "t", "keys": [hash_key("known")]}, {"name": "u", "keys": [hash_key("new")]}]


async def test_too_many_wrong_keys_close_an_address_but_not_to_keys_that_are_used_from_there(start: Starter) -> None:
    async with (
        Upstream(replies(OK)) as upstream,
        start(upstream.url, tenants=KNOWN, trusted_proxies=["127.0.0.1"]) as live,
    ):

        async def ask(key: str, address: str) -> int:
            got = await live.ask("/v1/chat/completions", chat(), key=key, x_forwarded_for=address)
            assert ("retry-after" in got.headers) == (got.status == 429)
            return int(got.status)

        assert await ask("known", "10.0.0.1") == 200
        statuses = [await ask(f"guess {number}", "10.0.0.1") for number in range(30)]
        assert statuses == [401] * 20 + [429] * 10
        assert await ask("new", "10.0.0.1") == 429  # a right guess looks like a wrong one
        assert await ask("known", "10.0.0.1") == 200
        assert await ask("new", "10.0.0.2") == 200
        assert await ask("guess", "10.0.0.2") == 401
        assert (await live.metrics())["fairgate_not_completed_total", "refused", "", "too_many_failed_keys", ""] == 11


@pytest.mark.parametrize(("trusted", "client"), [([], "127.0.0.1"), (["127.0.0.0/8"], "10.1.1.1")])
async def test_the_log_has_the_client_s_address_and_its_name_for_the_request(
    start: Starter, trusted: list[str], client: str
) -> None:
    fields = {"x_request_id": "trace-1:a", "x_forwarded_for": "10.1.1.1"}
    async with Upstream(replies(OK)) as upstream, start(upstream.url, trusted_proxies=trusted) as live:
        got = await live.ask("/v1/chat/completions", chat(), **fields)
        [line] = await live.lines(1)
        assert (line["client"], line["client_request_id"]) == (client, "trace-1:a")
        assert got.headers["x-request-id"] == line["request_id"] != "trace-1:a"
        [seen] = upstream.requests
        assert "x-forwarded-for" not in seen.headers
        assert seen.headers["x-request-id"] == line["request_id"]
