"""One line per request with what was promised and nothing else, and metrics whose labels are bounded."""

from __future__ import annotations

import asyncio
import shutil

import msgspec
import pytest
from prometheus_client.parser import text_string_to_metric_families

from gateway.config.sections.keys import hash_key
from gateway.telemetry.log_line import Line
from tests.gateway.capture import Upstream, answer, replies
from tests.gateway.live import MODEL, Starter, chat, simulated

OK = answer(b'{"usage":{"prompt_tokens":7,"completion_tokens":2,"prompt_tokens_details":{"cached_tokens":4}}}')


async def test_a_line_has_the_documented_fields(start: Starter) -> None:
    async with simulated(time_scale=0) as sim, start(sim.url, tenants=[{"name": "t"}]) as live:
        key = live.gateway.minted_keys[0].key
        whole = await live.ask("/v1/chat/completions", chat(max_tokens=5, ignore_eos=True), key=key)
        stream = await live.ask("/v1/chat/completions", chat(stream=True, max_tokens=6, ignore_eos=True), key=key)
        lines = await live.lines(2)
        for line in lines:
            assert list(line) == list(Line.__struct_fields__)
            assert msgspec.convert(line, Line)
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
            await live.ask("/v1/chat/completions", chat(), key=live.gateway.minted_keys[0].key)
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


async def test_what_is_asked_wrongly_is_no_failure(start: Starter) -> None:
    missing = answer(b'{"error":{"message":"no such response"}}', status=b"404 Not Found")
    async with Upstream(replies(missing)) as upstream, start(upstream.url) as live:
        assert (await live.ask("/v1/chat/completions", chat())).status == 404
        assert (await live.ask("/tokenize", {"prompt": "x"})).status == 404
        assert [(line["outcome"], line["reason"]) for line in await live.lines(2)] == [("refused", "status_404")] * 2
        failed = [
            name for name in await live.metrics() if name[0] == "fairgate_not_completed_total" and "failed" in name
        ]
        assert failed == []


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
