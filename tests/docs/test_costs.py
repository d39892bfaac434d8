"""What a request costs stands in one place: README repeats docs/benchmarks.md, and no other page has its own number."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
README = (ROOT / "README.md").read_text(encoding="utf-8")
BENCHMARKS = (DOCS / "benchmarks.md").read_text(encoding="utf-8")
A_REQUEST = re.compile(r"\b[\d.]+ (?:us|µs|microseconds)(?: \w+)? (?:for )?(?:a|each|per) request")


def row(table: str, first: str) -> list[str]:
    """Return the cells of the row that begins so, without emphasis."""
    [line] = [line for line in table.splitlines() if line.startswith(f"| {first} |")]
    return [cell.strip(" *") for cell in line.strip("|").split("|")][1:4]


@pytest.mark.parametrize(
    ("readme", "page"),
    [
        ("tokens per second meanwhile", "tokens per second, N=64"),
        ("tokens per second beside 200 heavy streams", "tokens per second, N=200"),
        ("small answers in one piece per second", "small requests per second, not streamed"),
        ("small streamed answers per second", "small requests per second, streamed"),
    ],
)
def test_the_readme_repeats_what_the_page_of_benchmarks_says(readme: str, page: str) -> None:
    assert row(README, readme) == row(BENCHMARKS, page)


def test_the_readme_rounds_the_waits_to_hundredths_of_a_second() -> None:
    seconds = [
        float(cell.removesuffix(" s")) for cell in row(README, "first token of a light user beside 64 heavy streams")
    ]
    measured = row(BENCHMARKS, "light tenant's median TTFT, N=64")
    assert seconds == [round(float(cell.removesuffix(" ms").replace(",", "")) / 1000, 2) for cell in measured]


def test_no_other_page_says_what_a_request_costs() -> None:
    pages = [ROOT / "README.md", ROOT / "ARCHITECTURE.md", *DOCS.rglob("*.md")]
    named = {page.relative_to(ROOT).as_posix() for page in pages if A_REQUEST.search(page.read_text(encoding="utf-8"))}
    assert named <= {"docs/benchmarks.md"}
