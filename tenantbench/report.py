"""A table of several gateways, rows of a chosen subject's losses first. There is no score."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from statistics import median
from typing import Any

from tenantbench.metrics import METRICS, Metric

DIRECT = "direct"
SAME, LEAST = 0.02, 0.001
"""Differences below this part, this amount, or the spread over rounds, are no loss."""


@dataclass(frozen=True)
class Value:
    """The median over rounds that count. Where all rounds are void, over those, and the value is void."""

    middle: float
    spread: float
    is_void: bool

    def __str__(self) -> str:
        digits = f"{self.middle:,.0f}" if abs(self.middle) >= 100 else f"{self.middle:.3g}"
        text = digits + (f"±{50 * self.spread:.0f}" if self.spread else "")
        return f"[{text}]" if self.is_void else text


@dataclass(frozen=True)
class Row:
    workload: str
    metric: Metric
    values: dict[str, Value]

    def best_of(self, names: Iterable[str]) -> str:
        """Return the gateway with the best value that is not void; the first of equals."""
        sign = -1 if self.metric.is_high_good else 1
        return min(names, key=lambda name: (self.values[name].is_void, sign * self.values[name].middle))

    def beats(self, one: str, other: str) -> bool:
        """Whether one gateway's value is better than the other's by more than their spread."""
        first, second = self.values[one], self.values[other]
        part = max(SAME, first.spread / 2, second.spread / 2)
        margin = max(LEAST, part * max(abs(first.middle), abs(second.middle)))
        difference = first.middle - second.middle
        return (difference if self.metric.is_high_good else -difference) > margin


def add_ratios(cells: list[dict[str, Any]]) -> None:
    """Divide tokens/s by those of the engine alone, in the same round of the same run."""
    alone = {(cell["workload"], cell["round"]): cell for cell in cells if cell["gateway"] == DIRECT}
    for cell in cells:
        engine, own = alone.get((cell["workload"], cell["round"])), cell["metrics"].get("d_tokens_per_s")
        if engine and own is not None and engine["metrics"]["d_tokens_per_s"] and (cell["void"] or not engine["void"]):
            cell["metrics"]["d_of_engine"] = own / engine["metrics"]["d_tokens_per_s"]


def value_of(cells: list[dict[str, Any]], key: str) -> Value | None:
    valid = [cell["metrics"][key] for cell in cells if not cell["void"] and cell["metrics"].get(key) is not None]
    found = valid or [cell["metrics"][key] for cell in cells if cell["metrics"].get(key) is not None]
    if not found:
        return None
    middle = median(found)
    spread = (max(found) - min(found)) / abs(middle) if middle else 0.0
    return Value(middle, spread, not valid)


def rows_of(results: list[dict[str, Any]]) -> list[Row]:
    """Return a row for each metric of each workload. Results that are not comparable keep columns of their own."""
    by_cell: dict[tuple[str, str], list[dict[str, Any]]] = defaultdict(list)
    sets = [result["comparability"] for result in results]
    for i, result in enumerate(results):
        suffix = "" if sets[i] == sets[0] else f" (run {i + 1})"
        add_ratios(result["cells"])
        for cell in result["cells"]:
            by_cell[cell["gateway"] + suffix, cell["workload"]].append(cell)
    gateways = list(dict.fromkeys(gateway for gateway, _ in by_cell))
    rows = []
    for metric in METRICS:
        for workload in metric.workloads:
            values = {gateway: value_of(by_cell[gateway, workload], metric.key) for gateway in gateways}
            known = {gateway: value for gateway, value in values.items() if value is not None}
            if known:
                rows.append(Row(workload, metric, known))
    return rows


def losses(rows: list[Row], subject: str) -> list[tuple[Row, str, list[str]]]:
    """Return each row in which the best of the other gateways beats some of the subject's, and those."""
    found = []
    for row in rows:
        others = [name for name in row.values if not name.startswith(subject)]
        if others:
            best = row.best_of(others)
            lost = [name for name in row.values if name.startswith(subject) and row.beats(best, name)]
            found += [(row, best, lost)] if lost else []
    return found


def _cells(row: Row, gateways: list[str], lost: list[str]) -> list[str]:
    """Return a value for each gateway: the best bold, those that lose in italics."""
    top = row.values[row.best_of(row.values)].middle
    cells = []
    for name in gateways:
        value = row.values.get(name)
        mark = "**" if value and value.middle == top else "*" if name in lost else ""
        cells.append(f"{mark}{value or '-'}{mark}")
    return cells


def table(rows: list[Row], gateways: list[str], lost: dict[int, list[str]]) -> list[str]:
    """Return Markdown lines: a table of the rows, then the metrics in which all gateways are equal."""
    lines = [f"| metric | workload | {' | '.join(gateways)} |", "| --- " * 2 + "| ---: " * len(gateways) + "|"]
    equal: dict[str, list[str]] = defaultdict(list)
    for row in rows:
        title = row.metric.title + (f", {row.metric.unit}" if row.metric.unit else "")
        if len({value.middle for value in row.values.values()}) == 1 < len(row.values):
            equal[f"{title}: {next(iter(row.values.values()))}"].append(row.workload)
        else:
            cells = _cells(row, gateways, lost.get(id(row), []))
            lines.append(f"| {title} | {row.workload} | {' | '.join(cells)} |")
    if equal:
        lines += ["", "Equal for all:", "", *(f"- {said} ({', '.join(where)})" for said, where in equal.items())]
    return lines


def text_of(results: list[dict[str, Any]], subject: str = "") -> str:
    """Return Markdown: what was measured on, the rows that the subject loses, and all others."""
    rows = rows_of(results)
    lines = ["# tenantbench", ""]
    for i, result in enumerate(results):
        same = ", ".join(f"{key} {value}" for key, value in result["comparability"].items())
        versions: dict[str, list[str]] = defaultdict(list)
        for name, version in result["gateways"].items():
            versions[version].append(name)
        lines += [f"Run {i + 1}: {same}.", ""]
        lines += [f"- {', '.join(names)}: {version}" for version, names in versions.items()]
        lines += [f"- Left out: {name}: {reason.splitlines()[0]}" for name, reason in result["left_out"].items()]
    lost = {id(row): own for row, _, own in losses(rows, subject)} if subject else {}
    gateways = list(dict.fromkeys(name for row in rows for name in row.values))
    rounds = max(cell["round"] for result in results for cell in result["cells"])
    said = f"Medians of {rounds} rounds; ± is half of their range, in percent." if rounds > 1 else "One round."
    lines += ["", f"{said} The best of each row is bold{f', what {subject} loses is in italics' if subject else ''}."]
    if lost:
        first = [row for row in rows if id(row) in lost]
        rows = [row for row in rows if id(row) not in lost]
        lines += ["", f"## Rows that {subject} loses", "", *table(first, gateways, lost)]
    lines += ["", "## Other rows" if lost else "## Metrics", "", *table(rows, gateways, lost)]
    if voids := [cell for result in results for cell in result["cells"] if cell["void"]]:
        lines += ["", "## Void", "", "Numbers in brackets must not be used.", ""]
        lines += [f"- {c['gateway']} {c['workload']} round {c['round']}: {', '.join(c['void'])}" for c in voids]
    lines += ["", "## Formulas", "", *(f"- {metric.title}: {metric.formula}" for metric in METRICS)]
    return "\n".join(lines) + "\n"
