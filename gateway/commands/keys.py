"""The commands `fairgate keys`: make keys for the config, or for all replicas at once, and take them back."""

from __future__ import annotations

import asyncio
import re
import sys
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

import click

if TYPE_CHECKING:
    from gateway.config.model import Config
    from gateway.redis.issued_keys import KeyTable

__all__ = ["keys", "loaded"]

BAD_INPUT = 2
_HASH = re.compile(r"sha256:[0-9a-fA-F]{64}")
Found = TypeVar("Found")

_config = click.option(
    "-c", "--config", "path", type=click.Path(path_type=Path), help="The gateway's file, which says where its Redis is."
)


@click.group()
def keys() -> None:
    """Make API keys, and the hashes that go into the config.

    With `state: redis://...` in the config, keys can also be made and revoked while the gateway runs. Every replica
    knows within a second:

    \b
    fairgate keys create --tenant alice -c config.yaml
    fairgate keys revoke sha256:... -c config.yaml
    fairgate keys list -c config.yaml
    """


@keys.command()
@click.option("--tenant", help="Whose it is, as the config calls it. Needs -c.")
@_config
def create(tenant: str | None, path: Path | None) -> None:
    """Make a new key. The key is for the tenant, the hash is for the config file.

    With --tenant and -c, the hash is noted in Redis instead, and the key works at once.
    """
    from gateway.config.model import hash_key, new_key

    if (tenant is None) != (path is None):
        raise click.UsageError("--tenant NAME and -c FILE belong together")
    key = new_key()
    if path is not None and tenant is not None:
        config = loaded(path)
        if tenant not in [each.name for each in config.tenants]:
            raise click.BadParameter(f"{path} has no tenant named {tenant!r}", param_hint="--tenant")
        _in_redis(config, path, lambda table: table.issue(hash_key(key), tenant))
    click.echo(f"key:  {key}\nhash: {hash_key(key)}")


@keys.command(name="hash")
def hash_() -> None:
    """Hash a key read from standard input (so that it stays out of the shell's history)."""
    from gateway.config.model import hash_key

    click.echo(hash_key(_given("key")))


@keys.command()
@click.argument("key_hash", metavar="[HASH]", required=False)
@_config
def revoke(key_hash: str | None, path: Path | None) -> None:
    """Take a key back, by its HASH, or by the key or its hash on standard input. Also one that the config names."""
    from gateway.config.model import hash_key

    config = loaded(_needed(path))
    text = key_hash or _given("key or hash")
    if not _HASH.fullmatch(text):
        if key_hash is not None:
            advice = "give the key itself on standard input, so that it stays out of the shell's history"
            raise click.BadParameter(f"no hash of a key (sha256: and 64 hex digits); {advice}", param_hint="HASH")
        text = hash_key(text)
    text = text.lower()
    named = {key.hash for tenant in config.tenants for key in tenant.keys}

    async def revoked(table: KeyTable) -> str:
        tenant = await table.tenant(text)
        if text in named:
            await table.revoke(text)
            return "revoked; the config still names it, so it would return with another Redis"
        if tenant is None:
            return ""
        await table.forget(text)
        return "revoked"

    said = _in_redis(config, _needed(path), revoked)
    if not said:
        click.echo(f"fairgate: {text} is neither in Redis nor in {path}: nothing is revoked", err=True)
        sys.exit(BAD_INPUT)
    click.echo(said)


@keys.command(name="list")
@_config
def list_(path: Path | None) -> None:
    """All keys by their hashes: whose they are, and who says so."""
    config = loaded(_needed(path))

    async def read(table: KeyTable) -> dict[str, str]:
        return {
            name.decode("utf-8", "replace"): tenant.decode("utf-8", "replace") async for name, tenant in table.entries()
        }

    issued = _in_redis(config, _needed(path), read)
    known = {tenant.name for tenant in config.tenants}
    for tenant in config.tenants:
        for key in tenant.keys:
            state = "revoked" if issued.get(key.hash) == "" else "config"
            click.echo(f"{key.hash}  {state:<8} {tenant.name}")
    named = {key.hash for tenant in config.tenants for key in tenant.keys}
    for name, holder in sorted(issued.items(), key=lambda entry: (entry[1], entry[0])):
        if name not in named and _HASH.fullmatch(name):
            state = "revoked" if not holder else "redis" if holder in known else "unknown"
            click.echo(f"{name}  {state:<8} {holder}")


def _given(what: str) -> str:
    text = click.prompt(what, hide_input=True, err=True) if sys.stdin.isatty() else sys.stdin.readline().strip()
    if not text:
        raise click.UsageError(f"no {what} on standard input")
    return str(text)


def _needed(path: Path | None) -> Path:
    if path is None:
        raise click.UsageError("give -c FILE: the config says where the gateway's Redis is")
    return path


def loaded(path: Path) -> Config:
    """The file's configuration. Ends the command where it has faults."""
    from gateway.config.load import ConfigError, load_config

    try:
        return load_config(path)
    except ConfigError as error:
        click.echo(str(error), err=True)
        sys.exit(BAD_INPUT)


def _in_redis(config: Config, path: Path, do: Callable[[KeyTable], Awaitable[Found]]) -> Found:
    url = config.state.redis_url
    if url is None:
        click.echo(
            f"fairgate: {path} has no `state: redis://...`: its keys stand in the file, under `tenants`", err=True
        )
        sys.exit(BAD_INPUT)
    from gateway.redis.errors import StoreError, StoreUnavailable
    from gateway.redis.issued_keys import KeyTable
    from gateway.redis.store import Store

    async def done() -> Found:
        store = Store(url)
        try:
            await store.open()
            return await do(KeyTable(store))
        finally:
            await store.close()

    try:
        return asyncio.run(done())
    except StoreError as error:
        click.echo(f"fairgate: {error}", err=True)
        sys.exit(1 if isinstance(error, StoreUnavailable) else BAD_INPUT)
