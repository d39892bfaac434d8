"""The commands `fairgate keys`: issue and revoke keys, for the config or for all replicas at once."""

from __future__ import annotations

import asyncio
import re
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

import click
import msgspec

from gateway.commands.common import BAD_INPUT, Failed, config_option, loaded

if TYPE_CHECKING:
    from gateway.config.model import Config
    from gateway.keys.issued import KeyTable

_HASH = re.compile(r"sha256:[0-9a-fA-F]{64}")
_OPTIONS = {
    "expires": "--expires",
    "apps": "--app",
    "models": "--model",
    "weight": "--weight",
    "label": "--label",
    "class": "--class",
    "quota": "--quota",
}
Found = TypeVar("Found")

_config = config_option("The gateway's file.")
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
    from pydantic import ValidationError

    from gateway.config.sections.keys import KeyConfig, hash_key, new_key
    from gateway.keys.issued import entry, nobody_of, unfit
    from gateway.keys.rotation import moment

    if bool(tenants) != (path is not None):
        raise click.UsageError("--tenant NAME and -c FILE belong together")
    terms = {
        "expires": expires, "apps": apps or None, "models": models or None, "weight": weight, "label": label,
        "class": of_class, "quota": None if quota is None else _mapping(quota),
    }  # fmt: skip
    given = {name: value for name, value in terms.items() if value is not None}
    if path is None and given:
        raise click.UsageError(f"{', '.join(_OPTIONS.values())} need -c FILE; in the file they stand by the hash")
    keys = [(tenant, new_key()) for tenant in tenants or ("",)]
    try:
        issued = {
            key: KeyConfig.model_validate({"hash": hash_key(key), "created": moment(time.time()), **given})
            for _, key in keys
        }
    except ValidationError as error:
        [first, *_] = error.errors(include_url=False)
        where = "".join([f"{name}: " for name in first["loc"][1:] if isinstance(name, str)])
        raise click.BadParameter(where + first["msg"], param_hint=_OPTIONS[str(first["loc"][0])]) from None
    if path is not None:
        config = loaded(path)
        for tenant, key in keys:
            if (why := nobody_of(config, tenant, issued[key])) is not None:
                raise click.BadParameter(f"{path} {why}", param_hint="--tenant")
            if (found := unfit(config, issued[key], time.time())) is not None:
                raise click.BadParameter(found[1], param_hint=_OPTIONS[found[0]])
        _in_table(
            config, path, lambda table: table.note({hash_key(key): entry(tenant, issued[key]) for tenant, key in keys})
        )
    for tenant, key in keys:
        made = {"key": key, "hash": hash_key(key), **({"tenant": tenant} if tenant else {})}
        if as_json:
            click.echo(msgspec.json.encode(made).decode())
        else:
            click.echo("\n".join([f"{name + ':':<5} {value}" for name, value in made.items()]))


@keys.command(name="hash")
@config_option("The gateway's file: print the key's tenant, too.")
def hash_(path: Path | None) -> None:
    """Hash a key read from standard input, so that the key stays out of the shell's history.

    Standard error has the key's name in logs and metrics. A key needs 24 characters, 10 of them different; others could
    be guessed, and are refused.
    """
    from gateway.config.sections.keys import hash_key, open_name, weakness

    config = loaded(path) if path is not None else None
    key = _from_stdin("key")
    hashed = hash_key(key)
    holder = next(
        (each.name for each in (config.tenants if config else ()) for its in each.keys if its.hash == hashed), ""
    )
    if holder:
        click.echo(f"it is {holder}'s", err=True)
    elif config is None or config.open_access:
        click.echo(f"where any key is taken, it appears as {open_name(bytes.fromhex(hashed[7:]))}", err=True)
    else:
        click.echo(f"{path} names no tenant that holds it", err=True)
    if (why := weakness(key)) is not None:
        raise Failed(f"fairgate: {why}; `fairgate keys create` makes one")
    click.echo(hashed)


@keys.command()
@_key_hash
@_config
def revoke(key_hash: str | None, path: Path | None) -> None:
    """Revoke a key, by its HASH, or by the key or its hash on standard input; also a key of the config."""
    from gateway.keys.issued import take_back

    config = loaded(_needed(path))
    text = _hash_of(key_hash)
    named = {key.hash for tenant in config.tenants for key in tenant.keys}

    async def revoked(table: KeyTable) -> str:
        was_empty = await table.changed() is None
        if not await take_back(table, text, is_named=text in named):
            return ""
        if text in named:
            return f"revoked; the config still names it, so it would return with another {table.place}"
        lost = "; the table of keys was empty: gateways stop to take whatever they know from an earlier one"
        return "revoked" + (lost if was_empty else "")

    outcome = _in_table(config, _needed(path), revoked)
    if not outcome:
        raise Failed(f"fairgate: {text} is neither in the table of keys nor in {path}: nothing is revoked")
    click.echo(outcome)


@keys.command()
@_key_hash
@_config
@click.option("--grace", default="0s", show_default=True, help="Time for which the old key still works: 30m, 24h, 7d.")
@click.option("--expires", help="As in create.  [default: as the old key]")
def rotate(key_hash: str | None, path: Path | None, grace: str, expires: str | None) -> None:
    """Replace a key by a new one with its terms. The old key ends at once, or after --grace.

    The old key is named by its HASH, or by the key or its hash on standard input.
    """
    from gateway.config.sections.keys import hash_key, new_key
    from gateway.keys.rotation import CannotRotate, rotate, seconds_of

    config = loaded(_needed(path))
    old, key = _hash_of(key_hash), new_key()
    try:
        grace_s = seconds_of(grace)
        _in_table(
            config, _needed(path),
            lambda table: rotate(
                table, config, old, hash_key(key), unix_s=time.time(), grace_s=grace_s, expires=expires
            ),
        )  # fmt: skip
    except CannotRotate as error:
        raise Failed(f"fairgate: {error}") from None
    click.echo(f"key:  {key}\nhash: {hash_key(key)}")
    click.echo(f"the old key is taken for {grace} more" if grace_s else "the old key is revoked", err=True)


@keys.command(name="list")
@_config
def list_(path: Path | None) -> None:
    """List all keys by their hashes: source, tenant, expiry, apps, models, and last use."""
    from gateway.keys.issued import in_words
    from gateway.keys.rotation import moment

    config = loaded(_needed(path))

    async def read(table: KeyTable) -> tuple[str, dict[str, bytes], dict[str, int]]:
        noted = {name.decode("utf-8", "replace"): noted async for name, noted in table.entries()}
        return table.place, noted, await table.uses()

    place, issued, uses = _in_table(config, _needed(path), read)
    named = {key.hash for tenant in config.tenants for key in tenant.keys}

    def used(key_hash: str) -> str:
        return f" used={moment(uses[key_hash])}" if key_hash in uses else ""

    for tenant in config.tenants:
        for key in tenant.keys:
            state = "revoked" if issued.get(key.hash) == b"" else "config"
            click.echo(f"{key.hash}  {state:<8} {in_words(tenant.name, key)}{used(key.hash)}")
    lines = [
        (words, f"{name}  {state:<8} {words}{used(name)}".rstrip())
        for name, noted in issued.items()
        if name not in named and _HASH.fullmatch(name)
        for state, words in [_described(config, place, name, noted)]
    ]
    for _, line in sorted(lines):
        click.echo(line)


def _described(config: Config, place: str, name: str, noted: bytes) -> tuple[str, str]:
    """Return the state of an entry of the table, and its words."""
    from gateway.keys.issued import in_words, nobody_of, read_entry

    try:
        tenant, key = read_entry(name.encode(), noted)
    except ValueError:
        return "unknown", noted.decode("utf-8", "replace")
    if not tenant:
        return "revoked", ""
    return place if nobody_of(config, tenant, key) is None else "unknown", in_words(tenant, key)


def _mapping(text: str) -> dict[str, object]:
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


def _needed(path: Path | None) -> Path:
    if path is None:
        raise click.UsageError("give -c FILE: the config says where the gateway's keys are")
    return path


def _in_table(config: Config, path: Path, do: Callable[[KeyTable], Awaitable[Found]]) -> Found:
    if not config.issues_keys:
        raise Failed(
            f"fairgate: {path} has neither `usage:` nor `state: redis://...`: its keys stand in the file, under "
            "`tenants`"
        )
    from gateway.storage.store_errors import StoreError, StoreUnavailable

    async def done() -> Found:
        async with _table_of(config) as table:
            return await do(table)

    try:
        return asyncio.run(done())
    except StoreError as error:
        raise Failed(f"fairgate: {error}", 1 if isinstance(error, StoreUnavailable) else BAD_INPUT) from None


@asynccontextmanager
async def _table_of(config: Config) -> AsyncIterator[KeyTable]:
    """Open the table in which this config's gateways look for keys."""
    if (url := config.state.redis_url) is not None:
        from gateway.keys.in_redis import RedisKeys
        from gateway.storage.redis.redis_store import RedisStore

        store = RedisStore(url)
        try:
            await store.open()
            yield RedisKeys(store)
        finally:
            await store.close()
    elif config.usage is not None:
        from gateway.keys.in_database import DatabaseKeys
        from gateway.usage.thread import CLOSE_S, DatabaseThread

        database = DatabaseThread(config.usage)
        try:
            yield DatabaseKeys(database)
        finally:
            await database.close(CLOSE_S)
