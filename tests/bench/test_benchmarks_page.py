"""docs/benchmarks.md has a block for each kind of results, which is replaced without the text around it."""

from __future__ import annotations

import pytest

from bench.all import HEADS, PAGE, ROWS, Row, written

TEXT = PAGE.read_text(encoding="utf-8")
BLOCKS = ("gateways", "vllm", "running")


@pytest.mark.parametrize("block", BLOCKS)
def test_a_block_is_replaced_alone(block: str) -> None:
    begin, end = f"<!-- {block} -->\n", "<!-- end -->"
    before, _, rest = TEXT.partition(begin)
    after = rest.partition(end)[2]
    once = written(TEXT, block, "numbers")
    assert once == f"{before}{begin}\nnumbers\n\n{end}{after}"
    assert written(once, block, "numbers") == once


def test_the_page_has_each_row_in_the_form_that_is_written() -> None:
    assert f"| {' | '.join(HEADS)} |" in TEXT
    assert all(f"| {row.measure} |" in TEXT for row in ROWS)


@pytest.mark.parametrize(
    ("ours", "is_least", "met"),
    [(90.0, True, "0.9: no"), (99.0, True, "0.99: yes"), (90.0, False, "0.9: yes"), (99.0, False, "0.99: no")],
)
def test_a_row_says_whether_fairgate_keeps_its_limit(ours: float, is_least: bool, met: str) -> None:
    row = Row("measure", ("flood", "clients", "64"), "rate", limit=0.95, over="nginx", is_least=is_least)
    routes = {"nginx": {"rate": 100.0}, "fairgate": {"rate": ours}}
    bound = f"at {'least' if is_least else 'most'} 0.95 of nginx"
    assert row.cells({"flood": {"clients": {"64": routes}}}) == ["measure", "", "100", f"{ours:.0f}", bound, met]
