"""A Debian that systemd has started, in namespaces and a control group of its own: what a unit does, it does there."""

from __future__ import annotations

import asyncio
import os
import re
import shlex
from collections.abc import Sequence
from pathlib import Path

from tests.deploy.debian import run
from tests.waiting import WAIT_S

STARTED = ("running", "degraded")
_BOOT = """
mount --bind {root} {root}
mount --make-rprivate /
cd {root}
mount -t proc proc proc
mount -t sysfs -o ro sysfs sys
mount -t cgroup2 cgroup2 sys/fs/cgroup
mount -t tmpfs tmpfs run
mount -t tmpfs tmpfs tmp
mount -t tmpfs -o mode=755 tmpfs dev
for node in null zero full random urandom tty; do touch dev/$node; mount --bind /dev/$node dev/$node; done
mkdir dev/pts dev/shm
ln -s /proc/self/fd dev/fd
ln -s pts/ptmx dev/ptmx
ip link set lo up
pivot_root . mnt
umount -l /mnt
exec env -i container=other /lib/systemd/systemd --system --unit=multi-user.target
"""


class Machine:
    """`async with Machine(root) as machine`: it runs until the end of the block. Needs root, and control groups of the
    second version."""

    def __init__(self, root: Path) -> None:
        self._root = root
        self._group = Path()
        self._process: asyncio.subprocess.Process | None = None

    async def __aenter__(self) -> Machine:
        mounts = (await run(["cat", "/proc/mounts"])).splitlines()
        groups = next(line.split()[1] for line in mounts if line.split()[2] == "cgroup2")
        self._group = Path(groups) / f"fairgate-{os.getpid()}"
        boot = _BOOT.format(root=shlex.quote(str(self._root)))
        own = ["unshare", "--mount", "--pid", "--fork", "--kill-child", "--cgroup", "--ipc", "--uts", "--net"]
        enter = (
            f"mkdir {self._group}; echo $$ > {self._group}/cgroup.procs; exec {shlex.join([*own, 'sh', '-ec', boot])}"
        )
        nothing = asyncio.subprocess.DEVNULL
        self._process = await asyncio.create_subprocess_exec("sh", "-ec", enter, stdin=nothing, stdout=nothing)
        try:
            async with asyncio.timeout(WAIT_S):
                while (await self.execute("systemctl", "is-system-running"))[1].strip() not in STARTED:  # noqa: ASYNC110
                    await asyncio.sleep(0.1)
        except BaseException:
            await self.__aexit__()
            raise
        return self

    async def __aexit__(self, *error: object) -> None:
        assert self._process is not None
        if self._process.returncode is None:
            self._process.kill()  # its child, process 1, goes with it, and whatever that started
        await self._process.wait()
        folders = sorted((path for path in self._group.rglob("*") if path.is_dir()), key=lambda path: -len(path.parts))
        async with asyncio.timeout(WAIT_S):
            for folder in [*folders, self._group]:
                while not _removed(folder):  # noqa: ASYNC110
                    await asyncio.sleep(0.05)

    def _first(self) -> str:
        """Process 1, as this machine counts; empty before it is there."""
        assert self._process is not None
        pid = self._process.pid
        return Path(f"/proc/{pid}/task/{pid}/children").read_text().strip()

    def command(self, *words: str) -> list[str]:
        """What to start so that these words are a command in there."""
        clean = ["env", "-i", "PATH=/usr/sbin:/usr/bin:/opt/fairgate/bin"]
        return ["nsenter", "-t", self._first() or "0", "-m", "-n", "-p", "-i", "-u", "-C", "-r", "-w", *clean, *words]

    async def execute(self, *words: str) -> tuple[int, str]:
        """The status and the output of a command in there."""
        process = await asyncio.create_subprocess_exec(
            *self.command(*words), stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.STDOUT
        )
        async with asyncio.timeout(WAIT_S):
            said, _ = await process.communicate()
        return process.returncode or 0, said.decode(errors="replace")

    async def status_of(self, unit: str) -> dict[str, str]:
        """Of its main process, what the kernel says."""
        pid = (await self.execute("systemctl", "show", "-P", "MainPID", unit))[1].strip()
        lines = (await self.execute("cat", f"/proc/{pid}/status"))[1]
        return {"MainPID": pid, **dict(re.findall(r"^(\w+):\t(.*)$", lines, re.MULTILINE))}


def _removed(group: Path) -> bool:
    """Is this control group gone? It stays as long as anybody is in it."""
    try:
        group.rmdir()
    except FileNotFoundError:
        return True
    except OSError:
        return False
    return True


async def installed(root: Path, files: Sequence[tuple[Path, str, int]]) -> None:
    """Put files into a machine that does not run."""
    for source, target, mode in files:
        await run(["install", "-D", "-m", f"{mode:o}", str(source), str(root / target)])
