"""The modules of the repository, parsed."""

from __future__ import annotations

import ast
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parents[2]
PACKAGES = ("policies", "gateway", "backends", "simulation", "lab")
FILES = sorted(
    path for package in (*PACKAGES, "tests", "bench", "tenantbench") for path in (ROOT / package).rglob("*.py")
)
OURS = [path for path in FILES if path.relative_to(ROOT).parts[0] in PACKAGES]


def name_of(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


@cache
def tree_of(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"))


@cache
def nodes_of(path: Path) -> list[ast.AST]:
    return list(ast.walk(tree_of(path)))
