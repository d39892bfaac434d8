"""The adapters read what each version of an engine says, and tell backpressure from errors."""

from __future__ import annotations

from pathlib import Path

import pytest

from backends.engines.by_metrics import OpenAiAdapter
from backends.engines.vllm import VllmAdapter
from backends.promtext import SAMPLES_MAX, lines_of, samples
from policies.capacity.gauges import Gauges

FIXTURES = Path(__file__).parent / "fixtures"
PAGES = {
    "vllm-0.8.5.txt": Gauges(1.5, 3, 7, 0.25, 1000 * 16, 16, 11),
    "vllm-0.11-pids.txt": Gauges(1.5, 7, 2, 0.3, 256 * 16, 16, 3),
    "vllm-0.32-single.txt": Gauges(1.5, 0, 0, 0.0, 128 * 32, 32, 0, 0, deferred=0),
    "vllm-0.32-openmetrics.txt": Gauges(1.5, 0, 0, 0.0, 128 * 32, 32, 0, deferred=0),
    # Engines that never stepped say nothing of their load: absent is not zero.
    "vllm-0.32-dp2.txt": Gauges(1.5, None, None, None, 2 * 128 * 32, 32, 0, 0),
}


@pytest.mark.parametrize("page", PAGES)
def test_every_version_of_vllm_is_read(page: str) -> None:
    assert VllmAdapter().snapshot((FIXTURES / page).read_text(), 1.5) == PAGES[page]


def test_what_waits_for_something_else_than_room_is_told_apart() -> None:
    page = "".join(
        f'vllm:num_requests_waiting{{engine="{engine}"}} {waiting}\n'
        f'vllm:num_requests_waiting_by_reason{{engine="{engine}",reason="capacity"}} {waiting - deferred}\n'
        f'vllm:num_requests_waiting_by_reason{{engine="{engine}",reason="deferred"}} {deferred}\n'
        f'vllm:generation_tokens_total{{engine="{engine}"}} 50\n'
        for engine, waiting, deferred in ((0, 9, 7), (1, 3, 0))
    )
    assert VllmAdapter().snapshot(page, 1.5) == Gauges(1.5, waiting=12, deferred=7, output_tokens_total=100)
    for name in ("num_requests_waiting_by_reason", "generation_tokens_total"):
        assert f"name[]=vllm:{name}" in VllmAdapter().metrics_paths[0]


def test_a_page_without_vllm_is_nothing() -> None:
    assert VllmAdapter().snapshot("", 1.5) is None
    assert VllmAdapter().snapshot('# HELP x\nhttp_requests_total{a="b"} 1\n', 1.5) is None
    assert OpenAiAdapter().snapshot("vllm:num_requests_running 1\n", 1.5) is None


@pytest.mark.parametrize("value", ["None", "", "nan", "inf"])
def test_what_a_config_does_not_know_stays_unknown(value: str) -> None:
    page = f'vllm:cache_config_info{{block_size="{value}",num_gpu_blocks="{value}"}} 1\n'
    snapshot = VllmAdapter().snapshot(page, 1.5)
    assert snapshot is not None
    assert (snapshot.kv_capacity_tokens, snapshot.block_size) == (None, None)


def test_labels_may_hold_anything_quoted() -> None:
    page = 'a:b{x="1",y="} 7 \\" {"} 2.5 1700000000 # {trace="x"} 1\na:b 3\na:b NaN\na:b{x="1 2\na:b oops\n'
    found = samples(page, lines_of({"a_b"}))["a_b"]
    assert [(sample.labels.get("x"), sample.value) for sample in found] == [("1", 2.5), (None, 3.0)]
    assert found[0].labels["y"] == '} 7 \\" {'


@pytest.mark.parametrize(
    ("status", "body", "is_refusal"),
    [
        (503, b'{"error":{"message":"busy","type":"Service Unavailable","param":null,"code":503}}', True),
        (503, b'{"type":"error","error":{"type":"overloaded_error","message":"busy"}}', True),
        (429, b"", True),
        (500, b'{"error":{"message":"cannot schedule new futures after shutdown","code":500}}', True),
        (500, b'{"error":{"message":"boom","code":500}}', False),
        (400, b'{"error":{"message":"prompt too long","code":400}}', False),
    ],
)
def test_a_refusal_of_vllm_is_backpressure(status: int, body: bytes, is_refusal: bool) -> None:
    assert VllmAdapter().is_refusal(status, body) is is_refusal


def test_a_refusal_of_any_other_server() -> None:
    adapter = OpenAiAdapter()
    refusals = {status for status in (200, 400, 401, 429, 500, 502, 503, 529) if adapter.is_refusal(status, b"")}
    assert refusals == {429, 503, 529}


ODD_PAGES = {
    "two that overflow together": "".join(f'vllm:num_requests_running{{engine="{i}"}} 1e308\n' for i in range(2)),
    "infinity": "vllm:num_requests_running +Inf\nvllm:num_preemptions_total 1e400",
    "less than nothing": "vllm:num_requests_running -1\nvllm:kv_cache_usage_perc -0.5",
    "a block of no size": 'vllm:cache_config_info{block_size="0",num_gpu_blocks="-9"} 1',
    "a line without end": "vllm:num_requests_running{" + "a" * 100_000,
    "labels without end": "vllm:num_requests_running{" + 'a="",' * 100_000 + "} 1",
    "names without end": "vllm:num_requests_running{" + "a" * 15_000 + "} 1",
    "a quote without end": 'vllm:num_requests_running{a="' + '\\\\"' * 5000 + "} 1",
}


@pytest.mark.parametrize("name", ODD_PAGES)
def test_what_no_gauge_can_be_says_nothing(name: str) -> None:
    snapshot = VllmAdapter().snapshot(ODD_PAGES[name] + "\nvllm:num_requests_waiting 1\n", 1.0)
    assert snapshot in (Gauges(1.0, running=None, waiting=1), Gauges(1.0, running=1, waiting=1))


def test_samples_without_end_are_bounded() -> None:
    page = "vllm:num_requests_running 1\n" * (2 * SAMPLES_MAX)
    assert len(samples(page, lines_of({"vllm_num_requests_running"}))["vllm_num_requests_running"]) == SAMPLES_MAX
