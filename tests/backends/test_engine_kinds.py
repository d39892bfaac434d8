"""Every kind of engine is recognised, old and new, and its pages are read. Each page names its source."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path

import pytest

from backends.engines.adapter import UNREADABLE
from backends.engines.kinds import KINDS, recognise
from backends.engines.llama_cpp import LlamaCppAdapter
from backends.engines.ollama import OllamaAdapter
from backends.engines.tgi import TgiAdapter
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
    return (ENGINES / name).read_text()


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
@pytest.mark.parametrize("text", ["", "no metric 1\n", "# nothing\n"])
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
    for other in (200, 400, 404, 422, 500):
        assert not adapter.is_refusal(other, body)
