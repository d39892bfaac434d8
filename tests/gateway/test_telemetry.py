"""One line per request with what was promised, for which nobody waits, and metrics whose labels are bounded."""

from __future__ import annotations

import asyncio
import errno
import json
import os
import shutil
import stat

import msgspec
import pytest
from prometheus_client.parser import text_string_to_metric_families

from gateway.config.sections.keys import hash_key
from gateway.telemetry import log_writer
from gateway.telemetry.log_line import LogLine
from tests.gateway.capture import Upstream, replies
from tests.gateway.live import MODEL, Starter, chat, simulated, until
from tests.http.http_raw import exchange, status_of
from tests.kit.pipes import piped
from tests.kit.usage import OK


async def test_a_line_has_the_documented_fields(start: Starter) -> None:
    async with simulated(time_scale=0) as sim, start(sim.url, tenants=[{"name": "t"}]) as live:
        key = next(iter(live.gateway.minted_keys.values()))
        whole = await live.ask("/v1/chat/completions", chat(max_tokens=5, ignore_eos=True), key=key)
        stream = await live.ask("/v1/chat/completions", chat(stream=True, max_tokens=6, ignore_eos=True), key=key)
        lines = await live.lines(2)
        for line in lines:
            assert list(line) == list(LogLine.__struct_fields__)
            assert msgspec.convert(line, LogLine)
            assert (line["tenant"], line["app"], line["model"], line["policy"]) == ("t", "default", MODEL, "fairserve")
            assert (line["outcome"], line["reason"], line["tries"]) == ("completed", "", 1)
            assert line["backend"] == sim.url.removeprefix("http://")
            assert 0 <= line["queue_ms"] <= line["total_ms"]
        assert [line["request_id"] for line in lines] == [each.headers["x-request-id"] for each in (whole, stream)]
        assert [line["tokens_in"] for line in lines] == [whole.json["usage"]["prompt_tokens"]] * 2
        assert [line["tokens_out"] for line in lines] == [5, 6]
        assert [line["stream"] for line in lines] == [False, True]
        assert lines[0]["ttft_ms"] is None
        assert lines[1]["queue_ms"] <= lines[1]["ttft_ms"] <= lines[1]["total_ms"]


async def test_tokens_are_counted_once_by_kind(start: Starter) -> None:
    async with Upstream(replies(OK)) as upstream, start(upstream.url, tenants=[{"name": "t"}]) as live:
        for _ in range(3):
            await live.ask("/v1/chat/completions", chat(), key=next(iter(live.gateway.minted_keys.values())))
        metrics = await live.metrics()
        tokens = {name[1]: value for name, value in metrics.items() if name[0] == "fairgate_tokens_total"}
        assert tokens == {"input": 21, "output": 6, "cached": 12}
        assert metrics["fairgate_requests_total", MODEL, "completed", "pool", "t"] == 3
        assert metrics["fairgate_queue_seconds_count", "completed", "pool", "t"] == 3
        assert [line["tokens_cached"] for line in await live.lines(3)] == [4, 4, 4]


async def test_labels_are_bounded_whoever_comes(start: Starter) -> None:
    async with Upstream(replies(OK)) as upstream, start(upstream.url) as live:
        for batch in range(24):
            keys = (f"key-{batch}-{number}" for number in range(50))
            got = await asyncio.gather(*(live.ask("/v1/chat/completions", chat(user=key), key=key) for key in keys))
            assert {each.status for each in got} == {200}
        page = (await live.get("/metrics", admin=True)).body.decode()
        samples = [sample for family in text_string_to_metric_families(page) for sample in family.samples]
        tenants = {sample.labels["tenant"] for sample in samples if "tenant" in sample.labels}
        assert len(tenants) <= 1001
        assert "other" in tenants
        ended = [sample.value for sample in samples if sample.name == "fairgate_requests_total"]
        assert sum(ended) == 1200
        tokens = [s.value for s in samples if s.name == "fairgate_tokens_total" and s.labels["kind"] == "output"]
        assert sum(tokens) == 2400
        of_histograms = {label for s in samples if s.name.endswith("_bucket") for label in s.labels}
        assert of_histograms <= {"pool", "tenant", "outcome", "obstacle", "le"}
        in_histograms = {s.labels["tenant"] for s in samples if s.name == "fairgate_queue_seconds_count"}
        assert (len(in_histograms), "other" in in_histograms) == (101, True)
        assert sum(s.value for s in samples if s.name == "fairgate_queue_seconds_count") == 1200
        assert {label for s in samples for label in s.labels} <= {
            "pool", "tenant", "model", "kind", "outcome", "reason", "backend", "obstacle", "le", "version", "build",
            "hash", "task", "engine", "group",
        }  # fmt: skip
        assert len(samples) < 12_000


async def test_each_tenant_sees_its_own_and_open_access_takes_any_key_and_none(start: Starter) -> None:
    keys = [{"name": name, "keys": [hash_key(name)]} for name in ("ann", "bob")]
    async with simulated(time_scale=0) as sim, start(sim.url, tenants=keys) as live:
        for key, body in (
            ("ann", chat(stream=True, max_tokens=2)),
            ("bob", chat(max_tokens=2)),
            ("bob", chat(n=0)),
        ):
            await live.ask("/v1/chat/completions", body, key=key)
        await live.ask("/v1/nothing", chat(), key="ann")
        metrics = await live.metrics()
        assert metrics["fairgate_first_token_seconds_count", MODEL, "pool", "ann"] == 1
        assert metrics["fairgate_queue_seconds_count", "completed", "pool", "bob"] == 1
        assert metrics["fairgate_not_completed_total", "refused", "", "invalid_request", "bob"] == 1
        assert metrics["fairgate_not_completed_total", "refused", "", "not_found", ""] == 1
        assert [metrics["fairgate_queued_requests", "pool", name] for name in ("ann", "bob")] == [0, 0]
        async with start(sim.url) as opened:
            for given in ("a", "a", "b", None):
                assert (await opened.ask("/v1/chat/completions", chat(max_tokens=2), key=given)).status == 200
            first, again, other, nobody = [line["tenant"] for line in await opened.lines(4)]
        assert first == again != other
        assert nobody == "anonymous"
        assert first.startswith("key-")


async def test_the_page_is_as_prometheus_wants_it(start: Starter) -> None:
    async with simulated(time_scale=0) as sim, start(sim.url) as live:
        await live.ask("/v1/chat/completions", chat(stream=True, max_tokens=2))
        await live.ask("/v1/chat/completions", chat(n=0))
        page = (await live.get("/metrics", admin=True)).body
        names = {sample.name for family in text_string_to_metric_families(page.decode()) for sample in family.samples}
        assert {"fairgate_build_info", "process_cpu_seconds_total", "process_resident_memory_bytes"} <= names
        assert not [name for name in names if name.endswith("_created")]
        if (promtool := shutil.which("promtool")) is None:
            pytest.skip("there is no promtool: it comes with Debian's package prometheus")
        pipe = asyncio.subprocess.PIPE
        check = await asyncio.create_subprocess_exec(promtool, "check", "metrics", stdin=pipe, stdout=pipe, stderr=pipe)
        assert await check.communicate(page) == (b"", b"")
        assert check.returncode == 0


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
            got = await exchange(live.gateway.port, payload)
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
