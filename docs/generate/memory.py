"""What does memory_max mean in numbers? The page docs/reference/memory.md, from the table of all bounds."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

from gateway.config.machine import MEMORY_OF_MACHINE
from gateway.config.memory_bounds import (
    BASE_BYTES,
    BLOCK_BYTES,
    CONNECTION_BYTES,
    MEMORY_MAX,
    MEMORY_MAX_LEAST,
    PARTS,
    TABLES,
    MemoryBounds,
)

TEMPLATE = Path(__file__).with_name("memory.template.txt")
SIZES = (256 << 20, MEMORY_MAX, MEMORY_OF_MACHINE)
ROWS: tuple[tuple[str, str, Callable[[MemoryBounds], str]], ...] = (
    ("names", "names", lambda bounds: f"{bounds.names:,}"),
    ("blocks of prompts that engines have cached", "prompts", lambda bounds: f"{bounds.blocks:,}"),
    ("bodies", "bodies", lambda bounds: _mib(bounds.bodies_bytes + bounds.reading_bytes)),
    ("of these, all that arrive, wait, or have no answer yet", "", lambda bounds: _mib(bounds.bodies_bytes)),
    ("of these, those of one tenant or address", "", lambda bounds: _mib(bounds.client_bodies_bytes)),
    ("of these, those that wait in a pool", "", lambda bounds: _mib(bounds.queue_bytes)),
    ("to read one", "", lambda bounds: _mib(bounds.reading_bytes)),
    ("the largest one, unless configured", "", lambda bounds: _mib(bounds.body_bytes)),
    ("the largest one of JSON, unless configured", "", lambda bounds: _mib(bounds.json_bytes)),
    ("lines of batches under way", "lines", lambda bounds: _mib(bounds.lines_bytes)),
    ("of these, the largest one", "", lambda bounds: f"{bounds.line_bytes / (1 << 20):.1f} MiB"),
    ("their answers not yet written", "results", lambda bounds: _mib(bounds.results_bytes)),
    ("connections of clients", "connections", lambda bounds: f"{bounds.connections:,}"),
    ("answers", "answers", lambda bounds: _mib(2 * bounds.answers_bytes)),
    ("of these, unread by clients", "", lambda bounds: _mib(bounds.answers_bytes)),
    ("of these, kept until complete", "", lambda bounds: _mib(bounds.answers_bytes)),
)


def lines(table: Callable[[list[str], list[list[str]]], Iterator[str]]) -> Iterator[str]:
    """The page. `table`: writes one."""
    bounds = [MemoryBounds(size, 1) for size in SIZES]
    heads = ["of a process with one pool", "part", *[f"`memory_max` {_mib(size)}" for size in SIZES]]
    parts = [
        [what, f"{PARTS[share]:.0%}" if share else "", *[say(each) for each in bounds]] for what, share, say in ROWS
    ]
    by_part: dict[int, list[str]] = {}
    for one in TABLES.values():
        by_part.setdefault(one.part, []).append(one.what.replace(";", ",") + (" (*)" if one.of_pool else ""))
    text = TEMPLATE.read_text(encoding="utf-8").format(
        usual=MEMORY_MAX >> 20,
        machine=MEMORY_OF_MACHINE >> 20,
        least=MEMORY_MAX_LEAST >> 20,
        base=BASE_BYTES >> 20,
        block=BLOCK_BYTES,
        connection=f"{CONNECTION_BYTES:,}",
        parts="\n".join(table(heads, parts)),
        tables="\n".join(
            f"- per {f'{part} names' if part > 1 else 'name'}: {'; '.join(by_part[part])}." for part in sorted(by_part)
        ),
    )
    yield from text.rstrip("\n").split("\n")


def _mib(size: int) -> str:
    return f"{size / (1 << 20):.0f} MiB"
