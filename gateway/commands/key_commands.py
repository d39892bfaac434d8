"""The commands `fairgate keys`: issue and revoke keys, for the config or for all replicas at once."""

from __future__ import annotations

import asyncio
import re
import sys
import time
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

import click
import msgspec

from gateway.commands.common import BAD_INPUT, CommandError, config_option, loaded

if TYPE_CHECKING:
    from gateway.config.model import Config
    from gateway.keys.issued import KeyTable

_HASH = re.compile(r"sha256:[0-9a-fA-F]{64}")
Found = TypeVar("Found")

_TEXT = "The gateway's file."
_config = config_option(_TEXT)
_needed_config = config_option(_TEXT, required=True)
_key_hash = click.argument("key_hash", metavar="[HASH]", required=False)


@click.group()
def keys() -> None:
    """Make API keys, and the hashes that go into the config.

    With `state: redis://...`, else `usage`, in the config, keys can also be made and revoked while the gateway runs.
    Every replica knows within a second:

    \b
    fairgate keys create --tenant alice -c config.yaml
    fairgate keys rotate sha256:... --grace 24h -c config.yaml
    fairgate keys revoke sha256:... -c config.yaml
    fairgate keys list -c config.yaml
    """


@keys.command()
@click.option("--tenant", "tenants", multiple=True, help="Tenant of the key; repeat for a key each.")
@_config
@click.option("--expires", help="Last day by UTC, such as 2027-01-31, or a time such as 2027-01-31T12:00:00Z.")
@click.option("--app", "apps", multiple=True, help="App that the key may use; repeat for several, the default first.")
@click.option("--model", "models", multiple=True, help="Model that the key may use; repeat for several.")
@click.option("--weight", type=float, help="Weight of the tenant in requests with this key.")
@click.option("--label", help="Use or holder of the key; shown in lists, logs, usage and metrics.")
@click.option(
    "--class", "of_class", type=click.Choice(["interactive", "batch"]), help="Class of requests with this key."
)
@click.option("--quota", help='Limits of the key in JSON: {"tokens_per_day": 1000000}.')
@click.option("--json", "as_json", is_flag=True, help="Print a line of JSON for each key.")
def create(
    tenants: tuple[str, ...], path: Path | None, expires: str | None, apps: tuple[str, ...], models: tuple[str, ...],
    weight: float | None, label: str | None, of_class: str | None, quota: str | None, as_json: bool,
) -> None:  # fmt: skip
    """Make a new key. The key is for the tenant, the hash is for the config file.

    With --tenant and -c, the hash goes to the database or to Redis instead, and the key works at once. With --weight,
    the config need not have the tenant. All options but --json need -c.
    """
    from gateway.config.sections.keys import hash_key, new_key
    from gateway.keys.issuance import KeyRefused, issue, make_keys

    if bool(tenants) != (path is not None):
        raise click.UsageError("--tenant NAME and -c FILE belong together")
    terms = {
        "expires": expires, "apps": apps or None, "models": models or None, "weight": weight, "label": label,
        "class": of_class, "quota": None if quota is None else _parse_mapping(quota),
    }  # fmt: skip
    given = {name: value for name, value in terms.items() if value is not None}
    if path is None:
        if given:
            named = ", ".join(given)
            raise click.UsageError(f"{named}: terms of a key need -c FILE; in the file they stand by the hash")
        keys = [("", new_key())]
    else:
        config = loaded(path)
        try:
            made = make_keys(config, tenants, given)
        except KeyRefused as error:
            raise CommandError(f"fairgate: {error}") from None
        _in_table(config, path, lambda table: issue(table, made))
        keys = [(tenant, key) for tenant, key, _ in made]
    for tenant, key in keys:
        told = {"key": key, "hash": hash_key(key), **({"tenant": tenant} if tenant else {})}
        if as_json:
            click.echo(msgspec.json.encode(told).decode())
        else:
            click.echo("\n".join([f"{name + ':':<5} {value}" for name, value in told.items()]))


@keys.command(name="hash")
def hash_() -> None:
    """Hash a key read from standard input, so that the key stays out of the shell's history.

    Standard error has the key's name in logs and metrics. A key needs 24 characters, 10 of them different; others could
    be guessed, and are refused.
    """
    from gateway.config.sections.keys import hash_key, open_name, weakness

    key = _from_stdin("key")
    hashed = hash_key(key)
    click.echo(f"where any key is taken, it appears as {open_name(bytes.fromhex(hashed[7:]))}", err=True)
    if (why := weakness(key)) is not None:
        raise CommandError(f"fairgate: {why}; `fairgate keys create` makes one")
    click.echo(hashed)


@keys.command()
@_key_hash
@_needed_config
def revoke(key_hash: str | None, path: Path) -> None:
    """Revoke a key, by its HASH, or by the key or its hash on standard input; also a key of the config."""
    from gateway.keys.issuance import revoke

    config, text = loaded(path), _hash_of(key_hash)
    remark = _in_table(config, path, lambda table: revoke(table, config, text))
    click.echo(f"revoked; {remark}" if remark else "revoked")


@keys.command()
@_key_hash
@_needed_config
@click.option("--grace", default="0s", show_default=True, help="Time for which the old key still works: 30m, 24h, 7d.")
@click.option("--expires", help="As in create.  [default: as the old key]")
def rotate(key_hash: str | None, path: Path, grace: str, expires: str | None) -> None:
    """Replace a key by a new one with its terms. The old key ends at once, or after --grace.

    The old key is named by its HASH, or by the key or its hash on standard input.
    """
    from gateway.config.sections.keys import hash_key, new_key
    from gateway.keys.issuance import rotate, seconds_of

    config, old, key = loaded(path), _hash_of(key_hash), new_key()

    async def rotated(table: KeyTable) -> int:
        grace_s = seconds_of(grace)
        await rotate(table, config, old, hash_key(key), unix_s=time.time(), grace_s=grace_s, expires=expires)
        return grace_s

    grace_s = _in_table(config, path, rotated)
    click.echo(f"key:  {key}\nhash: {hash_key(key)}")
    click.echo(f"the old key is taken for {grace} more" if grace_s else "the old key is revoked", err=True)


@keys.command(name="list")
@_needed_config
def list_(path: Path) -> None:
    """List all keys: a line of JSON for each, with its hash, its terms, and where it is `from`."""
    from gateway.keys.issuance import list_keys

    config = loaded(path)
    for row in _in_table(config, path, lambda table: list_keys(table, config)):
        click.echo(msgspec.json.encode(row).decode())


def _parse_mapping(text: str) -> dict[str, object]:
    """Parse the JSON object of `--quota`. Raise BadParameter."""
    try:
        return msgspec.json.decode(text, type=dict[str, object])
    except (msgspec.DecodeError, UnicodeEncodeError, RecursionError) as error:
        message = f'should be JSON such as {{"tokens_per_day": 1000000}}: {error}'
        raise click.BadParameter(message, param_hint="--quota") from None


def _hash_of(given: str | None) -> str:
    """Return the given hash, else the hash of the key or the hash on standard input. Raise BadParameter."""
    from gateway.config.sections.keys import hash_key

    text = given or _from_stdin("key or hash")
    if not _HASH.fullmatch(text):
        if given is not None:
            advice = "give the key itself on standard input, so that it stays out of the shell's history"
            raise click.BadParameter(f"no hash of a key (sha256: and 64 hex digits); {advice}", param_hint="HASH")
        text = hash_key(text)
    return text.lower()


def _from_stdin(what: str) -> str:
    text = click.prompt(what, hide_input=True, err=True) if sys.stdin.isatty() else sys.stdin.readline().strip()
    if not text:
        raise click.UsageError(f"no {what} on standard input")
    return str(text)


def _in_table(config: Config, path: Path, do: Callable[[KeyTable], Awaitable[Found]]) -> Found:
    """Run a command on the table of issued keys. Raise CommandError without a table, or if a key is refused."""
    if not config.issues_keys:
        raise CommandError(
            f"fairgate: {path} has neither `usage:` nor `state: redis://...`: its keys stand in the file, under "
            "`tenants`"
        )
    from gateway.keys.issuance import KeyRefused
    from gateway.storage.store_errors import StoreError, StoreUnavailable

    async def run_in_table() -> Found:
        async with AsyncExitStack() as stack:
            return await do(await _open_table(config, stack))

    try:
        return asyncio.run(run_in_table())
    except (StoreError, KeyRefused) as error:
        raise CommandError(f"fairgate: {error}", 1 if isinstance(error, StoreUnavailable) else BAD_INPUT) from None


async def _open_table(config: Config, stack: AsyncExitStack) -> KeyTable:
    """Return the table in which this config's gateways look for keys, open until the stack ends."""
    if (url := config.state.redis_url) is not None:
        from gateway.keys.in_redis import RedisKeys
        from gateway.storage.redis.redis_store import RedisStore

        store = RedisStore(url)
        stack.push_async_callback(store.close)
        await store.open()
        return RedisKeys(store)
    from gateway.keys.in_database import DatabaseKeys
    from gateway.usage.thread import CLOSE_S, DatabaseThread

    assert config.usage is not None
    database = DatabaseThread(config.usage)
    stack.push_async_callback(database.close, CLOSE_S)
    return DatabaseKeys(database)
