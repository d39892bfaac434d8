"""The command `fairgate top`: /state of the admin listener as tables for a terminal."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import click

from gateway.commands.admin import admin_of, asks_admin

CELL_LENGTH_MAX: Final = 24
"""Limit on the shown characters of all but the last column."""
TABLES: Final = {
    "tenants": {
        "tenant": "tenant", "group": "group", "weight": "weight", "received": "share_received", "due": "share_due",
        "queued": "queued_requests", "running": "running_requests", "p50": "wait_p50_s", "p95": "wait_p95_s",
        "refused": "refused_requests",
    },
    "groups": {
        "group": "group", "in": "in", "weight": "weight", "received": "share_received", "due": "share_due",
        "queued": "queued_requests", "running": "running_requests", "at least": "guaranteed_share",
        "at most": "max_share", "running at most": "max_running", "lends": "lending_limit",
        "borrows": "borrowing_limit",
    },
    "backends": {
        "engine": "backend", "running": "running_sequences", "slots": "slots", "KV": "kv_ratio",
        "starting": "starting_requests", "read by": "read_by", "next waits for": "obstacle", "out of service": "reason",
    },
    "gateways": {"gateway": "gateway", "queued": "queued_requests", "running": "dispatched_requests"},
}  # fmt: skip
"""Columns of each list of a pool: head and field."""
ALWAYS: Final = ("wait_p50_s", "wait_p95_s", "obstacle")
"""Columns that are shown although no row has a value."""


@click.command()
@asks_admin
def top(path: Path | None, admin: str | None) -> None:
    """Show who waits, who receives how much, and what limits the engines.

    \b
    fairgate top -c config.yaml
    watch -n 1 fairgate top -c config.yaml      again every second
    """
    asked = admin_of(path, admin)
    state, lines = asked.ask("/state"), [f"fairgate {asked.url}"]
    for pool in state["pools"]:
        counts = f"{pool['queued_requests']} waiting, {pool['dispatched_requests']} running"
        lines += ["", f"pool {pool['pool']}, policy {pool['policy']}: {counts}", pool["limited_by_is"]]
        for name, columns in TABLES.items():
            lines += _table(columns, pool[name])
            if name == "tenants":
                lines += _remarks(pool, state["window_s"])
    # A terminal would take other characters for a command.
    click.echo("\n".join("".join(each if each.isprintable() else "?" for each in line) for line in lines))


def _remarks(pool: Mapping[str, Any], window_s: float) -> Iterator[str]:
    """Yield the lines below the table of tenants."""
    if not pool["tenants"]:
        yield f"No request came in the last {window_s:g} s."
        return
    if pool["tenants_left_out"]:
        yield f"and {pool['tenants_left_out']} more tenants"
    for ceiling in dict.fromkeys(one["ceiling"] for one in pool["tenants"] if one["ceiling"]):
        yield f"waiting: {ceiling}"
    yield f"received, wait (p50, p95), refused: last {window_s:g} s"
    yield "due: its part by weight and groups, and what others leave"


def _table(columns: Mapping[str, str], rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return the lines of a table after an empty line, without columns that no row has. Text is left-aligned."""
    from simulation import report  # loaded for people only

    heads = [
        head for head, field in columns.items() if field in ALWAYS or any(row[field] not in (None, "") for row in rows)
    ]
    cells = [[_format_cell(columns[head], row[columns[head]]) for head in heads] for row in rows]
    if not cells:
        return []
    cells = [[*(_cut(cell) for cell in row[:-1]), row[-1]] for row in cells]
    left = [at for at, head in enumerate(heads) if any(isinstance(row[columns[head]], str) for row in rows)]
    return ["", *report.columns([heads, *cells], left=left).splitlines()]


def _format_cell(field: str, value: Any) -> str:
    if isinstance(value, Mapping):
        value = sum(value.values())
    if value is None or value == "":
        return "-"
    if field.endswith("_s"):
        return f"{value:.1f} s" if value >= 1 else f"{1000 * value:.0f} ms"
    if "share" in field or field.endswith(("_ratio", "_limit")):
        return f"{value:.1%}"
    return f"{value:g}" if isinstance(value, float) else str(value)


def _cut(text: str) -> str:
    return text if len(text) <= CELL_LENGTH_MAX else f"{text[: CELL_LENGTH_MAX - 1]}…"
