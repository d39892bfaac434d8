"""The balancer of docker-compose.yml on this machine: a real nginx with the config that compose mounts."""

from __future__ import annotations

import os
import shutil
from collections.abc import Mapping
from pathlib import Path

NGINX = shutil.which("nginx", path=f"{os.environ['PATH']}:/usr/sbin")
SITE = Path(__file__).parents[2] / "deploy/nginx.compose.conf"
_MAIN = """
pid {folder}/nginx.pid;
error_log stderr notice;
events {{ worker_connections 1024; }}
http {{
    access_log off;
    client_body_temp_path {folder}/client_temp;
    proxy_temp_path {folder}/proxy_temp;
    fastcgi_temp_path {folder}/fastcgi_temp;
    uwsgi_temp_path {folder}/uwsgi_temp;
    scgi_temp_path {folder}/scgi_temp;
    {site}
}}
"""
"""As far as it matters here, what the image of nginx has around the sites in conf.d."""


def nginx_config(folder: Path, replaced: Mapping[str, str]) -> Path:
    """Write the config into this folder, with names and ports of this machine."""
    site = SITE.read_text()
    for text, ours in replaced.items():
        assert text in site, f"{SITE} has no {text!r} any more"
        site = site.replace(text, ours)
    path = folder / "nginx.conf"
    path.write_text(_MAIN.format(folder=folder, site=site))
    return path
