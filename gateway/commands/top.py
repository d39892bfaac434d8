"""The live view `fairgate top` on a terminal, made from /state of the admin listener."""

from __future__ import annotations

import shutil
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from typing import Any, Final

import click

from gateway.commands.admin import Admin, NotAnswered

TENANTS_SHOWN: Final = 30
"""Limit on a live view's rows of tenants, on a terminal that is high enough."""
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


def watch(admin: Admin, *, interval_s: float, once: bool) -> None:
    """Show the view until interrupted, or once. Raise NotAnswered if the first request fails."""
    is_live = sys.stdout.isatty() and not once
    shown, fault = view(admin, is_live=is_live), ""
    if not is_live:
        click.echo(shown)
        return
    with suppress(KeyboardInterrupt):
        while True:
            click.clear()
            click.echo(shown + fault)
            time.sleep(interval_s)
            try:
                shown, fault = view(admin, is_live=True), ""
            except NotAnswered as error:
                fault = f"\nnot answered, asked again: {error.text}"


def view(admin: Admin, *, is_live: bool) -> str:
    """Return the view of every pool: its limit, tenants, groups and engines. A live view has as many as fit."""
    state, lines = admin.get("/state"), [f"fairgate {admin.url}"]
    rows = max(3, min(TENANTS_SHOWN, shutil.get_terminal_size().lines - 14)) if is_live else None
    for pool in state["pools"]:
        counts = f"{pool['queued_requests']} waiting, {pool['dispatched_requests']} running"
        lines += ["", f"pool {pool['pool']}, policy {pool['policy']}: {counts}", pool["limited_by_is"]]
        for name, columns in TABLES.items():
            lines += _table(columns, pool[name][:rows])
            if name == "tenants":
                lines += _remarks(pool, state["window_s"], rows)
    # A terminal would take other characters for a command.
    return "\n".join("".join(each if each.isprintable() else "?" for each in line) for line in lines)


def _remarks(pool: Mapping[str, Any], window_s: float, rows: int | None) -> Iterator[str]:
    """Yield the lines below the table of tenants."""
    found = pool["tenants"]
    if not found:
        yield f"No request came in the last {window_s:g} s."
        return
    if left_out := len(found) - len(found[:rows]) + pool["tenants_left_out"]:
        yield f"and {left_out} more tenants"
    for ceiling in dict.fromkeys(one["ceiling"] for one in found if one["ceiling"]):
        yield f"waiting: {ceiling}"
    yield f"received, wait (p50, p95), refused: last {window_s:g} s"
    yield "due: its part by weight and groups, and what others leave"


def _table(columns: Mapping[str, str], rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return the lines of a table after an empty line, without settings and reasons that no row has. Text is left."""
    from simulation import report  # loaded for people only

    heads = [
        head for head, field in columns.items() if field in ALWAYS or any(row[field] not in (None, "") for row in rows)
    ]
    cells = [[_cell(columns[head], row[columns[head]]) for head in heads] for row in rows]
    if not cells:
        return []
    cells = [[*(_cut(cell) for cell in row[:-1]), row[-1]] for row in cells]
    left = [at for at, head in enumerate(heads) if any(isinstance(row[columns[head]], str) for row in rows)]
    return ["", *report.columns([heads, *cells], left=left).splitlines()]


def _cell(field: str, value: Any) -> str:
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
