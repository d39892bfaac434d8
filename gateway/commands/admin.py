"""How does a command ask or change a running gateway? By the admin listener, whose address is in the gateway's file."""

from __future__ import annotations

import json
import sys
import urllib.parse
from http import HTTPStatus
from pathlib import Path
from typing import Any, Final

import click

from gateway.commands.common import BAD_INPUT, CommandError, config_option, loaded, local_url

USUAL_URL: Final = "http://127.0.0.1:8190"
TIMEOUT_S: Final = 3.0
CHANGE_TIMEOUT_S: Final = 60.0
"""Seconds for a change: a reload asks new backends for their state before it uses them."""
ANSWER_BYTES_MAX: Final = 64 << 20


def asks_admin(command: Any) -> Any:
    """Add the options that say where the admin listener is."""
    admin_option = click.option("--admin", help=f"Admin listener.  [default: that of the file, or {USUAL_URL}]")
    return config_option("The gateway's file, for `admin` and `admin_token`.")(admin_option(command))


class AdminRequestError(CommandError):
    """A failed request to the admin listener. Ends the command with 1 if there is an answer, else with BAD_INPUT.

    `text`: what failed. `status` and `content`: of the HTTP answer; 0 and empty without one.
    """

    def __init__(self, text: str, status: int, content: bytes = b"") -> None:
        super().__init__(f"fairgate: {text}", 1 if status else BAD_INPUT)
        self.text = text
        self.status = status
        self.content = content


class AdminClient:
    """A client of one gateway's admin listener."""

    def __init__(self, url: str, token: str | None) -> None:
        self.url = url
        self._token = token

    def ask(self, path: str, method: str = "GET") -> Any:
        """Return the answer as plain data. Raise AdminRequestError if there is none, or an error.
        A POST may take longer."""
        import urllib.error
        import urllib.request

        url = self.url + path
        headers = {"authorization": f"Bearer {self._token}"} if self._token is not None else {}
        request = urllib.request.Request(url, headers=headers, method=method)
        try:
            with urllib.request.urlopen(request, timeout=TIMEOUT_S if method == "GET" else CHANGE_TIMEOUT_S) as answer:
                return json.loads(answer.read(ANSWER_BYTES_MAX))
        except urllib.error.HTTPError as error:
            content = error.read(ANSWER_BYTES_MAX)
            raise AdminRequestError(content.decode(errors="replace")[:500], error.code, content) from None
        except (OSError, ValueError) as error:
            raise AdminRequestError(f"{url}: {error}", 0) from None


def admin_of(path: Path | None, admin: str | None) -> AdminClient:
    """Return the admin listener that `--admin` names, else the one of the file. Raise BadParameter."""
    config = loaded(path) if path is not None else None
    if admin is None:
        admin = USUAL_URL if config is None else local_url(*config.admin_address)
    elif not admin.startswith(("http://", "https://")):
        raise click.BadParameter("must be http://host:port of the admin listener", param_hint="--admin")
    token = config.admin_token if config is not None else None
    return AdminClient(admin.rstrip("/"), token.get_secret_value() if token is not None else None)


@click.command()
@asks_admin
def reload(path: Path | None, admin: str | None) -> None:
    """Have the gateway read its config again and apply the changes, as SIGHUP does.

    \b
    fairgate reload -c config.yaml

    Says what changed. Exits with 1 if the gateway keeps the config that it had, and says why.
    """
    try:
        answer = admin_of(path, admin).ask("/reload", "POST")
    except AdminRequestError as error:
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
    answer = admin_of(path, admin).ask(f"/{what}/{urllib.parse.quote(backend, safe='')}", "POST")
    state = "drained" if answer["drained"] else "in service" if answer["in_service"] else "resumed, out of service"
    click.echo(f"{answer['pool']}/{answer['backend']}: {state}, {answer['running']} running there")
    if "warning" in answer:
        click.echo(f"fairgate: warning: {answer['warning']}", err=True)
