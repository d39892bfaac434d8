"""Line charts as SVG text, without a library or script."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from math import floor, isfinite, log10
from typing import NamedTuple

COLOURS = ("#2f6f9f", "#d08c4a", "#5a9367", "#a8476b", "#7a68a6", "#8a7a4d", "#3b9ca3", "#9a9a9a")
"""Colours in order; from the second round on, lines are dashed."""

INK = "#6e7781"
"""Colour of text and grid, readable on light and dark ground."""

WIDTH, HEIGHT = 640, 320
LEFT, RIGHT, TOP, BOTTOM = 64, 150, 32, 44
TICKS_MAX = 8
NAMES_MAX = 14
"""Lines named in the legend; more would not fit beside the plot."""


class Series(NamedTuple):
    """A line: its name, and its points in order of x. `dots` marks each point."""

    name: str
    points: Sequence[tuple[float, float]]
    dots: bool = False


def chart(
    series: Sequence[Series], title: str, x_label: str, y_label: str, *, x_from: float = 0.0, x_to: float = 0.0,
    y_to: float = 0.0, width: int = WIDTH,
) -> str:  # fmt: skip
    """Return an SVG document with one line for each series. The y axis begins at 0; infinite points are left out.

    Axes end where the data do. The x axis begins at `x_from` or below; the axes reach `x_to` and `y_to` or further, so
    that charts can be compared.
    """
    lines = [(one, [point for point in one.points if isfinite(point[0]) and isfinite(point[1])]) for one in series]
    xs = [x for _, points in lines for x, _ in points] or [0.0]
    ys = [y for _, points in lines for _, y in points] or [0.0]
    x_axis = _Axis(min(x_from, *xs), max(x_from, x_to, *xs), LEFT, width - RIGHT)
    y_axis = _Axis(min(0.0, *ys), max(y_to, *ys), HEIGHT - BOTTOM, TOP)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {HEIGHT}" width="{width}" height="{HEIGHT}" '
        f'font-family="sans-serif" font-size="11" fill="{INK}">',
        f'<text x="{LEFT}" y="18" font-size="13">{escape(title)}</text>',
        *_grid(x_axis, y_axis, x_label, y_label, width),
    ]
    for number, (one, points) in enumerate(lines):
        parts += _line(number, one, [(x_axis.at(x), y_axis.at(y)) for x, y in points])
        if number < NAMES_MAX:
            parts += _legend(number, one.name, width)
    if len(lines) > NAMES_MAX:
        parts.append(f'<text x="{width - RIGHT + 12}" y="{TOP + 8 + 18 * NAMES_MAX}">... {len(lines)} in all</text>')
    return "\n".join([*parts, "</svg>"]) + "\n"


class _Axis:
    """A map from values to pixels, and its ticks."""

    def __init__(self, low: float, high: float, begin_px: float, end_px: float) -> None:
        step = _step((high - low) / TICKS_MAX or 1.0)
        self.low = floor(low / step) * step
        high = max(high, self.low + step)
        self.ticks = [self.low + number * step for number in range(1 + floor((high - self.low) / step + 1e-9))]
        self._begin_px = begin_px
        self._scale = (end_px - begin_px) / (high - self.low)

    def at(self, value: float) -> float:
        return self._begin_px + (value - self.low) * self._scale


def _step(about: float) -> float:
    """Round up to 1, 2 or 5 times a power of ten."""
    power = 10.0 ** floor(log10(about))
    return float(next(times * power for times in (1, 2, 5, 10) if times * power >= about * (1 - 1e-9)))


def _grid(x_axis: _Axis, y_axis: _Axis, x_label: str, y_label: str, width: int) -> list[str]:
    right, bottom = width - RIGHT, HEIGHT - BOTTOM
    parts = []
    for tick in y_axis.ticks:
        y = y_axis.at(tick)
        parts.append(f'<path d="M{LEFT} {y:.1f}H{right}" stroke="{INK}" stroke-opacity="0.25"/>')
        parts.append(f'<text x="{LEFT - 6}" y="{y + 4:.1f}" text-anchor="end">{_number(tick)}</text>')
    parts += [
        f'<text x="{x_axis.at(tick):.1f}" y="{bottom + 16}" text-anchor="middle">{_number(tick)}</text>'
        for tick in x_axis.ticks
    ]
    middle = (LEFT + right) / 2
    parts.append(f'<text x="{middle}" y="{HEIGHT - 8}" text-anchor="middle">{escape(x_label)}</text>')
    centre = (TOP + bottom) / 2
    parts.append(
        f'<text x="14" y="{centre}" text-anchor="middle" transform="rotate(-90 14 {centre})">{escape(y_label)}</text>'
    )
    return parts


def _number(value: float) -> str:
    if abs(value) >= 1e6:
        return f"{value / 1e6:g}M"
    if abs(value) >= 1e4:
        return f"{value / 1e3:g}k"
    return f"{round(value, 10):g}"


def _style(number: int) -> str:
    dashed = ' stroke-dasharray="5 3"' if number >= len(COLOURS) else ""
    return f'stroke="{COLOURS[number % len(COLOURS)]}" stroke-width="1.8" fill="none"{dashed}'


def _line(number: int, series: Series, pixels: Sequence[tuple[float, float]]) -> list[str]:
    if not pixels:
        return []
    path = "L".join(f"{x:.1f} {y:.1f}" for x, y in pixels)
    parts = [f'<path d="M{path}" {_style(number)}/>']
    if series.dots or len(pixels) == 1:
        colour = COLOURS[number % len(COLOURS)]
        parts += [f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3" fill="{colour}"/>' for x, y in pixels]
    return parts


def _legend(number: int, name: str, width: int) -> list[str]:
    x, y = width - RIGHT + 12, TOP + 8 + 18 * number
    label = name if len(name) <= 20 else name[:19] + "…"
    return [f'<path d="M{x} {y - 4}h16" {_style(number)}/>', f'<text x="{x + 21}" y="{y}">{escape(label)}</text>']
