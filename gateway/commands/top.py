"""The live view `fairgate top` on a terminal, made from /state of the admin listener.

rich lays out the tables: it knows the terminal's width, wide characters, and whether there are colours.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, Final

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text

from gateway.commands.admin import Admin, NotAnswered

TENANTS_SHOWN: Final = 30
"""Limit on a live view's rows of tenants, on a terminal that is high enough."""
SHORT_OF_DUE: Final = 0.8
"""Part of its due below which a waiting tenant's received share is red."""

GROUP_LIMITS: Final = {
    "guaranteed_share": "at least {:.0%}", "max_share": "at most {:.0%}", "max_running": "at most {} running",
    "lending_limit": "lends {:.0%}", "borrowing_limit": "borrows {:.0%}",
}  # fmt: skip

TENANT_COLUMNS: Final = (
    "tenant", ">weight", ">received", ">due", ">queued", ">running", ">p50", ">p95", ">refused",
)  # fmt: skip
GROUP_COLUMNS: Final = ("group", ">weight", ">received", ">due", ">queued", ">running", "limits")
GATEWAY_COLUMNS: Final = ("gateway", ">waiting", ">running", "most of them of")
ENGINE_COLUMNS: Final = ("engine", ">sequences", ">KV", ">starting", "read by", "obstacle of the next request")
Data = dict[str, Any]


def watch(admin: Admin, *, interval_s: float, once: bool) -> None:
    """Show the view until interrupted, or once. Raise NotAnswered if the first request fails."""
    console = Console(highlight=False)
    first = admin.get("/state")
    if once or not console.is_terminal:
        console.print(view(admin.url, first, rows=None))
        return
    with Live(console=console, screen=True, auto_refresh=False) as live:
        shown = view(admin.url, first, rows=_rows(console))
        try:
            while True:
                live.update(shown, refresh=True)
                time.sleep(interval_s)
                try:
                    shown = view(admin.url, admin.get("/state"), rows=_rows(console))
                except NotAnswered as error:
                    shown = Group(shown, _line(f"not answered, asked again: {error}", "red"))
        except KeyboardInterrupt:
            return


def _rows(console: Console) -> int:
    """Return the number of tenants that fit beside the rest."""
    return max(3, min(TENANTS_SHOWN, console.height - 14))


def view(url: str, state: Data, *, rows: int | None) -> RenderableType:
    """Return the view of every pool: its limit, tenants and engines. `rows`: limit on tenants; None for all."""
    parts: list[RenderableType] = [_line(f"fairgate {url}", "bold")]
    for pool in state["pools"]:
        counts = f"{pool['queued_requests']} waiting, {pool['dispatched_requests']} running"
        parts += [
            Text(),
            _line(f"pool {pool['pool']}, policy {pool['policy']}: {counts}", "bold"),
            _line(pool["limited_by_is"], "yellow" if pool["limited_by"] else ""),
            Text(),
            *_tenants(pool, state["window_s"], rows),
        ]
        for columns, found in (
            (GROUP_COLUMNS, [*_groups(pool["groups"])]),
            (ENGINE_COLUMNS, [_engine(one) for one in pool["backends"]]),
            (GATEWAY_COLUMNS, [_gateway(one) for one in pool["gateways"]]),
        ):
            if found:
                parts += [Text(), _table(columns, found)]
    return Group(*parts)


def _tenants(pool: Data, window_s: float, rows: int | None) -> Iterator[RenderableType]:
    found = pool["tenants"]
    if not found:
        yield _line(f"No request came in the last {window_s:g} s.")
        return
    yield _table(TENANT_COLUMNS, [
        (
            one["tenant"] if one.get("group") is None else f"{one['group']}/{one['tenant']}",
            "-" if one["weight"] is None else f"{one['weight']:g}",
            Text(f"{one['share_received']:.1%}", "red" if _is_short(one) else "green"),
            f"{one['share_due']:.1%}",
            one["queued_requests"],
            one["running_requests"],
            _duration(one["wait_p50_s"]),
            _duration(one["wait_p95_s"]),
            sum(one["refused_requests"].values()),
        )
        for one in found[:rows]
    ])  # fmt: skip
    if left_out := len(found[rows:] if rows is not None else ()) + pool["tenants_left_out"]:
        yield _line(f"and {left_out} more tenants")
    for ceiling in dict.fromkeys(one["ceiling"] for one in found if one["ceiling"]):
        yield _line(f"waiting: {ceiling}", "yellow")
    yield _line(f"received, wait (p50, p95), refused: last {window_s:g} s", "dim")
    yield _line("due: its part by weight and groups, and what others leave", "dim")


def _is_short(one: Data) -> bool:
    """Return whether a waiting tenant has received far less than its due."""
    return bool(one["queued_requests"] and one["share_received"] < SHORT_OF_DUE * one["share_due"])


def _groups(groups: list[Data], around: str | None = None, depth: int = 0) -> Iterator[tuple[Any, ...]]:
    """Yield a row for each group, below the group around it, with its limits."""
    for one in groups:
        if one["in"] == around:
            limits = [words.format(one[term]) for term, words in GROUP_LIMITS.items() if one[term] is not None]
            shares = (f"{one[name]:.1%}" for name in ("share_received", "share_due"))
            name, weight = "  " * depth + one["group"], f"{one['weight']:g}"
            yield name, weight, *shares, one["queued_requests"], one["running_requests"], ", ".join(limits) or "-"
            yield from _groups(groups, one["group"], depth + 1)


def _engine(one: Data) -> tuple[Any, ...]:
    waits_for = Text(one["obstacle"] or "none", "yellow" if one["obstacle"] else "")
    if not one["in_service"]:
        waits_for = Text.assemble(("out of service", "red"), f": {_plain(one['reason'])}")
    sequences = f"{one['running_sequences']} of {one['slots']}"
    return one["backend"], sequences, f"{one['kv_ratio']:.0%}", one["starting_requests"], one["read_by"], waits_for


def _gateway(one: Data) -> tuple[Any, ...]:
    most = ", ".join(f"{tenant} ({count})" for tenant, count in one["queued_most"].items())
    return one["gateway"], one["queued_requests"], one["dispatched_requests"], most or "-"


def _table(columns: Sequence[str], rows: Iterable[Sequence[Any]]) -> Table:
    """Return a table. `>` marks a column of numbers: right-aligned and never wrapped, so others shrink first."""
    table = Table(box=None, padding=(0, 1, 0, 0), header_style="dim", pad_edge=False)
    for column in columns:
        is_number = column.startswith(">")
        table.add_column(
            column.removeprefix(">"),
            justify="right" if is_number else "left",
            no_wrap=is_number,
            overflow="ellipsis",
            min_width=None if is_number else 8,
        )
    for row in rows:
        table.add_row(*(cell if isinstance(cell, Text) else _line(str(cell)) for cell in row))
    return table


def _line(text: str, style: str = "") -> Text:
    return Text(_plain(text), style)


def _plain(text: str) -> str:
    """Replace characters that a terminal would take for a command."""
    return "".join(character if character.isprintable() else "?" for character in text)


def _duration(seconds: float | None) -> str:
    if seconds is None:
        return "-"
    return f"{seconds:.1f} s" if seconds >= 1 else f"{1000 * seconds:.0f} ms"
