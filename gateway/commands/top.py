"""The live view `fairgate top` on a terminal, made from /state of the admin listener.

rich lays out the tables: it knows the terminal's width, wide characters, and whether there are colours.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
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
            *_groups(pool["groups"]),
            Text(),
            _engines(pool["backends"]),
            *_gateways(pool["gateways"]),
        ]
    return Group(*parts)


def _tenants(pool: Data, window_s: float, rows: int | None) -> Iterator[RenderableType]:
    found = pool["tenants"]
    if not found:
        yield _line(f"No request came in the last {window_s:g} s.")
        return
    table = _table("tenant", ">weight", ">received", ">due", ">queued", ">running", ">p50", ">p95", ">refused")
    shown = found if rows is None else found[:rows]
    for one in shown:
        is_short = one["queued_requests"] and one["share_received"] < SHORT_OF_DUE * one["share_due"]
        table.add_row(
            _line(one["tenant"] if one.get("group") is None else f"{one['group']}/{one['tenant']}"),
            "-" if one["weight"] is None else f"{one['weight']:g}",
            Text(f"{one['share_received']:.1%}", "red" if is_short else "green"),
            f"{one['share_due']:.1%}",
            str(one["queued_requests"]),
            str(one["running_requests"]),
            _duration(one["wait_p50_s"]),
            _duration(one["wait_p95_s"]),
            str(sum(one["refused_requests"].values())),
        )
    yield table
    if left_out := len(found) - len(shown) + pool["tenants_left_out"]:
        yield _line(f"and {left_out} more tenants")
    for ceiling in dict.fromkeys(one["ceiling"] for one in found if one["ceiling"]):
        yield _line(f"waiting: {ceiling}", "yellow")
    yield _line(f"received, wait (p50, p95), refused: last {window_s:g} s", "dim")
    yield _line("due: its part by weight and groups, and what others leave", "dim")


def _groups(groups: list[Data]) -> Iterator[RenderableType]:
    """Yield the table of groups, each below the group around it, with its limits."""
    if not groups:
        return
    table = _table("group", ">weight", ">received", ">due", ">queued", ">running", "limits")

    def add(around: str | None, depth: int) -> None:
        for one in groups:
            if one["in"] == around:
                limits = [words.format(one[term]) for term, words in GROUP_LIMITS.items() if one[term] is not None]
                parts = (f"{one[name]:.1%}" for name in ("share_received", "share_due"))
                counts = (str(one[name]) for name in ("queued_requests", "running_requests"))
                name = _line("  " * depth + one["group"])
                table.add_row(name, f"{one['weight']:g}", *parts, *counts, ", ".join(limits) or "-")
                add(one["group"], depth + 1)

    add(None, 0)
    yield Text()
    yield table


def _engines(backends: list[Data]) -> Table:
    table = _table("engine", ">sequences", ">KV", ">starting", "read by", "obstacle of the next request")
    for one in backends:
        waits_for = Text(one["obstacle"] or "none", "yellow" if one["obstacle"] else "")
        if not one["in_service"]:
            waits_for = Text.assemble(("out of service", "red"), f": {_plain(one['reason'])}")
        table.add_row(
            _line(one["backend"]),
            f"{one['running_sequences']} of {one['slots']}",
            f"{one['kv_ratio']:.0%}",
            str(one["starting_requests"]),
            _plain(one["read_by"]),
            waits_for,
        )
    return table


def _gateways(gateways: list[Data]) -> Iterator[RenderableType]:
    """Yield the table of processes: who waits at which."""
    if not gateways:
        return
    table = _table("gateway", ">waiting", ">running", "most of them of")
    for one in gateways:
        most = ", ".join(f"{_plain(tenant)} ({count})" for tenant, count in one["queued_most"].items())
        table.add_row(_line(one["gateway"]), str(one["queued_requests"]), str(one["dispatched_requests"]), most or "-")
    yield Text()
    yield table


def _table(*columns: str) -> Table:
    """Return an empty table. `>` marks a column of numbers: right-aligned and never wrapped, so others shrink first."""
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
