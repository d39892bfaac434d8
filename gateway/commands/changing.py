"""The commands that change a running gateway through its admin listener: reload, drain and resume."""

from __future__ import annotations

import json
import sys
import urllib.parse
from http import HTTPStatus
from pathlib import Path

import click

from gateway.commands.admin import NotAnswered, admin_of, asks_admin


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
        if error.status != HTTPStatus.CONFLICT:
            raise
        answer = json.loads(error.content)
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
    answer = admin_of(path, admin).post(f"/{what}/{urllib.parse.quote(backend, safe='')}")
    state = "drained" if answer["drained"] else "in service" if answer["in_service"] else "resumed, out of service"
    click.echo(f"{answer['pool']}/{answer['backend']}: {state}, {answer['running']} running there")
    if "warning" in answer:
        click.echo(f"fairgate: warning: {answer['warning']}", err=True)
