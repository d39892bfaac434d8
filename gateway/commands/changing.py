"""The commands that change a running gateway, by its admin listener: reload, drain and resume."""

from __future__ import annotations

import json
import sys
import urllib.error
import urllib.parse
import urllib.request
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

if TYPE_CHECKING:
    from gateway.config.model import Config

__all__ = ["drain", "reload", "resume"]

BAD_INPUT = 2
TIMEOUT_S = 60.0
"""A reload asks new backends how they are before it uses them."""

_config = click.option(
    "-c", "--config", "path", type=click.Path(path_type=Path), help="The gateway's file: its admin, its admin_token."
)
_admin = click.option("--admin", help="Admin listener.  [default: that of the file, or http://127.0.0.1:9090]")


@click.command()
@_config
@_admin
def reload(path: Path | None, admin: str | None) -> None:
    """Have the gateway read its config again and go on under it, as SIGHUP does.

    \b
    fairgate reload -c config.yaml
    fairgate reload --admin http://127.0.0.1:9091

    Says what changed. Exits with 1 if the gateway keeps the config that it had, and says why.
    """
    status, answer = _asked(path, admin, "/reload", 1)[0]  # a worker has the others do the same
    for line in answer.get("changes", []):
        click.echo(line)
    if status != 200:
        for line in answer.get("why_not", []) or [answer.get("error", "")]:
            click.echo(f"fairgate: not reloaded: {line}", err=True)
        sys.exit(1)
    click.echo(f"{answer['outcome']}: {answer['hash']}")
    for line in answer["why_not"]:
        click.echo(f"fairgate: {line}", err=True)


@click.command()
@click.argument("backend")
@_config
@_admin
def drain(backend: str, path: Path | None, admin: str | None) -> None:
    """Send nothing new to BACKEND: what runs there ends, what waits goes elsewhere. Until `fairgate resume`.

    \b
    fairgate drain gpu-1:8000 -c config.yaml
    """
    _drain(backend, path, admin, "drain")


@click.command()
@click.argument("backend")
@_config
@_admin
def resume(backend: str, path: Path | None, admin: str | None) -> None:
    """Send requests to BACKEND again, after `fairgate drain`.

    \b
    fairgate resume gpu-1:8000 -c config.yaml
    """
    _drain(backend, path, admin, "resume")


def _drain(backend: str, path: Path | None, admin: str | None, what: str) -> None:
    failed = False
    for status, answer in _asked(path, admin, f"/{what}/{urllib.parse.quote(backend, safe='')}"):
        if status != 200:
            click.echo(f"fairgate: {answer.get('error', '')}", err=True)
            failed = True
            continue
        state = "drained" if answer["drained"] else "in service" if answer["in_service"] else "resumed, out of service"
        click.echo(f"{answer['pool']}/{answer['backend']}: {state}, {answer['running']} running there")
        if "warning" in answer:
            click.echo(f"fairgate: warning: {answer['warning']}", err=True)
    if failed:
        sys.exit(1)


def _asked(
    path: Path | None, admin: str | None, what: str, most: int | None = None
) -> list[tuple[int, dict[str, Any]]]:
    """What each admin listener answers, of which there is one for each worker: so many of them, or all."""
    from gateway.commands.keys import loaded

    config = loaded(path) if path is not None else None
    urls = [admin] if admin else _admin_urls(config)
    return [_post(f"{url.rstrip('/')}{what}", config) for url in urls[:most]]


def _admin_urls(config: Config | None) -> list[str]:
    """Where the gateway's own machine finds them."""
    if config is None:
        return ["http://127.0.0.1:9090"]
    host, port = config.admin_address
    host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)
    where = f"[{host}]" if ":" in host else host
    return [f"http://{where}:{port + index}" for index in range(config.workers)]


def _post(url: str, config: Config | None) -> tuple[int, dict[str, Any]]:
    if not url.startswith(("http://", "https://")):
        raise click.BadParameter("must be http://host:port of the admin listener", param_hint="--admin")
    token = config.admin_token if config is not None else None
    headers = {"authorization": f"Bearer {token.get_secret_value()}"} if token is not None else {}
    request = urllib.request.Request(url, method="POST", headers=headers)
    try:
        with urllib.request.urlopen(request, timeout=TIMEOUT_S) as answer:
            return answer.status, json.load(answer)
    except urllib.error.HTTPError as error:
        return error.code, _object(error.read())
    except (OSError, ValueError) as error:
        click.echo(f"fairgate: {url}: {error}", err=True)
        sys.exit(BAD_INPUT)


def _object(body: bytes) -> dict[str, Any]:
    try:
        found = json.loads(body)
    except ValueError:
        found = None
    return found if isinstance(found, dict) else {"error": body[:500].decode("utf-8", "replace")}
