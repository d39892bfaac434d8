"""A page of bars: a panel for each metric, and in it each gateway. Needs the extra `plots`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tenantbench.report import Row, rows_of

SHOWN = (
    ("a_growth", "W2"), ("b_jain", "W2"), ("c_ttft_p99", "W1"), ("d_of_engine", "W1"), ("e_convergence_s", "W5"),
    ("e_starvation_s", "W1"), ("f_share_error", "W9"), ("g_tasks", "W7"), ("h_cheat_gain", "W4"), ("i_honesty", "W6"),
    ("j_errors", "W8"), ("k_cpu_ms", "W10"),
)  # fmt: skip
"""A panel for each of (a) to (k); (c) and (d) stand side by side."""


def draw(results: list[dict[str, Any]], path: Path) -> None:
    """Write a page as PNG, SVG or PDF, by the path's ending."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot

    rows = {(row.metric.key, row.workload): row for row in rows_of(results)}
    gateways = list(dict.fromkeys(name for row in rows.values() for name in row.values))
    figure, grid = pyplot.subplots(3, 4, figsize=(16, 11))
    for axes, key in zip(grid.flat, SHOWN, strict=True):
        draw_panel(axes, rows.get(key), gateways)
    figure.tight_layout()
    figure.savefig(path)
    pyplot.close(figure)


def draw_panel(axes: Any, row: Row | None, gateways: list[str]) -> None:
    if row is None:
        axes.set_axis_off()
        return
    known = [name for name in gateways if name in row.values]
    values = [row.values[name] for name in known]
    colours = ["lightgray" if value.is_void else "tab:blue" for value in values]
    errors = [value.spread * abs(value.middle) / 2 for value in values]
    axes.barh(known, [value.middle for value in values], xerr=errors, color=colours)
    for i, value in enumerate(values):
        axes.text(0, i, f" {value}", va="center", fontsize=8)
    axes.set_title(
        f"{row.metric.title}, {row.workload}: {'more' if row.metric.is_high_good else 'less'} is better", fontsize=9
    )
    axes.invert_yaxis()
