"""The unit, run by a real systemd with all of its walls: it serves, reloads or says why not, and drains."""

from __future__ import annotations

import asyncio
import json
import re
from pathlib import Path

import pytest

from tests.deploy.clients import MODEL, body, said_whole
from tests.deploy.conftest import ROOT, Images
from tests.deploy.container import run
from tests.deploy.machine import PACKAGES, Machine, installed
from tests.deploy.stand_ins import StandIns
from tests.waiting import WAIT_S

pytestmark = pytest.mark.deploy

CONFIG = """
admin_token: ${TOKEN}
usage: /var/lib/fairgate/usage.db
access_log: /var/log/fairgate/access.log
pools: [{name: a, backends: [{url: "sim:a"}]}]
tenants: [{name: alice}]
"""


async def test_the_unit_serves_reloads_and_drains(images: Images, stand_ins: StandIns, tmp_path: Path) -> None:
    root, config, environment = tmp_path / "root", tmp_path / "config.yaml", tmp_path / "environment"
    await run(["cp", "-a", str(await stand_ins.debian(PACKAGES)), str(root)], 120)
    await run(["cp", "-a", str((await images("fairgate:local")).root / "opt/fairgate"), str(root / "opt")], 120)
    config.write_text(CONFIG)
    environment.write_text("TOKEN=of-some-length\n")
    files = [
        (ROOT / "deploy/systemd/fairgate.service", "etc/systemd/system/fairgate.service", 0o644),
        (ROOT / "deploy/systemd/fairgate.sysusers", "usr/lib/sysusers.d/fairgate.conf", 0o644),
        (config, "etc/fairgate/config.yaml", 0o644),
        (environment, "etc/fairgate/environment", 0o600),
    ]
    await installed(root, files)
    async with Machine(root) as machine:
        status, said = await machine.execute("systemctl", "start", "fairgate")
        assert status == 0, said + (await machine.execute("journalctl", "--no-pager", "-u", "fairgate"))[1]
        async with asyncio.timeout(WAIT_S):
            while (await machine.execute("fairgate", "healthcheck"))[0]:  # noqa: ASYNC110
                await asyncio.sleep(0.1)
        before = await machine.status_of("fairgate")
        assert before["Uid"].split()[0] != "0"
        assert {before[f"Cap{kind}"] for kind in ("Inh", "Prm", "Eff", "Bnd", "Amb")} == {"0" * 16}
        assert (before["NoNewPrivs"], before["Seccomp"]) == ("1", "2")

        await installed(root, [_written(config, CONFIG + "drain_s: 20\n")])
        status, said = await machine.execute("systemctl", "reload", "fairgate")
        assert status == 0, said
        await installed(root, [_written(config, CONFIG + "drain: 20\n")])
        assert (await machine.execute("systemctl", "reload", "fairgate"))[0] != 0
        journal = (await machine.execute("journalctl", "--no-pager", "-o", "cat", "-u", "fairgate"))[1]
        assert "drain_s: 30 -> 20" in journal
        assert "drain: unknown field" in journal

        [key] = re.findall(r"^ +alice +(fg-\S+)$", journal, re.MULTILINE)
        ask = ["curl", "-sN", "http://127.0.0.1:8080/v1/chat/completions", "-H", f"Authorization: Bearer {key}"]
        ask += ["-H", "Content-Type: application/json", "-d", json.dumps(body(200, stream=True))]
        asking = await asyncio.create_subprocess_exec(*machine.command(*ask), stdout=asyncio.subprocess.PIPE)
        assert asking.stdout is not None
        begun = await asking.stdout.readline()
        assert MODEL.encode() in begun
        assert (await machine.execute("systemctl", "stop", "fairgate"))[0] == 0
        rest, _ = await asking.communicate()
        assert said_whole(begun + rest, stream=True)
        assert (await machine.execute("systemctl", "show", "-P", "Result", "fairgate"))[1].strip() == "success"
        assert (root / "var/lib/fairgate/usage.db").exists()
        assert '"completed"' in (root / "var/log/fairgate/access.log").read_text()


def _written(config: Path, text: str) -> tuple[Path, str, int]:
    config.write_text(text)
    return config, "etc/fairgate/config.yaml", 0o644
