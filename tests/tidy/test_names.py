"""A name stands for one thing: no two classes and no two modules share one."""

from __future__ import annotations

import ast
from collections import defaultdict
from collections.abc import Iterator

from tests.tidy.sources import OURS, name_of, nodes_of


def classes() -> Iterator[tuple[str, str]]:
    for path in OURS:
        for node in nodes_of(path):
            if isinstance(node, ast.ClassDef):
                yield node.name, name_of(path)


def test_no_two_classes_have_one_name() -> None:
    defined = defaultdict(list)
    for name, where in classes():
        defined[name].append(where)
    assert {name: where for name, where in defined.items() if len(where) > 1} == {}


def test_no_two_modules_have_one_name() -> None:
    defined = defaultdict(list)
    for path in OURS:
        if path.stem != "__init__":
            defined[path.stem].append(name_of(path))
    assert {name: where for name, where in defined.items() if len(where) > 1} == {}
