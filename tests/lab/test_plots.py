"""A chart uses the room that it has: its axes end where the data do."""

from __future__ import annotations

import re
from xml.etree import ElementTree

import pytest

from lab.plots import BOTTOM, HEIGHT, LEFT, RIGHT, TOP, WIDTH, Series, chart


def drawn(svg: str) -> list[list[tuple[float, float]]]:
    """The points of each line, in pixels."""
    paths = [path for path in re.findall(r'<path d="M([^"]*)"[^>]* stroke-width="1.8"', svg) if "h" not in path]
    return [[(float(x), float(y)) for x, y in (pair.split() for pair in path.split("L"))] for path in paths]


@pytest.mark.parametrize("last", [(59.2, 7.0), (0.31, 108_000.0), (1.0, 1.0), (81.0, 0.013)])
def test_axes_end_with_the_data(last: tuple[float, float]) -> None:
    svg = chart([Series("one", [(0.0, 0.0), last])], "title", "x", "y")
    assert drawn(svg) == [[(LEFT, HEIGHT - BOTTOM), (WIDTH - RIGHT, TOP)]]
    ticks = [text for text in ElementTree.fromstring(svg).iter() if text.attrib.get("text-anchor") == "end"]
    assert 3 <= len(ticks) <= 9, "it can still be read"


def test_charts_that_are_to_be_compared_have_the_same_axes() -> None:
    svg = chart([Series("one", [(0.0, 0.0), (30.0, 5.0)])], "title", "x", "y", x_to=60.0, y_to=10.0)
    assert drawn(svg)[0][1] == (LEFT + (WIDTH - RIGHT - LEFT) / 2, TOP + (HEIGHT - BOTTOM - TOP) / 2)
