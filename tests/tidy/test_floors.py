"""The floor plan of `gateway/` stays one that fits in the head: few rooms, few floors, and few arrows between them."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

from tests.tidy.test_tidy import ROOT, nodes_of

GATEWAY = ROOT / "gateway"
ROOMS_MAX, FLOORS_MAX, ARROWS_MAX = 13, 8, 55


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


def test_the_gateway_has_few_rooms_and_few_arrows_between_them() -> None:
    rooms = {room_of(path) for path in GATEWAY.rglob("*.py")} - {"__init__"}
    assert len(rooms) <= ROOMS_MAX, sorted(rooms)
    assert len(set(arrows())) <= ARROWS_MAX, sorted(set(arrows()))


def test_the_gateway_has_few_floors() -> None:
    left, floors = {room_of(path) for path in GATEWAY.rglob("*.py")}, 0
    while left:
        held = {above for above, below in arrows() if below in left}
        assert left - held, f"a circle among {sorted(left)}"
        left &= held
        floors += 1
    assert floors <= FLOORS_MAX
