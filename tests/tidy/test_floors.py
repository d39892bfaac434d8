"""The rooms of `gateway/` stand on floors: no two import each other, not even by way of others."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

from tests.tidy.sources import ROOT, nodes_of

GATEWAY = ROOT / "gateway"


def room_of(path: Path) -> str:
    return path.relative_to(GATEWAY).parts[0].removesuffix(".py")


def arrows() -> Iterator[tuple[str, str]]:
    """One room that imports from another, whatever and wherever in a module."""
    for path in GATEWAY.rglob("*.py"):
        for node in nodes_of(path):
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("gateway."):
                other = (node.module or "").split(".")[1]
                if other != room_of(path):
                    yield room_of(path), other


def test_no_rooms_form_a_circle() -> None:
    left = {room_of(path) for path in GATEWAY.rglob("*.py")}
    while left:
        held = {above for above, below in arrows() if below in left}
        assert left - held, f"a circle among {sorted(left)}"
        left &= held
