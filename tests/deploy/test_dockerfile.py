"""What runs the Dockerfile in `make test-deploy` understands all of it, and gives it what an engine would."""

from __future__ import annotations

from pathlib import Path

from tests.deploy.dockerfile import UNDERSTOOD, context_files, instructions

ROOT = Path(__file__).parents[2]


def test_every_instruction_is_understood() -> None:
    found = list(instructions((ROOT / "deploy/Dockerfile").read_text()))
    assert {each.name for each in found} <= UNDERSTOOD
    assert [each.name for each in found].count("FROM") == 2
    assert not any(each.text.endswith("\\") for each in found)


def test_the_context_is_what_is_not_ignored(tmp_path: Path) -> None:
    (tmp_path / ".dockerignore").write_text("*\n!kept\n!deploy/one\n**/__pycache__\n")
    for name in ("kept/a", "kept/b/c", "kept/b/__pycache__/d", "deploy/one", "deploy/two", "other", ".git/config"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("")
    assert context_files(tmp_path) == ["deploy/one", "kept/a", "kept/b/c"]
    shipped = context_files(ROOT)
    assert {"pyproject.toml", "deploy/requirements.lock", "gateway/process/gateway.py"} <= set(shipped)
    assert not any(name.startswith(("tests/", ".venv/")) for name in shipped)
