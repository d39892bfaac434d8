"""One span for each request whose trace is recorded, at a real receiver; nobody waits for the one that takes spans."""

from __future__ import annotations

import asyncio
import logging
import subprocess
import sys
from typing import Any

import pytest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.semconv._incubating.attributes import client_attributes, gen_ai_attributes, url_attributes
from opentelemetry.semconv.attributes import error_attributes, server_attributes

from gateway.config.sections.keys import hash_key
from gateway.storage.store_errors import StoreRefused
from gateway.telemetry import span_export
from gateway.telemetry.trace import TraceSampler
from tests.gateway.capture import Peer, Seen, Upstream, answer, replies
from tests.gateway.live import MODEL, Live, Starter, chat, long_chat, simulated, until
from tests.kit.usage import OK
from tests.ports import free_port
from tests.waiting import WAIT_S

TRACE, PARENT = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
RECORDED, NOT_RECORDED = f"00-{TRACE}-{PARENT}-01", f"00-{TRACE}-{PARENT}-00"
CONVENTIONS = {
    value
    for module in (client_attributes, error_attributes, gen_ai_attributes, server_attributes, url_attributes)
    for value in vars(module).values()
    if isinstance(value, str)
}


class Collector(Upstream):
    """Takes spans by OTLP over HTTP, or answers with another status."""

    def __init__(self) -> None:
        super().__init__(self._take)
        self.spans: list[Any] = []
        self.resources: list[dict[str, Any]] = []
        self.status = b"200 OK"

    async def _take(self, seen: Seen, peer: Peer) -> None:
        assert seen.line.startswith(b"POST /v1/traces ")
        if self.status == b"200 OK":
            for of_resource in ExportTraceServiceRequest.FromString(seen.body).resource_spans:
                self.resources.append(values(of_resource.resource))
                self.spans += [span for of_scope in of_resource.scope_spans for span in of_scope.spans]
        await peer.send(answer(b"", status=self.status))

    async def got(self, count: int) -> list[Any]:
        """The spans, once there are so many, by when they began."""
        await until(lambda: len(self.spans) >= count)
        assert len(self.spans) == count
        return sorted(self.spans, key=lambda span: int(span.start_time_unix_nano))


def spans_of(live: Live, outcome: str) -> float:
    """So many spans were "sent" or "lost", as another thread counts and the page of metrics shows."""
    assert live.gateway.spans is not None
    [metric] = live.gateway.spans.collect()
    return next(sample.value for sample in metric.samples if sample.labels["outcome"] == outcome)


def values(holder: Any) -> dict[str, Any]:
    """The attributes of a span or a resource."""
    return {one.key: getattr(one.value, one.value.WhichOneof("value")) for one in holder.attributes}


@pytest.fixture(autouse=True)
def in_a_moment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(span_export, "BATCH_S", 0.02)


TENANTS = [{"name": "ann", "keys": [{"hash": hash_key("k"), "apps": ["ide", "default"]}]}]


async def test_a_span_says_what_the_log_says(start: Starter, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_HEADERS", "x-token=secret")
    async with Collector() as taken, simulated(time_scale=0) as sim:
        tracing = {"endpoint": taken.url, "sample_ratio": 1}
        async with start(sim.url, tenants=TENANTS, tracing=tracing) as live:
            body = chat(stream=True, max_tokens=6, ignore_eos=True, user="somebody")
            got = await live.ask("/v1/chat/completions", body, x_fairgate_app="ide", x_fairgate_interaction="talk")
            assert got.status == 200, got.body
            (span,) = await taken.got(1)
            (line,) = await live.lines(1)
            await until(lambda: spans_of(live, "sent") == 1)
            metrics = await live.metrics()
        assert (span.name, span.kind, span.status.code) == (f"chat {MODEL}", 2, 0)
        assert span.start_time_unix_nano < span.end_time_unix_nano
        assert abs(span.end_time_unix_nano / 1e9 - line["ts"]) < 5
        said = values(span)
        assert [name for name in said if not name.startswith("fairgate.") and name not in CONVENTIONS] == []
        assert said["gen_ai.operation.name"] == "chat"
        assert said["gen_ai.request.model"] == line["model"]
        assert said["gen_ai.usage.input_tokens"] == line["tokens_in"]
        assert said["gen_ai.usage.output_tokens"] == line["tokens_out"] == 6
        assert said["gen_ai.response.time_to_first_chunk"] == pytest.approx(line["ttft_ms"] / 1e3, abs=1e-5)
        assert said["gen_ai.request.stream"] is True
        names = ("tenant", "app", "interaction", "stage", "policy", "backend", "outcome", "request_id", "user")
        assert {name: said[f"fairgate.{name}"] for name in names} == {name: line[name] for name in names}
        assert "error.type" not in said
        assert (taken.resources[0]["service.name"], taken.requests[0].headers["x-token"]) == ("fairgate", "secret")
        assert (metrics["fairgate_spans_total", "sent"], metrics["fairgate_spans_total", "lost"]) == (1, 0)


async def test_waits_and_ends_are_told_by_their_reason(start: Starter) -> None:
    slow = {"capacity": {"max_concurrency": 1}}
    async with Collector() as taken, simulated() as sim:
        tracing = {"endpoint": taken.url, "sample_ratio": 1}
        pools = [{"name": "pool", "backends": [{"url": sim.url, "max_num_seqs": 1}], **slow}]
        async with start(pools=pools, tenants=TENANTS, tracing=tracing, limits={"queue_requests_max": 1}) as live:
            left = asyncio.ensure_future(live.ask("/v1/chat/completions", long_chat()))
            await until(lambda: live.engine.dispatched == 1)
            waited = asyncio.ensure_future(live.ask("/v1/chat/completions", chat(max_tokens=1)))
            await until(lambda: live.engine.queued == 1)
            full = await live.ask("/v1/chat/completions", chat(max_tokens=1))
            wrong = await live.ask("/v1/chat/completions", {"model": "invented", "messages": []})
            await live.ask("/v1/chat/completions", chat(), key="nobody's")
            left.cancel()
            assert (await waited).status == 200
            spans = {values(span)["fairgate.request_id"]: span for span in await taken.got(4)}
        assert full.status == 429
        by_outcome = {values(span)["fairgate.outcome"]: span for span in spans.values()}
        assert values(by_outcome["abandoned"])["error.type"] == "client_disconnected"
        assert values(spans[full.headers["x-request-id"]])["error.type"] == full.error["code"]
        assert spans[wrong.headers["x-request-id"]].name == "chat", "a model that is in no pool names no span"
        held_back = values(by_outcome["completed"])
        waits = {name: value for name, value in held_back.items() if name.startswith("fairgate.waited_s.")}
        # Equal but for the time in which the request was read, as long as that takes on a busy machine.
        assert 0 < sum(waits.values()) <= held_back["fairgate.queue_s"]
        assert held_back["fairgate.queue_s"] > 0


async def test_the_engine_hears_of_the_span_and_its_parent_is_the_clients(start: Starter) -> None:
    async with Collector() as taken, Upstream(replies(OK)) as upstream:
        async with start(upstream.url, tracing={"endpoint": taken.url, "sample_ratio": 0}) as live:
            for fields in (
                {"traceparent": RECORDED, "tracestate": "a=1"},
                {"traceparent": NOT_RECORDED, "tracestate": "a=1"},
                {},
                {"traceparent": f"00-{'0' * 32}-{PARENT}-01", "tracestate": "a=1"},
            ):
                await live.ask("/v1/chat/completions", chat(), **fields)
                await live.ask("/tokenize", chat(), **fields)
            spans = await taken.got(2)
        async with start(upstream.url) as live:
            assert live.gateway.spans is None
            await live.ask("/v1/chat/completions", chat(), traceparent="any", tracestate="thing")
            await live.ask("/v1/chat/completions", chat())
    *traced, as_it_is, without = (seen.headers for seen in upstream.requests)
    assert (as_it_is["traceparent"], as_it_is["tracestate"]) == ("any", "thing")
    assert "traceparent" not in without
    for at, own in enumerate(spans):
        recorded, as_said, new, of_nobody = traced[at::2]
        assert own.trace_id.hex() == TRACE
        assert own.parent_span_id.hex() == PARENT
        assert recorded["traceparent"] == f"00-{TRACE}-{own.span_id.hex()}-01"
        assert recorded["tracestate"] == own.trace_state == "a=1"
        assert (as_said["traceparent"], as_said["tracestate"]) == (NOT_RECORDED, "a=1")
        assert new["traceparent"].endswith("-00")
        assert of_nobody["traceparent"].endswith("-00")
        assert "tracestate" not in of_nobody


def test_without_tracing_nothing_of_it_is_loaded() -> None:
    code = """
import asyncio, sys
from gateway.process.gateway import Gateway
from gateway.config.model import Config
async def run(**tracing):
    gateway = Gateway(Config.model_validate({"listen": "127.0.0.1:0", "admin": "127.0.0.1:0", "access_log": "off",
        "open_access": True, "pools": [{"name": "p", "backends": [{"url": "sim:"}]}], **tracing}))
    await gateway.start()
    await gateway.stop(0)
    print(any(name.startswith("opentelemetry") for name in sys.modules))
asyncio.run(run())
asyncio.run(run(tracing={"endpoint": sys.argv[1]}))
"""
    endpoint = f"http://127.0.0.1:{free_port()}"
    ran = subprocess.run([sys.executable, "-c", code, endpoint], capture_output=True, text=True, timeout=WAIT_S)
    assert (ran.stdout.split(), ran.returncode) == (["False", "True"], 0), ran.stderr


async def test_a_collector_that_is_away_costs_spans_which_are_counted_and_said(
    start: Starter, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The span that arrives is of an engine that failed, which is an error."""
    caplog.set_level(logging.INFO, "fairgate")
    monkeypatch.setattr(span_export, "SEND_S", 0.05)
    fails = replies(answer(b"{}", status=b"500 Internal Server Error"))
    async with Collector() as taken, Upstream(fails) as upstream:
        taken.status = b"400 Bad Request"
        async with start(upstream.url, tracing={"endpoint": taken.url, "sample_ratio": 1}) as live:
            await live.ask("/v1/chat/completions", chat())
            await until(lambda: spans_of(live, "lost") == 1)
            taken.status = b"200 OK"
            await live.ask("/v1/chat/completions", chat())
            [span] = await taken.got(1)
            await until(lambda: "again" in caplog.text)
            metrics = await live.metrics()
    assert (span.status.code, values(span)["error.type"]) == (2, "status_500")
    assert (metrics["fairgate_spans_total", "sent"], metrics["fairgate_spans_total", "lost"]) == (1, 1)
    (warning,) = [record for record in caplog.records if "cannot be sent" in record.getMessage()]
    assert taken.url in warning.getMessage()
    assert "400" in warning.getMessage()


async def test_only_so_many_spans_wait(
    start: Starter, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(span_export, "BATCH_SPANS_MAX", 5)
    monkeypatch.setattr(span_export, "SPANS_WAITING_MAX", 5)
    monkeypatch.setattr(span_export, "CLOSE_S", 0.05)
    reached = asyncio.Event()
    silent: list[asyncio.StreamWriter] = []

    def accept(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        silent.append(writer)
        reached.set()

    server = await asyncio.start_server(accept, "127.0.0.1", 0)
    url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    async with Upstream(replies(OK)) as upstream:
        async with start(upstream.url, tracing={"endpoint": url, "sample_ratio": 1}) as live:
            await live.ask("/v1/chat/completions", chat())
            await reached.wait()
            for _ in range(10):
                assert (await live.ask("/v1/chat/completions", chat())).status == 200
            assert spans_of(live, "lost") == 5
    server.close()
    for writer in silent:
        writer.close()
        await writer.wait_closed()
    assert f"11 spans were not sent to {url}/v1/traces" in caplog.text


def test_the_part_that_is_recorded_is_the_ratio() -> None:
    for ratio in (0.0, 0.01, 0.5, 1.0):
        sampler = TraceSampler(ratio)
        begun = [sampler.begin([]) for _ in range(4000)]
        part = sum(trace is not None and trace.is_sampled for trace in begun) / 4000
        assert part == pytest.approx(ratio, abs=0.05 if 0 < ratio < 1 else 0)
        assert len({trace.trace_id for trace in begun if trace is not None}) == 4000


@pytest.mark.parametrize(
    "said",
    [b"", b"00", f"ff-{TRACE}-{PARENT}-01".encode(), f"00-{TRACE.upper()}-{PARENT}-01".encode(),
     f"00-{TRACE}-{'0' * 16}-01".encode(), f"00-{TRACE}-{PARENT}-1".encode(), b"\xff" * 55],
)  # fmt: skip
def test_what_is_no_trace_begins_a_new_one(said: bytes) -> None:
    for headers in ([(b"traceparent", said), (b"tracestate", b"a=1")], [(b"traceparent", RECORDED.encode())] * 2):
        trace = TraceSampler(1.0).begin(headers)
        assert trace is not None
        assert (trace.parent_id, trace.state) == (0, b"")
        assert trace.trace_id != int(TRACE, 16)


# --- what the config may say ---


@pytest.mark.parametrize(
    ("endpoint", "asked"),
    [
        ("http://collector:4318", "http://collector:4318/v1/traces"),
        ("https://collector/", "https://collector/v1/traces"),
        ("http://collector/own/path", "http://collector/own/path"),
    ],
)
def test_a_collector_without_a_path_is_asked_where_otlp_is(start: Starter, endpoint: str, asked: str) -> None:
    tracing = start.config("sim:", tracing=endpoint).tracing
    assert tracing is not None
    assert tracing.endpoint == asked


async def test_without_the_packages_it_does_not_start_and_says_so(
    start: Starter, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delitem(sys.modules, "gateway.telemetry.span_export")
    monkeypatch.setitem(sys.modules, "opentelemetry.exporter.otlp.proto.http.trace_exporter", None)
    with pytest.raises(StoreRefused, match=r"pip install 'fairgate\[opentelemetry\]'"):
        async with start("sim:", tracing={}):
            pass
