"""Parts that several commands use: the option that names the gateway's file, URLs, and failures."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, TypeVar

import click

if TYPE_CHECKING:
    from gateway.config.model import Config

BAD_INPUT = 2
_Decorated = TypeVar("_Decorated", bound=Callable[..., Any])


class CommandError(click.ClickException):
    """A failure that ends the command with this message on standard error, and with this exit code."""

    def __init__(self, message: str, exit_code: int = BAD_INPUT) -> None:
        super().__init__(message)
        self.exit_code = exit_code  # type: ignore[misc]  # typed for a class, and read from an instance

    def show(self, file: IO[Any] | None = None) -> None:
        click.echo(self.message, file, err=True)


def config_option(text: str, name: str = "path", *, required: bool = False) -> Callable[[_Decorated], _Decorated]:
    """Return the option `-c`, with this help text, as a parameter of this name."""
    return click.option("-c", "--config", name, type=click.Path(path_type=Path), required=required, help=text)


def local_url(host: str, port: int, scheme: str = "http") -> str:
    """Return the URL by which a program on this machine reaches a listener at this address."""
    host = {"": "127.0.0.1", "0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)
    return f"{scheme}://[{host}]:{port}" if ":" in host else f"{scheme}://{host}:{port}"


def counted(count: int, noun: str) -> str:
    """Return a count with its noun: 1 backend, 2 backends."""
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"


def loaded(path: Path) -> Config:
    """Load the file's configuration. Raise CommandError if it has faults."""
    from gateway.config.load import ConfigError, load_config

    try:
        return load_config(path)
    except ConfigError as error:
        raise CommandError(str(error)) from None
