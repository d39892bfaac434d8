"""What `make` would do in a fresh clone; nothing is installed."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from importlib.metadata import PackageNotFoundError, requires
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parents[2]
SOURCES = ("Makefile", "pyproject.toml", "hatch_build.py", "requirements.lock", "deploy/requirements.lock")
RUNS, INSTALLED, BUILT = ".venv/.runs", ".venv/.installed", "build/compiled/.built"


@pytest.fixture
def clone(tmp_path: Path) -> Path:
    """What targets depend on, older than whatever is installed afterwards."""
    for file in SOURCES:
        (tmp_path / file).parent.mkdir(exist_ok=True)
        shutil.copyfile(ROOT / file, tmp_path / file)
        os.utime(tmp_path / file, (1, 1))
    for package in ("policies", "gateway", "backends", "simulation"):
        (tmp_path / package).mkdir()
    module = tmp_path / "gateway/__init__.py"
    module.write_text("")
    os.utime(module, (1, 1))
    return tmp_path


def would_do(clone: Path, target: str) -> str:
    environment = {name: value for name, value in os.environ.items() if not name.startswith("MAKE")}
    command = ["make", "--dry-run", target]
    return subprocess.run(command, cwd=clone, env=environment, capture_output=True, text=True, check=True).stdout


def stamped(clone: Path, *files: str) -> None:
    for number, file in enumerate(files, start=1):
        (clone / file).parent.mkdir(parents=True, exist_ok=True)
        (clone / file).touch()
        os.utime(clone / file, (1 + number, 1 + number))


def test_run_installs_what_it_runs_on_and_nothing_else(clone: Path) -> None:
    run, test = would_do(clone, "run"), would_do(clone, "test")
    assert "--require-hashes -r deploy/requirements.lock" in run
    assert "-r requirements.lock" not in run
    assert "--require-hashes -r requirements.lock" in test
    stamped(clone, RUNS)
    assert "pip install" not in would_do(clone, "run")
    assert all("--require-hashes" in line or "--no-deps" in line for line in test.splitlines() if "pip install" in line)


@pytest.mark.parametrize("fails", [False, True])
def test_what_pip_says_is_shown_only_if_it_fails(clone: Path, fails: bool) -> None:
    """A stand-in for Python makes an environment whose pip says ninety lines."""
    python = clone / "python"
    pip = f"#!/bin/sh\nseq 1 90 | sed 's/^/Collecting /'\nexit {int(fails)}"
    own = '#!/bin/sh\necho "${0%/*}"'
    python.write_text(
        f"""#!/bin/sh
[ "$1" = -c ] && exit
mkdir -p "$3/bin"
cat >"$3/bin/pip" <<'X'\n{pip}\nX
cat >"$3/bin/python" <<'X'\n{own}\nX
chmod +x "$3/bin/pip" "$3/bin/python"
"""
    )
    python.chmod(0o755)
    done = subprocess.run(["make", f"PYTHON={python}", RUNS], cwd=clone, capture_output=True, text=True)
    assert bool(done.returncode) == fails, done.stderr
    assert ("Collecting 90" in done.stderr) == fails
    assert len(done.stdout.splitlines()) < 5
    assert fails or not done.stderr


def test_run_takes_what_was_compiled_only_while_it_is_current(clone: Path) -> None:
    stamped(clone, RUNS, INSTALLED)
    assert "build/compiled" not in would_do(clone, "run")
    stamped(clone, RUNS, INSTALLED, BUILT)
    assert f"PYTHONPATH={clone}/build/compiled:{clone}" in would_do(clone, "run")
    (clone / "gateway/exchange.lua").touch()
    assert "build/compiled" not in would_do(clone, "run")


@pytest.mark.parametrize("lock", ["requirements.lock", "deploy/requirements.lock"])
def test_what_a_locked_package_requires_is_locked_too(lock: str) -> None:
    """pip refuses a whole file of hashes for one package that is missing from it."""
    names = {canonicalize_name(name) for name in re.findall(r"^([\w.-]+)==", (ROOT / lock).read_text(), re.MULTILINE)}
    missing = []
    for name in sorted(names):
        try:
            requirements = [Requirement(text) for text in requires(name) or ()]
        except PackageNotFoundError:  # of another platform
            continue
        needed = [each.name for each in requirements if not each.marker or each.marker.evaluate({"extra": ""})]
        missing += [f"{name} needs {each}" for each in needed if canonicalize_name(each) not in names]
    assert missing == []
