"""The log's rotation, by the real logrotate: what is written afterwards is in the new file, and nothing is lost."""

from __future__ import annotations

import asyncio
import os
import pwd
import shutil
import stat
import subprocess
from pathlib import Path

import pytest

from gateway.telemetry.log_writer import LogWriter
from tests.waiting import WAIT_S, until

ROTATION = Path(__file__).parents[2] / "deploy/logrotate/fairgate"


async def test_the_gateway_goes_on_in_the_new_file(tmp_path: Path) -> None:
    program = shutil.which("logrotate", path=f"{os.environ['PATH']}:/usr/sbin")
    if program is None:
        pytest.skip("logrotate is not installed")
    (tmp_path / "log").mkdir(mode=0o750)
    log, rules = tmp_path / "log/access.log", tmp_path / "rules"
    owner = pwd.getpwuid(os.getuid()).pw_name
    text = ROTATION.read_text().replace("/var/log/fairgate", str(log.parent))
    rules.write_text(text.replace("fairgate fairgate", f"{owner} {os.getgid()}"))
    rules.chmod(0o644)
    writer = LogWriter("access log", str(log))
    writer.write(b"before\n", 1)
    await until(lambda: log.read_bytes() == b"before\n")
    command = [program, "--force", "--state", str(tmp_path / "state"), str(rules)]
    done = await asyncio.to_thread(subprocess.run, command, capture_output=True, text=True, timeout=WAIT_S)
    assert (done.returncode, done.stderr) == (0, "")
    writer.write(b"after\n", 1)
    await until(lambda: log.read_bytes() == b"after\n")
    writer.close()
    assert (log.parent / "access.log.1").read_bytes() == b"before\n"
    assert stat.S_IMODE(log.stat().st_mode) == 0o600
