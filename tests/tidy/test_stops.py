"""The way of a request that ARCHITECTURE.md describes is the way that the code has."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
ARCHITECTURE = (ROOT / "ARCHITECTURE.md").read_text(encoding="utf-8")


def section(title: str) -> str:
    return ARCHITECTURE.partition(f"\n## {title}\n")[2].partition("\n## ")[0]


def stops() -> list[tuple[str, str]]:
    """File and function of each stop, in order."""
    return re.findall(r"^\| +\d+ \| `([\w/.]+\.py)` \| `([\w.]+)` \|", section("Follow one request"), re.MULTILINE)


def functions(file: str) -> set[str]:
    """NAME or CLASS.NAME of every function of a module."""
    tree = ast.parse((ROOT / file).read_text(encoding="utf-8"))
    kinds = (ast.FunctionDef, ast.AsyncFunctionDef)
    found = {one.name for one in tree.body if isinstance(one, kinds)}
    for node in tree.body:
        if isinstance(node, ast.ClassDef):
            found |= {f"{node.name}.{one.name}" for one in node.body if isinstance(one, kinds)}
    return found


@pytest.mark.parametrize(("file", "function"), stops())
def test_each_stop_is_there(file: str, function: str) -> None:
    assert (ROOT / file).exists()
    assert function in functions(file)
