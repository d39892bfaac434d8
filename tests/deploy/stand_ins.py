"""What stands for the images of docker-compose.yml where no registry is in reach: Debian, made by debootstrap from the
mirror that this machine's apt uses."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

from tests.deploy.container import Image, run

DEBOOTSTRAP_S = 400.0


SUITE = "bookworm"
"""Its Python is 3.11, as that of the images."""
PYTHON = ("python3", "ca-certificates")
WITH_COMPILER = ("python3", "python3-venv", "python3-dev", "gcc", "libc6-dev", "ca-certificates")
BASES = {"build": WITH_COMPILER, "python": PYTHON}
"""The packages, by the name of the image in `x-images`."""


class StandIns:
    """Images by their full names, each made once and kept in a folder."""

    def __init__(self, images: Mapping[str, str], folder: Path) -> None:
        """`images`: `x-images` of the compose file."""
        self._kinds = {image: kind for kind, image in images.items()}
        self._folder = folder

    async def copy(self, name: str, root: Path) -> Image:
        """Make one that may be changed, in the place of this."""
        await run(["cp", "-a", str(await self.debian(BASES[self._kinds[name]])), str(root)], 120)
        return Image(root)

    async def debian(self, packages: tuple[str, ...]) -> Path:
        """The folder of a bare one with these packages."""
        root = self._folder / "-".join((SUITE, *packages))
        if root.exists():
            return root
        unfinished = root.with_suffix(".part")
        if unfinished.exists():
            await run(["rm", "-rf", "--one-file-system", str(unfinished)], 120)
        mirror = (await run(["apt-get", "indextargets", "--format", "$(REPO_URI)", "Created-By: Packages"])).split()[0]
        made = ["debootstrap", "--variant=minbase", f"--include={','.join(packages)}"]
        made += [SUITE, str(unfinished), mirror]
        # Its mounts stay in a namespace of its own.
        await run(["unshare", "--mount", *made], DEBOOTSTRAP_S, DEBIAN_FRONTEND="noninteractive", **await _proxy())
        if "python3" in packages:
            (unfinished / "usr/local/bin/python").symlink_to("/usr/bin/python3")
        os.rename(unfinished, root)
        return root


async def _proxy() -> dict[str, str]:
    """What apt is told to go through."""
    said = await run(["apt-config", "shell", "proxy", "Acquire::http::Proxy"])
    return {"http_proxy": said.partition("'")[2].rstrip("'\n")} if "'" in said else {}
