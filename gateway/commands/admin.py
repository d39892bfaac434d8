"""How does a command ask a running gateway? By its admin listener, which the gateway's file names."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import click

from gateway.commands.common import config_option, loaded, local_url

if TYPE_CHECKING:
    from gateway.config.model import Config

USUAL_URL: Final = "http://127.0.0.1:8190"
TIMEOUT_S: Final = 3.0
CHANGE_TIMEOUT_S: Final = 60.0
"""A reload asks new backends how they are before it uses them."""
ANSWER_BYTES_MAX: Final = 64 << 20


def asks_admin(command: Any) -> Any:
    """The options that say where the admin listener is."""
    admin_option = click.option("--admin", help=f"Admin listener.  [default: that of the file, or {USUAL_URL}]")
    return config_option("The gateway's file: its admin, its admin_token.")(admin_option(command))


class NotAnswered(Exception):
    """The admin listener did not give what was asked. `status`: what it answered; 0: it was not reached. `content`: all
    that it said."""

    def __init__(self, message: str, status: int, content: bytes = b"") -> None:
        super().__init__(message)
        self.status = status
        self.content = content


class Admin:
    """The admin listener of one gateway."""

    def __init__(self, url: str, token: str | None) -> None:
        self.url = url
        self._token = token

    def get(self, path: str) -> Any:
        """What it answers, as plain data. Raises NotAnswered."""
        return self._ask("GET", path, TIMEOUT_S)

    def post(self, path: str) -> Any:
        """Have it change something; as `get`, and what it answers may take longer."""
        return self._ask("POST", path, CHANGE_TIMEOUT_S)

    def _ask(self, method: str, path: str, timeout_s: float) -> Any:
        import urllib.error
        import urllib.request

        url = self.url + path
        headers = {"authorization": f"Bearer {self._token}"} if self._token is not None else {}
        request = urllib.request.Request(url, headers=headers, method=method)
        try:
            with urllib.request.urlopen(request, timeout=timeout_s) as answer:
                return json.loads(answer.read(ANSWER_BYTES_MAX))
        except urllib.error.HTTPError as error:
            content = error.read(ANSWER_BYTES_MAX)
            raise NotAnswered(content.decode(errors="replace")[:500], error.code, content) from None
        except (OSError, ValueError) as error:
            raise NotAnswered(f"{url}: {error}", 0) from None


def admin_of(path: Path | None, admin: str | None) -> Admin:
    """The admin listener of the gateway: what `--admin` says, or else the file."""
    config = loaded(path) if path is not None else None
    token = config.admin_token if config is not None else None
    secret = token.get_secret_value() if token is not None else None
    if admin is not None and not admin.startswith(("http://", "https://")):
        raise click.BadParameter("must be http://host:port of the admin listener", param_hint="--admin")
    return Admin(admin.rstrip("/") if admin is not None else _url(config), secret)


def _url(config: Config | None) -> str:
    """Where a command finds it, on the gateway's own machine."""
    if config is None:
        return USUAL_URL
    return local_url(*config.admin_address)
