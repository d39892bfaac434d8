"""What a request costs stands in one place: README repeats docs/benchmarks.md, and no other page has its own number."""

from __future__ import annotations

import csv
import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
BENCHMARKS = (DOCS / "benchmarks.md").read_text(encoding="utf-8")
MEASURED = (DOCS / "benchmarks/cpu.csv").read_text(encoding="utf-8")
A_REQUEST = re.compile(r"\b[\d.]+ (?:us|µs|microseconds)(?: \w+)? (?:for )?(?:a|each|per) request")


def row(table: str, first: str) -> list[str]:
    """The cells of the row that begins so, without emphasis."""
    [line] = [line for line in table.splitlines() if line.startswith(f"| {first} |")]
    return [cell.strip(" *") for cell in line.strip("|").split("|")]


def test_the_readme_rounds_what_the_page_of_benchmarks_says() -> None:
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    _, _, nginx, ours = row(readme, "processor time for a request of 1 kB")
    said = row(BENCHMARKS, "per request of 1 kB, not streamed")
    assert [nginx, ours] == [f"{float(cell.split()[0]):.0f} µs" for cell in said[1:3]]
    _, *tokens = row(readme, "tokens per second meanwhile")
    assert tokens == [cell.split(" / ")[0] for cell in row(BENCHMARKS, "tokens per second, N=64 / N=200")[1:]]
    _, *small = row(readme, "small streamed answers per second")
    assert small == [
        cell.split(" / ")[0] for cell in row(BENCHMARKS, "small requests per second, streamed / not streamed")[1:]
    ]


def test_the_costs_are_those_that_were_measured_last() -> None:
    proxies = ["nginx", "fairgate", "vllm-router", "sglang-router", "aiohttp"]
    cases = {"per request of 1 kB, not streamed": "request, 1 kB", "per streamed chunk, in a burst": "chunk, burst"}
    cpu = {(case, proxy): time for case, proxy, time, *_ in csv.reader(MEASURED.splitlines())}
    for said, case in cases.items():
        measured = [cpu[case, proxy] for proxy in proxies]
        assert row(BENCHMARKS, said)[1:] == measured


def test_no_other_page_says_what_a_request_costs() -> None:
    pages = [ROOT / "README.md", ROOT / "ARCHITECTURE.md", *DOCS.rglob("*.md")]
    named = {page.relative_to(ROOT).as_posix() for page in pages if A_REQUEST.search(page.read_text(encoding="utf-8"))}
    assert named <= {"docs/benchmarks.md", "docs/benchmarks-all.md"}
