"""The unit is one that systemd takes, shuts in what it starts, and names commands and times that fit the gateway."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import pytest
from click.testing import CliRunner

from gateway.commands.main import main
from tests.waiting import WAIT_S

ROOT = Path(__file__).parents[2]
UNIT = ROOT / "deploy/systemd/fairgate.service"
USERS = ROOT / "deploy/systemd/fairgate.sysusers"
EXPOSURE_MAX = 15
"""In tenths: of 0, nothing, to 10, everything. systemd calls less than 2 ok."""
DRAIN_S = 30


def systemd(program: str, *arguments: str | Path) -> subprocess.CompletedProcess[str]:
    if shutil.which(program) is None:
        pytest.skip(f"{program} is not installed")
    return subprocess.run([program, *arguments], capture_output=True, text=True, timeout=WAIT_S)


def verified(folder: Path, text: str) -> str:
    """What systemd finds wrong with a unit whose program is installed."""
    program = folder / "fairgate"
    program.write_text("#!/bin/sh\n")
    program.chmod(0o755)
    unit = folder / "fairgate.service"
    unit.write_text(text.replace("/opt/fairgate/bin/fairgate", str(program)))
    done = systemd("systemd-analyze", "verify", "--man=no", unit)
    return done.stdout + done.stderr


def test_systemd_takes_the_unit(tmp_path: Path) -> None:
    assert verified(tmp_path, UNIT.read_text()) == ""


def test_what_it_starts_is_shut_in() -> None:
    done = systemd("systemd-analyze", "security", "--offline=true", f"--threshold={EXPOSURE_MAX}", UNIT)
    assert done.returncode == 0, done.stdout


def test_its_commands_are_those_of_the_gateway() -> None:
    said = settings()
    for name in ("ExecStartPre", "ExecStart", "ExecReload"):
        [line] = said[name]
        program, command, *_ = line.split()
        assert program == "/opt/fairgate/bin/fairgate"
        assert CliRunner().invoke(main, [command, "--help"]).exit_code == 0
        assert line.endswith(" /etc/fairgate/config.yaml")


def test_it_has_longer_to_end_than_requests_have() -> None:
    [stop_s] = settings()["TimeoutStopSec"]
    assert int(stop_s) > DRAIN_S + 10  # after which a supervisor ends its workers


def test_its_user_is_made() -> None:
    done = systemd("systemd-sysusers", "--dry-run", USERS)
    assert done.returncode == 0, done.stderr
    [name] = settings()["User"]
    assert re.search(rf"^u {name} ", USERS.read_text(), re.MULTILINE)


def settings() -> dict[str, list[str]]:
    found: dict[str, list[str]] = {}
    for name, value in re.findall(r"^(\w+)=(.*)$", UNIT.read_text(), re.MULTILINE):
        found.setdefault(name, []).append(value)
    return found
