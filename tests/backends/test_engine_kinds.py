"""Every kind of engine is recognised, old and new; its pages, which name their source, are read, its refusals known."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path

import pytest

from backends.engines.adapter import UNREADABLE
from backends.engines.by_metrics import OllamaAdapter, TgiAdapter
from backends.engines.kinds import KINDS, recognise
from backends.engines.llama_cpp import LlamaCppAdapter
from backends.engines.vllm import VllmAdapter
from backends.promtext import SAMPLES_MAX, lines_of, samples
from policies.capacity.gauges import Gauges

FIXTURES = Path(__file__).parent / "fixtures"
ENGINES = FIXTURES / "engines"
METRICS = [
    *((path, "vllm") for path in sorted(FIXTURES.glob("vllm-*.txt"))),
    *((path, path.name.removesuffix("-metrics.txt")) for path in sorted(ENGINES.glob("*-metrics.txt"))),
]
OWNERS = {
    "vllm": "vllm", "sglang": "sglang", "llamacpp": "llama.cpp", "tensorrt_llm": "tensorrt-llm", "library": "ollama",
    "lmdeploy": "lmdeploy", "local": "openai", "openai": "openai", "": "openai", "system": "openai",
}  # fmt: skip


def page(name: str) -> str:
    return (FIXTURES / name if name.startswith("vllm-") else ENGINES / name).read_text()


def test_there_are_pages_of_each_kind_that_has_metrics() -> None:
    assert {kind_of(name) for _, name in METRICS} == {name for name, kind in KINDS.items() if kind.metric_prefixes}


@pytest.mark.parametrize(("path", "kind"), METRICS, ids=lambda value: getattr(value, "name", value))
def test_an_engine_is_recognised_by_its_metrics_whatever_owns_its_models(path: Path, kind: str) -> None:
    for owners in ({"vllm"}, {"somebody"}, set[str]()):
        assert recognise(owners, path.read_text()).name == kind_of(kind)


@pytest.mark.parametrize(("owner", "kind"), OWNERS.items())
def test_an_engine_without_metrics_is_recognised_by_who_owns_its_models(owner: str, kind: str) -> None:
    for answer in ("", "# HELP x\nhttp_requests_total 1\n", page("tensorrt-llm-1.2-iterations.json")):
        assert recognise({owner}, answer).name == kind


def test_a_server_of_models_of_several_owners_is_not_known() -> None:
    assert recognise({"vllm", "openai"}, "").name == "openai"
    assert recognise(set(), "").name == "openai"


SNAPSHOTS = {
    "vllm-0.8.5.txt": Gauges(1.0, 3, 7, 0.25, 1000 * 16, 16, 11),
    "vllm-0.11-pids.txt": Gauges(1.0, 7, 2, 0.3, 256 * 16, 16, 3),
    "vllm-0.32-single.txt": Gauges(1.0, 0, 0, 0.0, 128 * 32, 32, 0, 0, deferred=0),
    "vllm-0.32-openmetrics.txt": Gauges(1.0, 0, 0, 0.0, 128 * 32, 32, 0, deferred=0),
    # Engines that never stepped say nothing of their load: absent is not zero.
    "vllm-0.32-dp2.txt": Gauges(1.0, None, None, None, 2 * 128 * 32, 32, 0, 0),
    "llama.cpp-2026-10-metrics.txt": Gauges(1.0, 2, 3, prompt_tokens_total=112, output_tokens_total=930),
    "llama.cpp-2026-10-slots.json": Gauges(1.0, 2),
    "llama.cpp-b6700-metrics.txt": Gauges(1.0, 2, 3, prompt_tokens_total=746, output_tokens_total=310),
    "sglang-0.5.23-loads.json": Gauges(1.0, 12, 2, 0.3, 200_000, max_num_seqs=128),
    "sglang-0.5.23-metrics.txt": Gauges(
        1.0, 26, 4, 80860 / 161721, 161_721, preemptions_total=3, prompt_tokens_total=8128902,
        output_tokens_total=7557572,
    ),
    "sglang-0.4.1-metrics.txt": Gauges(1.0, 162, 2826, prompt_tokens_total=8128902, output_tokens_total=7557572),
    "tgi-3.3-metrics.txt": Gauges(1.0, 5, 3, 8123 / 16000, 16_000),
    "tgi-1.4-metrics.txt": Gauges(1.0, 8, 5),
    "tensorrt-llm-1.2-metrics.txt": Gauges(1.0, 3, 1, 0.62, 32_000, 32),
    "lmdeploy-0.18-metrics.txt": Gauges(1.0, 6, 1, 0.375, prompt_tokens_total=1000, output_tokens_total=2000),
    "lmdeploy-0.9-metrics.txt": Gauges(1.0, 5, 10, prompt_tokens_total=900, output_tokens_total=1000),
    "max-26.7-metrics.txt": Gauges(1.0, 8, 2, 16 / 256),
}  # fmt: skip


def kind_of(name: str) -> str:
    return max((kind for kind in KINDS if name.startswith(kind)), key=len)


@pytest.mark.parametrize("name", SNAPSHOTS)
def test_every_version_is_read(name: str) -> None:
    assert KINDS[kind_of(name)]().snapshot(page(name), 1.0) == SNAPSHOTS[name]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("text", ["", "no metric 1\n", '# HELP x\nhttp_requests_total{a="b"} 1\n'])
def test_a_page_of_something_else_is_nothing(kind: str, text: str) -> None:
    assert KINDS[kind]().snapshot(text, 1.0) is None


@pytest.mark.parametrize("text", ["{}", "[", "[1]", '{"loads": 3}', '{"loads": [3]}', '[{"is": 1}]', "{", "null"])
@pytest.mark.parametrize("kind", KINDS)
def test_json_that_is_no_page_is_an_error_or_nothing(kind: str, text: str) -> None:
    with suppress(*UNREADABLE):
        found = KINDS[kind]().snapshot(text, 1.0)
        assert found is None or not found.running


def test_max_tells_what_runs_apart_from_what_waits_only_after_a_step() -> None:
    text = page("max-26.7-metrics.txt")
    lines = [line for line in text.splitlines() if "num_requests_queued" not in line and "cache_num" not in line]
    for queued, running in (("", None), ("\nmaxserve_num_requests_queued 9.0\n", 1)):
        found = KINDS["max"]().snapshot("\n".join(lines) + queued, 1.0)
        assert found is not None
        assert (found.running, found.waiting) == (running, 9 if queued else None)
    idle = KINDS["max"]().snapshot("maxserve_num_requests_running 0.0\n", 1.0)
    assert idle == Gauges(1.0, 0)


def test_facts_that_no_gauge_tells() -> None:
    llama, tgi, ollama = LlamaCppAdapter(), TgiAdapter(), OllamaAdapter()
    llama.read_facts(page("llama.cpp-2026-10-props.json"))
    assert (llama.slots, llama.context_tokens) == (2, 8192)
    tgi.read_facts(page("tgi-3.3-info.json"))
    assert (tgi.slots, tgi.context_tokens, tgi.version) == (None, 8192, "3.3.4")
    ollama.read_facts(page("ollama-ps.json"))
    assert (ollama.slots, ollama.context_tokens) == (1, 4096)


def test_a_description_says_what_was_found_and_what_is_missing() -> None:
    llama = LlamaCppAdapter()
    llama.read_facts(page("llama.cpp-2026-10-props.json"))
    assert llama.description().startswith("llama.cpp: 2 slots of 8,192 tokens; reports the output")
    assert "tenants share its prompt cache" in llama.description()
    for kind in KINDS.values():
        assert kind().description().startswith(kind.title)
        assert kind.gaps
        assert kind.takes_cache_salt or any("tenants share" in gap for gap in kind.gaps)


@pytest.mark.parametrize(
    ("kind", "status", "body"),
    [
        ("vllm", 503, b'{"error":{"message":"busy","type":"Service Unavailable","param":null,"code":503}}'),
        ("vllm", 503, b'{"type":"error","error":{"type":"overloaded_error","message":"busy"}}'),
        ("vllm", 429, b""),
        ("openai", 429, b""),
        ("openai", 503, b""),
        ("openai", 529, b""),
        ("tgi", 429, b'{"error":"Model is overloaded","error_type":"overloaded"}'),
        ("ollama", 503, b'{"error":"server busy, please try again.  maximum pending requests exceeded"}'),
        ("llama.cpp", 503, b'{"error":{"code":503,"message":"Loading model","type":"unavailable_error"}}'),
        ("sglang", 503, b""),
        ("max", 429, b""),
    ],
)
def test_refusals(kind: str, status: int, body: bytes) -> None:
    adapter = KINDS[kind]()
    assert adapter.is_refusal(status, body)
    for other in (200, 400, 401, 404, 422, 500, 502):
        assert not adapter.is_refusal(other, body)


def test_vllm_refuses_by_a_500_where_it_shuts_down() -> None:
    said = b'{"error":{"message":"%b","code":500}}'
    assert VllmAdapter().is_refusal(500, said % b"cannot schedule new futures after shutdown")
    assert not VllmAdapter().is_refusal(500, said % b"boom")


# --- what a page may hold ---


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
