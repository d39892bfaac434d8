"""A command run as a container engine would run it, where there is none: namespaces, mounts, user and rights by Linux's
own programs. What needs control groups (bounds on memory and processes) is left out."""

from __future__ import annotations

import asyncio
import os
import shlex
import signal
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from tests.waiting import WAIT_S

_DEVICES = ("null", "zero", "full", "random", "urandom")


@dataclass
class Image:
    """A file system, and how it is run unless somebody says otherwise."""

    root: Path
    user: str = "0:0"
    workdir: str = "/"
    environment: dict[str, str] = field(
        default_factory=lambda: {"PATH": "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"}
    )
    entrypoint: list[str] = field(default_factory=list)
    command: list[str] = field(default_factory=list)
    health: list[str] = field(default_factory=list)
    stop_signal: str = "SIGTERM"


@dataclass(frozen=True)
class Mount:
    """`source`, a file or folder of this machine; without one, memory of at most `size`."""

    target: str
    source: Path | None = None
    size: str = "64m"
    read_only: bool = False


@dataclass(frozen=True)
class Sandbox:
    """What a command finds around itself, and what it may do."""

    root: Path
    user: str = "0:0"
    workdir: str = "/"
    environment: Mapping[str, str] = field(default_factory=dict)
    mounts: Sequence[Mount] = ()
    network: str | None = None
    """The name of a network namespace; None: this machine's."""
    read_only: bool = False
    powerless: bool = False
    """No capability, and no way to get one."""

    def argv(self, command: Sequence[str]) -> list[str]:
        """What to start so that the command becomes process 1 in here."""
        inside = [f"mount --bind {self._at('')} {self._at('')}", f"mount -t proc proc {self._at('proc')}"]
        inside += self._devices()
        for mount in self.mounts:
            inside += self._mounted(mount)
        if self.read_only:
            inside.append(f"mount -o remount,bind,ro {self._at('')}")
        inside.append(f"exec chroot {self._at('')} {shlex.join(self._as_user(command))}")
        network = ["ip", "netns", "exec", self.network] if self.network is not None else []
        return [*network, "unshare", "--mount", "--pid", "--fork", "--kill-child", "sh", "-ec", "\n".join(inside)]

    def entered(self, pid: int, command: Sequence[str]) -> list[str]:
        """What to start so that the command joins this process."""
        return ["nsenter", "-t", str(pid), "-m", "-n", "-p", "-r", "-w", *self._as_user(command)]

    def _as_user(self, command: Sequence[str]) -> list[str]:
        user, _, group = self.user.partition(":")
        who = ["setpriv", "--reuid", user, "--regid", group or user, "--clear-groups"]
        if self.powerless:
            who += ["--bounding-set=-all", "--inh-caps=-all", "--no-new-privs"]
        return [*who, "env", "-i", "-C", self.workdir, *(f"{k}={v}" for k, v in self.environment.items()), *command]

    def _at(self, path: str) -> str:
        return shlex.quote(str(self.root / path.lstrip("/")))

    def _devices(self) -> list[str]:
        dev = self._at("dev")
        nodes = [f"touch {dev}/{name}; mount --bind /dev/{name} {dev}/{name}" for name in _DEVICES]
        links = [f"ln -s /proc/self/fd{part} {dev}/{name}" for name, part in (("fd", ""), ("stdout", "/1"))]
        shm = f"mkdir {dev}/shm; mount -t tmpfs -o size=64m,mode=1777 tmpfs {dev}/shm"
        return [f"mount -t tmpfs -o size=64k,mode=755 tmpfs {dev}", *nodes, *links, shm]

    def _mounted(self, mount: Mount) -> list[str]:
        target = self._at(mount.target)
        if mount.source is None:
            return [f"mkdir -p {target}; mount -t tmpfs -o size={mount.size},mode=1777 tmpfs {target}"]
        make = f"mkdir -p {target}" if mount.source.is_dir() else f"mkdir -p $(dirname {target}); touch {target}"
        lines = [f"{make}; mount --bind {shlex.quote(str(mount.source))} {target}"]
        return [*lines, f"mount -o remount,bind,ro {target}"] if mount.read_only else lines


async def run(argv: Sequence[str], limit_s: float = WAIT_S, **environment: str) -> str:
    """What a command that must succeed prints."""
    process = await asyncio.create_subprocess_exec(
        *argv,
        env={**os.environ, **environment},
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
    )
    try:
        async with asyncio.timeout(limit_s):
            said, _ = await process.communicate()
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    text = said.decode(errors="replace")
    if process.returncode:
        raise RuntimeError(f"{shlex.join(argv)[-2000:]}: status {process.returncode}\n{text[-4000:]}")
    return text


class Container:
    """One running command, its output and its end."""

    def __init__(self, name: str, sandbox: Sandbox, command: Sequence[str], log: Path) -> None:
        self.name = name
        self.sandbox = sandbox
        self.command = command
        self.log = log
        self._process: asyncio.subprocess.Process | None = None

    @property
    def said(self) -> str:
        return self.log.read_text(errors="replace") if self.log.exists() else ""

    @property
    def is_running(self) -> bool:
        return self._process is not None and self._process.returncode is None

    @property
    def pid(self) -> int:
        """Of the command itself, as this machine counts; 0: it has not begun, or has ended."""
        if self._process is None or not self.is_running:
            return 0
        pid = self._process.pid
        children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
        return int(children[0]) if children else 0

    async def start(self) -> None:
        with self.log.open("ab") as sink:
            self._process = await asyncio.create_subprocess_exec(
                *self.sandbox.argv(self.command), stdin=asyncio.subprocess.DEVNULL, stdout=sink, stderr=sink
            )

    async def execute(self, command: Sequence[str]) -> tuple[int, str]:
        """The status and the output of another command in here."""
        process = await asyncio.create_subprocess_exec(
            *self.sandbox.entered(self.pid, command),
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.STDOUT,
        )
        async with asyncio.timeout(WAIT_S):
            said, _ = await process.communicate()
        return process.returncode or 0, said.decode(errors="replace")

    def signal(self, name: str) -> None:
        if pid := self.pid:
            os.kill(pid, signal.Signals[name])

    async def ended(self, limit_s: float) -> int:
        """Its exit status; TimeoutError if it goes on."""
        assert self._process is not None
        async with asyncio.timeout(limit_s):
            return await self._process.wait()

    async def remove(self) -> None:
        """End it, in whatever state it is, and wait until its connections are closed."""
        if self._process is None or not self.is_running:
            return
        if self.pid:
            self.signal("SIGKILL")
            await self.ended(WAIT_S)
        else:
            self._process.kill()
            await self._process.wait()
