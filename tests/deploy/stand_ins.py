"""What stands for the images of docker-compose.yml where no registry is in reach: Debian, made by debootstrap from the
mirror that this machine's apt uses."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

from tests.deploy.container import Image, run
from tests.deploy.dockerfile import based_on

DEBOOTSTRAP_S = 400.0


SUITE = "bookworm"
"""Its Python is 3.11, as that of the images."""
PYTHON = ("python3", "ca-certificates")
WITH_COMPILER = ("python3", "python3-venv", "python3-dev", "gcc", "libc6-dev", "ca-certificates")
SERVERS = ("nginx-light", "redis-server")
BASES = {"build": WITH_COMPILER, "python": PYTHON, "nginx": SERVERS, "redis": SERVERS}
"""The packages, by the name of the image in `x-images`."""

NGINX_CONF = """
pid /run/nginx.pid;
error_log stderr notice;
events { worker_connections 1024; }
http {
    access_log off;
    client_body_temp_path /var/cache/nginx/client_temp;
    proxy_temp_path /var/cache/nginx/proxy_temp;
    fastcgi_temp_path /var/cache/nginx/fastcgi_temp;
    uwsgi_temp_path /var/cache/nginx/uwsgi_temp;
    scgi_temp_path /var/cache/nginx/scgi_temp;
    include /etc/nginx/conf.d/*.conf;
}
"""
"""As far as it matters here, what the image of nginx has: temporary files under /var/cache/nginx, sites in conf.d."""


class StandIns:
    """Images by their full names, each made once and kept in a folder."""

    def __init__(self, images: Mapping[str, str], folder: Path) -> None:
        """`images`: `x-images` of the compose file."""
        self._kinds = {image: kind for kind, image in images.items()}
        self._folder = folder

    async def image(self, name: str) -> Image:
        """The one that stands for this."""
        kind = self._kinds[name]
        image = Image(await self.debian(BASES[kind]))
        if kind == "nginx":
            image.command = ["nginx", "-g", "daemon off;"]
            (image.root / "etc/nginx/nginx.conf").write_text(NGINX_CONF)
        if kind == "redis":
            image.workdir = "/data"
        return image

    async def copy(self, name: str, root: Path) -> Image:
        """One that may be changed."""
        image = await self.image(name)
        await run(["cp", "-a", str(image.root), str(root)], 120)
        return based_on(image, root)

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
        await run(["chroot", str(unfinished), "sh", "-ec", _PREPARE])
        os.rename(unfinished, root)
        return root


_PREPARE = """
mkdir -p /data /var/cache/nginx
[ ! -e /usr/bin/python3 ] || ln -s /usr/bin/python3 /usr/local/bin/python
[ ! -e /usr/sbin/nginx ] || { groupadd -f nginx; useradd -r -g nginx nginx; chown nginx /var/cache/nginx; }
[ ! -e /usr/bin/redis-server ] || chown redis /data
"""


async def _proxy() -> dict[str, str]:
    """What apt is told to go through."""
    said = await run(["apt-config", "shell", "proxy", "Acquire::http::Proxy"])
    return {"http_proxy": said.partition("'")[2].rstrip("'\n")} if "'" in said else {}
