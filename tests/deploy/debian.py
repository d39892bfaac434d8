"""Roots of Debian, made by debootstrap from the mirror that this machine's apt uses, and programs that run in them."""

from __future__ import annotations

import asyncio
import os
import shlex
from collections.abc import Sequence
from pathlib import Path

from tests.waiting import WAIT_S

DEBOOTSTRAP_S = 400.0
SUITE = "bookworm"
"""Its Python is 3.11, as that of the images."""
WITH_COMPILER = ("python3", "python3-venv", "python3-dev", "gcc", "libc6-dev", "ca-certificates")
WITH_SYSTEMD = ("systemd", "systemd-sysv", "dbus", "python3", "ca-certificates", "curl")


async def run(argv: Sequence[str], limit_s: float = WAIT_S, **environment: str) -> str:
    """Return what a command that must succeed prints."""
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


async def debian(packages: tuple[str, ...], kept: Path, root: Path) -> None:
    """Make a root with these packages. A bare one is made once and stays in the folder `kept`."""
    bare = kept / "-".join((SUITE, *packages))
    if not bare.exists():
        unfinished = bare.with_suffix(".part")
        if unfinished.exists():
            await run(["rm", "-rf", "--one-file-system", str(unfinished)])
        mirror = (await run(["apt-get", "indextargets", "--format", "$(REPO_URI)", "Created-By: Packages"])).split()[0]
        made = ["debootstrap", "--variant=minbase", f"--include={','.join(packages)}", SUITE, str(unfinished), mirror]
        # Its mounts stay in a namespace of its own.
        await run(["unshare", "--mount", *made], DEBOOTSTRAP_S, DEBIAN_FRONTEND="noninteractive", **await _proxy())
        (unfinished / "usr/local/bin/python").symlink_to("/usr/bin/python3")
        os.rename(unfinished, bare)
    await run(["cp", "-a", str(bare), str(root)])


async def _proxy() -> dict[str, str]:
    """Return what apt is told to go through."""
    said = await run(["apt-config", "shell", "proxy", "Acquire::http::Proxy"])
    return {"http_proxy": said.partition("'")[2].rstrip("'\n")} if "'" in said else {}
