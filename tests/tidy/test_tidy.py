"""Doors are closed: nobody reaches for what is private to another module."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

from gateway.proxy.refusals import MESSAGES
from policies.request import RejectReason
from tests.tidy.sources import FILES, name_of, nodes_of


def functions_of(path: Path) -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef]:
    for node in nodes_of(path):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield node


def test_nobody_reaches_for_what_is_private_to_another_module() -> None:
    reached = []
    for path in FILES:
        own = {node.attr for node in nodes_of(path) if is_of_self(node)} | names_in(path)
        for node in nodes_of(path):
            if not isinstance(node, ast.Attribute) or is_of_self(node) or not is_private(node.attr):
                continue
            if node.attr in LIBRARIES:
                continue
            if node.attr not in own and f"{name_of(path)}:{node.attr}" not in NO_PUBLIC_WAY:
                reached.append(f"{name_of(path)}:{node.lineno} {ast.unparse(node)}")
    assert reached == []


LIBRARIES = {"_exit", "_set_running_loop", "_callback", "_args", "_request_id"}
"""Of the standard library and of the official client: there is no other way."""
NO_PUBLIC_WAY = {
    "tests/backends/test_upstream_pool.py:_Connection",
    "tests/backends/test_upstream_pool.py:_connection",
    "tests/backends/test_upstream_pool.py:_transport",
    "tests/backends/test_upstream_framing.py:_transport",
    *(f"tests/fuzz/answers.py:{name}" for name in ("_outbox", "_transport")),
    "tests/gateway/test_telemetry.py:_access_log",
    *(f"tests/gateway/test_browsers.py:{name}" for name in ("_server", "_reader")),
    "tests/gateway/test_stored_responses.py:_everybody",
    "tests/http/test_answers.py:_pending",
    *(f"tests/simulated/test_engine_model.py:{name}" for name in ("_pool", "_running", "_held", "_blank", "_cached")),
    *(f"tests/gateway/test_held_bytes.py:{name}" for name in ("_blocks_max", "_decided", "_ends", "_flows_max")),
    *(f"tests/gateway/test_held_bytes.py:{name}" for name in ("_members_max", "_populations")),
    *(f"tests/http/test_limits.py:{name}" for name in ("_transport",)),
    *(f"tests/memory/tables.py:{name}" for name in ("_prefixes", "_users")),
    *(f"tests/memory/test_forgetting.py:{name}" for name in ("_deadlines", "_resting")),
    *(f"tests/memory/test_forgetting.py:{name}" for name in ("_returns",)),
    "tests/gateway/test_disconnects.py:_transport",
    "tests/gateway/live.py:_server",
    "tests/gateway/test_interactions.py:_lengths",
    "tests/gateway/test_store.py:_not_open",
}
"""Buffers of sockets, and faults that no outside event can bring about: nothing public shows them."""


def is_private(name: str) -> bool:
    return name.startswith("_") and not name.startswith("__") and name not in NAMED_TUPLE


NAMED_TUPLE = {"_replace", "_fields", "_asdict", "_make", "_field_defaults"}


def is_of_self(node: ast.AST) -> bool:
    return (
        isinstance(node, ast.Attribute)
        and isinstance(node.value, ast.Name)
        and node.value.id in ("self", "cls", "super")
    )


def names_in(path: Path) -> set[str]:
    """What the module itself defines: functions, names, and slots."""
    names = {one.name for one in functions_of(path)}
    names |= {node.id for node in nodes_of(path) if isinstance(node, ast.Name)}
    return names | set(re.findall(r'"(_[a-z][a-z_]*)"', path.read_text(encoding="utf-8")))


def test_every_refusal_has_a_message_for_its_client() -> None:
    assert set(MESSAGES) == set(RejectReason)


def test_no_test_imports_another() -> None:
    """What several tests need stands in `tests/kit`, or in a module beside them that is no test."""
    imports = re.compile(r"^ *from (tests\.\S*\.?test_\w+) import", re.MULTILINE)
    tests = [path for path in FILES if name_of(path).startswith("tests/")]
    importing = [f"{name_of(path)}: {name}" for path in tests for name in imports.findall(path.read_text("utf-8"))]
    assert importing == []
