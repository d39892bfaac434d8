"""The unit, run by a real systemd with all of its walls: it serves, reloads or says why not, and drains."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import pytest

from gateway.config.sections.keys import hash_key
from tests.deploy.debian import WITH_SYSTEMD, debian, run
from tests.deploy.dockerfile import ROOT
from tests.deploy.machine import Machine, installed
from tests.deploy.requests import MODEL, body, by_curl, said_whole

pytestmark = pytest.mark.deploy

KEY = "sk-of-alice"
CONFIG = f"""
admin_token: ${{TOKEN}}
usage: /var/lib/fairgate/usage.db
access_log: /var/log/fairgate/access.log
pools: [{{name: a, backends: [{{url: "sim:a"}}]}}]
tenants: [{{name: alice, keys: ["{hash_key(KEY)}"]}}]
"""


UNITS = ROOT / "deploy/systemd"


async def root_with_service(fairgate: Path, debians: Path, folder: Path, config: str) -> Path:
    """Return the root of a Debian in which the unit is installed as docs/deploying.md says."""
    root, environment = folder / "root", folder / "environment"
    await debian(WITH_SYSTEMD, debians, root)
    await run(["cp", "-a", str(fairgate), str(root / "opt")])
    environment.write_text("TOKEN=of-some-length\n")
    files = [
        (UNITS / "fairgate.service", "etc/systemd/system/fairgate.service", 0o644),
        (UNITS / "fairgate.sysusers", "usr/lib/sysusers.d/fairgate.conf", 0o644),
        _written(folder / "config.yaml", config),
        (environment, "etc/fairgate/environment", 0o600),
    ]
    await installed(root, files)
    return root


async def test_the_unit_serves_reloads_and_drains(fairgate: Path, debians: Path, tmp_path: Path) -> None:
    config = tmp_path / "config.yaml"
    root = await root_with_service(fairgate, debians, tmp_path, CONFIG)
    async with Machine(root) as machine:
        status, said = await machine.execute("systemctl", "start", "fairgate")
        assert status == 0, said + (await machine.execute("journalctl", "--no-pager", "-u", "fairgate"))[1]
        assert (await machine.execute("fairgate", "healthcheck"))[0] == 0  # `start` returns when clients are served
        assert "compiled" in (await machine.execute("fairgate", "--version"))[1]
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

        ask = machine.command(*by_curl(KEY, 200, stream=True))
        asking = await asyncio.create_subprocess_exec(*ask, stdout=asyncio.subprocess.PIPE)
        assert asking.stdout is not None
        begun = await asking.stdout.readline()
        assert MODEL.encode() in begun
        assert (await machine.execute("systemctl", "stop", "fairgate"))[0] == 0
        rest, _ = await asking.communicate()
        assert said_whole(begun + rest, stream=True)
        assert (await machine.execute("systemctl", "show", "-P", "Result", "fairgate"))[1].strip() == "success"
        assert (root / "var/lib/fairgate/usage.db").exists()
        assert '"completed"' in (root / "var/log/fairgate/access.log").read_text()


ASKING = """
while [ ! -e /tmp/enough ]; do
    curl -s -o /dev/null -w '%{http_code}\\n' http://127.0.0.1:8080/v1/chat/completions \\
        -H 'Authorization: Bearer sk-somebody' -H 'Content-Type: application/json' -d "$0"
done
"""


async def test_an_upgrade_refuses_nobody(fairgate: Path, debians: Path, tmp_path: Path) -> None:
    root = await root_with_service(fairgate, debians, tmp_path, CONFIG + "open_access: true\n")
    text = (UNITS / "fairgate.service").read_text().replace("/opt/fairgate/", "/opt/fairgate-%i/")
    (root / "etc/systemd/system/fairgate@.service").write_text(text)
    for version in ("a", "b"):
        (root / f"opt/fairgate-{version}").symlink_to("fairgate")
    sockets = ("fairgate.socket", "fairgate-admin.socket")
    await installed(root, [(UNITS / name, f"etc/systemd/system/{name}", 0o644) for name in sockets])
    async with Machine(root) as machine:
        assert (await machine.execute("systemctl", "start", *sockets))[0] == 0
        command = machine.command("sh", "-c", ASKING, json.dumps(body(3, stream=False)))
        asking = await asyncio.create_subprocess_exec(*command, stdout=asyncio.subprocess.PIPE)
        assert asking.stdout is not None
        codes = [await asking.stdout.readline()]  # the first connection starts fairgate@a
        assert (await machine.execute("systemctl", "is-active", "fairgate@a"))[1] == "active\n"
        assert (await machine.execute("systemctl", "start", "fairgate@b"))[0] == 0
        assert (await machine.execute("systemctl", "stop", "fairgate@a"))[0] == 0
        codes += [await asking.stdout.readline() for _ in range(3)]
        await machine.execute("touch", "/tmp/enough")
        codes += (await asking.communicate())[0].splitlines(keepends=True)
        assert set(codes) == {b"200\n"}
        # What asked last was served by the new gateway, and started no other one.
        assert (await machine.execute("systemctl", "is-active", "fairgate@a"))[1] == "inactive\n"
        assert (await machine.execute("systemctl", "is-active", "fairgate@b"))[1] == "active\n"


def _written(config: Path, text: str) -> tuple[Path, str, int]:
    config.write_text(text)
    return config, "etc/fairgate/config.yaml", 0o644
