"""The commands that change a running gateway through its admin listener: reload, drain and resume."""

from __future__ import annotations

import json
import sys
import urllib.parse
from pathlib import Path
from typing import Any

import click

from gateway.commands.admin import NotAnswered, admin_of, asks_admin
from gateway.commands.common import BAD_INPUT, Failed


@click.command()
@asks_admin
def reload(path: Path | None, admin: str | None) -> None:
    """Have the gateway read its config again and apply the changes, as SIGHUP does.

    \b
    fairgate reload -c config.yaml

    Says what changed. Exits with 1 if the gateway keeps the config that it had, and says why.
    """
    try:
        answer = admin_of(path, admin).post("/reload")
    except NotAnswered as error:
        answer = _refused(error)
    for line in answer["changes"]:
        click.echo(line)
    if answer["outcome"] == "refused":
        for line in answer["why_not"]:
            click.echo(f"fairgate: not reloaded: {line}", err=True)
        sys.exit(1)
    click.echo(f"{answer['outcome']}: {answer['hash']}")
    for line in answer["why_not"]:
        click.echo(f"fairgate: {line}", err=True)


@click.command()
@click.argument("backend")
@asks_admin
def drain(backend: str, path: Path | None, admin: str | None) -> None:
    """Send nothing new to BACKEND until `fairgate resume`. Running requests end there; waiting ones go elsewhere.

    \b
    fairgate drain gpu-1:8000 -c config.yaml
    """
    _drain(backend, path, admin, "drain")


@click.command()
@click.argument("backend")
@asks_admin
def resume(backend: str, path: Path | None, admin: str | None) -> None:
    """Send requests to BACKEND again, after `fairgate drain`.

    \b
    fairgate resume gpu-1:8000 -c config.yaml
    """
    _drain(backend, path, admin, "resume")


def _drain(backend: str, path: Path | None, admin: str | None, what: str) -> None:
    try:
        answer = admin_of(path, admin).post(f"/{what}/{urllib.parse.quote(backend, safe='')}")
    except NotAnswered as error:
        raise Failed(f"fairgate: {error}", 1) from None
    state = "drained" if answer["drained"] else "in service" if answer["in_service"] else "resumed, out of service"
    click.echo(f"{answer['pool']}/{answer['backend']}: {state}, {answer['running']} running there")
    if "warning" in answer:
        click.echo(f"fairgate: warning: {answer['warning']}", err=True)


def _refused(error: NotAnswered) -> dict[str, Any]:
    """Return the answer of a gateway that refused a reload. Raise Failed for any other answer."""
    try:
        answer = json.loads(error.content)
    except ValueError:
        answer = None
    if isinstance(answer, dict) and "why_not" in answer:
        return answer
    raise Failed(f"fairgate: {error}", BAD_INPUT if not error.status else 1)
