"""How is an outcome shown? As a table in the terminal, as JSON, as a page with figures."""

from __future__ import annotations

import csv
import json
from collections.abc import Mapping, Sequence
from io import StringIO
from pathlib import Path

from lab.experiment import Experiment, Figure, Findings, Row, Value, Verdict
from lab.plots import chart

HEADS = ("measure", "published", "ours", "required", "verdict")
LONG = 8
"""Requirements above which a page shows only the missed ones; the file beside it has the others."""


def as_text(experiment: Experiment, findings: Findings) -> str:
    """Aligned columns under a heading, and the notes."""
    rows = [HEADS, *(_cells(row) for row in findings.rows)]
    widths = [max(len(row[column]) for row in rows) for column in range(len(HEADS))]
    lines = [f"{experiment.name}: {experiment.reproduces}"]
    for row in rows:
        cells = [row[0].ljust(widths[0]), row[1].rjust(widths[1]), row[2].rjust(widths[2])]
        lines.append("  " + "  ".join([*cells, row[3].ljust(widths[3]), row[4]]).rstrip())
    return "\n".join([*lines, *(f"  {note}" for note in findings.notes)]) + "\n"


def as_json(by_experiment: Mapping[Experiment, Findings]) -> str:
    """Every row of every experiment, with numbers as numbers."""
    document = {
        experiment.name: {
            "reproduces": experiment.reproduces,
            "rows": [dict(zip(HEADS, _fields(row), strict=True)) for row in findings.rows],
            "figures": {
                figure.name: {one.name: [list(point) for point in one.points] for one in figure.series}
                for figure in findings.figures
            },
            "notes": list(findings.notes),
        }
        for experiment, findings in by_experiment.items()
    }
    return json.dumps(document, indent=1, ensure_ascii=False) + "\n"


def details(findings: Findings) -> Sequence[Row]:
    """Rows that are only in the file beside the page: those without a requirement, and met ones of a long table."""
    met = [row for row in findings.rows if row.verdict is Verdict.MET]
    free = [row for row in findings.rows if row.verdict is Verdict.SHOWN]
    return [*met, *free] if len(findings.rows) - len(free) > LONG else free


def as_csv(findings: Findings) -> str:
    """Every row that the page leaves out, without its verdict."""
    text = StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(HEADS[:4])
    writer.writerows(_cells(row)[:4] for row in details(findings))
    return text.getvalue()


def as_markdown(experiment: Experiment, findings: Findings) -> str:
    """A section with the table, the figures (in `figures/`) and the notes."""
    left_out = details(findings)
    met = f": {counted(findings.rows)}" if counted(findings.rows) else ""
    lines = [f"## {experiment.reproduces}", "", f"`python -m lab {experiment.name}`{met}", ""]
    shown = [row for row in findings.rows if row not in left_out]
    if shown:
        lines += [f"| {' | '.join(HEADS[:4])} |", "| --- | ---: | ---: | --- |"]
    for row in shown:
        cells = [cell.replace("|", "\\|") for cell in _cells(row)[:4]]
        if row.verdict is Verdict.MISSED:
            cells[-1] = f"{cells[-1]}: **missed**"
        lines.append(f"| {' | '.join(cells)} |")
    if left_out:
        lines += ["", f"[More numbers](reproduction/{experiment.name}.csv): {len(left_out)}."]
    for figure in findings.figures:
        lines += ["", f"![{figure.title}](figures/{figure.name}.svg)"]
    for note in findings.notes:
        lines += ["", note]
    return "\n".join(lines) + "\n"


IN_WORDS = {
    "LPM": "longest prefix",
    "RR+LPM": "in turn + prefix",
    "VTC+RR": "vtc, in turn",
    "Preble-like": "prefix, then load",
    "FS (W)": "wsc, as printed",
    "FS (W+I)": "fairserve, printed",
    "RPM(10)": "10 a minute",
    "RPM(30)": "30 a minute",
    "RPM(60)": "60 a minute",
}
"""Meanings of the tables' short names, for the legends of figures."""


def draw(figure: Figure, directory: Path) -> Path:
    """Write a figure as SVG. Raises OSError."""
    path = directory / f"{figure.name}.svg"
    series = [one._replace(name=IN_WORDS.get(one.name, one.name)) for one in figure.series]
    path.write_text(chart(series, figure.title, figure.x_label, figure.y_label, x_from=figure.x_from))
    return path


def summary(rows: Sequence[Row]) -> str:
    """How many requirements are met, and which are not?"""
    missed = [row.measure for row in rows if row.verdict is Verdict.MISSED]
    if not (met := counted(rows)):
        return "nothing is required, for comparison only"
    return f"{met} requirements met" + (f"; missed: {', '.join(missed)}" if missed else "")


def counted(rows: Sequence[Row]) -> str:
    """How many requirements are met, of how many? Empty: nothing is required."""
    required = [row.verdict for row in rows if row.verdict is not Verdict.SHOWN]
    return f"{required.count(Verdict.MET)} of {len(required)}" if required else ""


def _fields(row: Row) -> tuple[Value, ...]:
    return row.measure, row.published, row.ours, row.required, row.verdict.value


def _cells(row: Row) -> tuple[str, ...]:
    return tuple(_text(value) for value in _fields(row))


def _text(value: Value) -> str:
    """Numbers as papers print them: no more digits than say something."""
    if isinstance(value, str):
        return value
    if value == int(value) and abs(value) < 1e6:
        return f"{int(value)}"
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}" if abs(value) < 1 else f"{value:.2f}"
