"""Wheels of this tree, installed as a user does, into environments that held nothing."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

ROOT = Path(__file__).parents[2]
PACKAGES = ("gateway", "policies", "backends", "simulation")
PARTS = (*PACKAGES, "pyproject.toml", "hatch_build.py", "README.md", "CHANGELOG.md", "LICENSE", "config.example.yaml")
INSTALL_S_MAX = 1500.0
TOOLS = ("pip", "pipx", "uv")
COMPILE = {"HATCH_BUILD_HOOKS_ENABLE": "1"}


def beside_python(name: str) -> str:
    """A command of the environment in which the tests run."""
    return str(Path(sys.executable).with_name(name))


def environment(**more: str) -> dict[str, str]:
    """Nothing of this tree is found by accident."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "VIRTUAL_ENV"))}
    return kept | more


def built(directory: Path, *, target: str = "wheel") -> Path:
    """A distribution of this tree, as whoever asks for nothing gets it."""
    source = directory / "source"
    for part in PARTS:
        kept = shutil.ignore_patterns("__pycache__")
        if (ROOT / part).is_dir():
            shutil.copytree(ROOT / part, source / part, ignore=kept)
        else:
            shutil.copy(ROOT / part, source / part)
    subprocess.run(
        [beside_python("hatchling"), "build", "-t", target, "-d", directory],
        cwd=source,
        env=environment(),
        check=True,
        capture_output=True,
    )
    [found] = [path for path in directory.iterdir() if path.is_file()]
    return found


def installed(tool: str, wheel: Path, directory: Path, **asked: str) -> Path:
    """The command `fairgate` of a new environment that has this wheel and what it asks for."""
    base = Path(sys.base_prefix, "bin", f"python{sysconfig.get_python_version()}")
    commands = directory / "bin"
    steps: dict[str, tuple[list[str], dict[str, str]]] = {
        "pip": (["pip", "install"], {}),
        "pipx": (
            ["pipx", "install", "--python", str(base)],
            {
                "PIPX_HOME": str(directory / "pipx"),
                "PIPX_BIN_DIR": str(commands),
                "PIPX_MAN_DIR": str(directory / "man"),
            },
        ),
        "uv": (
            ["uv", "tool", "install", "--python", str(base)],
            {"UV_TOOL_DIR": str(directory / "uv"), "UV_TOOL_BIN_DIR": str(commands)},
        ),
    }
    command, more = steps[tool]
    if tool == "pip":
        subprocess.run([base, "-m", "venv", directory], env=environment(), check=True, timeout=INSTALL_S_MAX)
        command[0] = str(commands / "pip")
    else:
        command[0] = beside_python(tool)
    subprocess.run(
        [*command, wheel],
        env=environment(**more, **asked),
        check=True,
        capture_output=True,
        timeout=INSTALL_S_MAX,
        cwd=directory.parent,
    )
    return commands / "fairgate"


def away(where: Path) -> tuple[str, ...]:
    """What starts a command in this directory, with nothing of this tree."""
    return ("env", *(f"--unset={name}" for name in os.environ.keys() - environment().keys()), "-C", str(where))


def misleading(directory: Path) -> Path:
    """A working directory in which every package of ours is found first by whoever looks there."""
    for name in PACKAGES:
        (directory / name).mkdir(parents=True)
        (directory / name / "__init__.py").write_text("raise SystemExit('the wrong package')\n")
    return directory
