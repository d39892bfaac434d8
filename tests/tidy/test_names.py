"""A name stands for one thing, and a docstring names its nouns, so that a sentence is understood when first read."""

from __future__ import annotations

import ast
import re
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.tidy.test_tidy import OURS, name_of, nodes_of

RIDDLES = re.compile(r"\b(whoever|of which|those that|told|heard)\b", re.IGNORECASE)
"""Words that stand where a sentence should name who or what it is about."""


def classes() -> Iterator[tuple[str, str]]:
    for path in OURS:
        for node in nodes_of(path):
            if isinstance(node, ast.ClassDef):
                yield node.name, name_of(path)


def docstrings(path: Path) -> Iterator[tuple[int, str]]:
    """Of the module, its classes and functions, and the strings below attributes and constants, with their lines."""
    for node in nodes_of(path):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            yield node.lineno, " ".join(node.value.value.split())


def test_no_two_classes_have_one_name() -> None:
    defined = defaultdict(list)
    for name, where in classes():
        defined[name].append(where)
    assert {name: where for name, where in defined.items() if len(where) > 1} == {}


def test_no_docstring_is_a_riddle() -> None:
    found = [
        f"{name_of(path)}:{line} {match[0]!r}: name what it stands for"
        for path in OURS
        for line, text in docstrings(path)
        for match in RIDDLES.finditer(text)
    ]
    assert found == []


def test_no_two_modules_have_one_name() -> None:
    defined = defaultdict(list)
    for path in OURS:
        if path.stem != "__init__":
            defined[path.stem].append(name_of(path))
    assert {name: where for name, where in defined.items() if len(where) > 1} == {}


@pytest.mark.parametrize("text", ["Whoever asks.", "Turns of which few are kept.", "Those that wait.", "It is told."])
def test_a_riddle_is_found(text: str) -> None:
    assert RIDDLES.search(text)
    assert not RIDDLES.search("The requests that wait, and the threshold.")
