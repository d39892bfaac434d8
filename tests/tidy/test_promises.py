"""Everything that is written, called or read from outside has a stability, and a version is said in one place."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest

from gateway import BUILD, __version__
from gateway.commands.main import main
from gateway.config.model import Config
from gateway.telemetry.log_line import LogLine
from gateway.telemetry.metric_families import FAMILIES
from tests.conftest import COMPILED

ROOT = Path(__file__).parents[2]
SOURCES = "\n".join(path.read_text(encoding="utf-8") for path in sorted((ROOT / "gateway").rglob("*.py")))
HEADER = re.compile(r'"(x-fairgate-[a-z-]*[a-z])"')


def listed(title: str) -> set[str]:
    """What the tables of this part of docs/stability.md name."""
    text = (ROOT / "docs/stability.md").read_text(encoding="utf-8")
    part = text.partition(f"\n## {title}\n")[2].partition("\n## ")[0]
    rows = [row for row in part.splitlines() if row.startswith(("| stable", "| growing", "| open"))]
    names = [name for row in rows for name in re.findall("`([^`]+)`", row)]
    assert len(names) == len(set(names)), "named twice"
    return set(names)


@pytest.mark.parametrize(
    ("title", "there"),
    [
        ("Config", set(Config.model_fields)),
        ("Command line", set(main.commands)),
        ("Metrics", set(FAMILIES)),
        ("Log fields", set(LogLine.__struct_fields__)),
    ],
)
def test_each_name_has_a_stability(title: str, there: set[str]) -> None:
    assert there
    assert listed(title) == there, "docs/stability.md should name each"


def test_each_header_of_ours_has_a_stability() -> None:
    ours = set(HEADER.findall(SOURCES))
    assert ours
    assert ours <= listed("Headers")


def test_the_build_is_what_runs() -> None:
    assert (BUILD == "compiled") == COMPILED


def test_the_version_has_an_entry_in_the_change_log() -> None:
    entries = re.findall(r"^## \[(.+)\] - (?:unreleased|\d{4}-\d\d-\d\d)$", (ROOT / "CHANGELOG.md").read_text(), re.M)
    assert entries[0] == __version__
    assert re.fullmatch(r"\d+\.\d+\.\d+(?:(?:a|b|rc)\d+)?", __version__)


@pytest.mark.parametrize(("tag", "status"), [(f"v{__version__}", 0), ("v99.0.0", 1)])
def test_a_release_is_named_as_its_version(tag: str, status: int, tmp_path: Path) -> None:
    for file in (".ci/release-check", "gateway/__init__.py", "CHANGELOG.md"):
        (tmp_path / file).parent.mkdir(exist_ok=True)
        dated = re.sub("- unreleased$", "- 2026-11-30", (ROOT / file).read_text(), flags=re.M)
        (tmp_path / file).write_text(dated)
    done = subprocess.run(["bash", tmp_path / ".ci/release-check", "names", tag], capture_output=True, text=True)
    assert done.returncode == status, done.stdout
    assert ("MISSING" in done.stdout) == bool(status)
    notes = subprocess.run(["bash", tmp_path / ".ci/release-check", "notes", tag], capture_output=True, text=True)
    assert ("### Added" in notes.stdout) == (status == 0)
