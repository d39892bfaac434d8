"""Keys are made, listed, rotated and revoked here, for `fairgate keys`."""

from __future__ import annotations

import re
import time
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from typing import Any

from pydantic import ValidationError

from gateway.config.checks import is_name
from gateway.config.model import Config
from gateway.config.sections.keys import KeyConfig, hash_key, new_key
from gateway.keys.issued import REVOKED, KeyTable, entry, read_entry

NAMED_MAX = 20
"""Limit on the names in one message."""
_GRACE = re.compile(r"([0-9]{1,5})([smhd])")
_HASH = re.compile(r"sha256:[0-9a-f]{64}")


class KeyRefused(ValueError):
    """A change of keys that is not possible. The message names the term at fault, says why, and what to do."""


def seconds_of(grace: str) -> int:
    """Parse a time such as 30m, 24h or 7d to seconds. Raise KeyRefused."""
    if (found := _GRACE.fullmatch(grace)) is None:
        raise KeyRefused(f"{grace[:20]!r} is no time to go on: write 0s, 30m, 24h or 7d")
    return int(found[1]) * {"s": 1, "m": 60, "h": 3600, "d": 86_400}[found[2]]


def moment(unix_s: float) -> str:
    """Return a time in the form of `expires` and `created`, in UTC, to the second."""
    return f"{datetime.fromtimestamp(int(unix_s), UTC):%Y-%m-%dT%H:%M:%SZ}"


def _checked(terms: Mapping[str, Any]) -> KeyConfig:
    """Return the key with these terms. Raise KeyRefused."""
    try:
        return KeyConfig.model_validate(terms)
    except ValidationError as error:
        [first, *_] = error.errors(include_url=False)
        term = ".".join(name for name in first["loc"] if isinstance(name, str))
        raise KeyRefused(f"{term}: {first['msg']}") from None


CreatedKey = tuple[str, str, KeyConfig]
"""A tenant, its new key, and the terms of the key."""


def make_keys(config: Config, tenants: Sequence[str], terms: Mapping[str, Any]) -> list[CreatedKey]:
    """Make a key on these terms for each tenant. Raise KeyRefused."""
    unix_s, made = time.time(), list[CreatedKey]()
    for tenant in tenants:
        text = new_key()
        key = _checked({"hash": hash_key(text), "created": moment(unix_s), **terms})
        if (why := _nobody_of(config, tenant, key)) is not None:
            raise KeyRefused(f"tenant: the config {why}")
        _check_use(config, key, unix_s)
        made.append((tenant, text, key))
    return made


async def issue(table: KeyTable, made: Sequence[CreatedKey]) -> None:
    """Note keys in one step: every replica accepts them within a second. Raise what `KeyTable.note` raises."""
    await table.note({key.hash: entry(tenant, key) for tenant, _, key in made})


async def rotate(
    table: KeyTable, config: Config, old_hash: str, new_hash: str, *, unix_s: float, grace_s: int, expires: str | None
) -> tuple[str, KeyConfig]:
    """Replace the old key by the new one in one step, and return the tenant and the new key.

    The new key has the terms of the old one, but for `expires` if that is given. The old key is accepted for `grace_s`
    more, or until it expires, if that is sooner. Raise KeyRefused, and what `KeyTable` raises.
    """
    tenant, old, is_named = await _find_key(table, config, old_hash)
    if is_named and grace_s:
        advice = "give it `expires`, or rotate at once"
        raise KeyRefused(f"the config names this key, so its last day stands there: {advice}")
    changed = {"hash": new_hash, "created": moment(unix_s), **({} if expires is None else {"expires": expires})}
    if old.quota is not None:
        changed["counted_as"] = old.counted_as or old.hash
    new = _checked({**old.model_dump(exclude_unset=True), **changed})
    _check_use(config, new, unix_s)
    left: str | None = REVOKED if is_named else None
    if grace_s:
        ends_s = min(old.expires_s, unix_s + grace_s)
        left = entry(tenant, old.model_copy(update={"expires": moment(ends_s)}))
    await table.note({new_hash: entry(tenant, new), old_hash: left})
    return tenant, new


async def revoke(table: KeyTable, config: Config, key_hash: str) -> str:
    """Revoke a key, and return a remark for the operator; empty if there is none. Raise as `rotate` does.

    A table that was never written may be one that vanished, so a key is noted there as revoked though the table does
    not have it.
    """
    is_named, was_empty = key_hash in named_keys(config), await table.change_mark() is None
    if is_named or (was_empty and _HASH.fullmatch(key_hash)):
        await table.note({key_hash: REVOKED})
    elif await table.entry(key_hash) is None:
        raise KeyRefused(f"{key_hash[:100]} is neither in the table of keys nor in the config: nothing is revoked")
    else:
        await table.note({key_hash: None})
    if is_named:
        return f"the config still names it, so it would return with another {table.place}"
    return "the table of keys was empty: gateways stop to take whatever they know from an earlier one" * was_empty


async def list_keys(table: KeyTable, config: Config) -> list[dict[str, Any]]:
    """Return all keys, those of the config first, each with its terms and its origin (`from`)."""
    noted = {name.decode("utf-8", "replace"): value async for name, value in table.entries()}

    def described(tenant: str, key: KeyConfig, place: str, *, is_revoked: bool) -> dict[str, Any]:
        terms = key.model_dump(mode="json", exclude_none=True)
        return {"tenant": tenant, **terms, "from": place, "revoked": is_revoked}

    found = [
        described(tenant.name, key, "config", is_revoked=noted.pop(key.hash, None) == REVOKED.encode())
        for tenant in config.tenants
        for key in tenant.keys
    ]
    for name, value in noted.items():
        try:
            tenant, key = read_entry(name.encode(), value)
        except ValueError:
            continue  # the follower of the table says so in the log
        is_taken = not tenant or _nobody_of(config, tenant, key) is None
        found.append(described(tenant, key, table.place if is_taken else "unknown", is_revoked=not tenant))
    return found


def named_keys(config: Config) -> dict[str, tuple[str, KeyConfig]]:
    """Return the tenant and the terms of each key that the config names, by the hash."""
    return {key.hash: (tenant.name, key) for tenant in config.tenants for key in tenant.keys}


async def _find_key(table: KeyTable, config: Config, key_hash: str) -> tuple[str, KeyConfig, bool]:
    """Return the tenant of the key, its terms, and whether the config names it. Raise KeyRefused."""
    noted, of_config = await table.entry(key_hash), named_keys(config).get(key_hash)
    if noted == REVOKED.encode():
        raise KeyRefused("this key is revoked: make a new one")
    if of_config is not None:
        return *of_config, True
    if noted is None:
        raise KeyRefused("no such key: it is neither in the table of keys nor in the config")
    try:
        return *read_entry(key_hash.encode(), noted), False
    except ValueError:
        raise KeyRefused("its entry cannot be read: revoke it, and make a new one") from None


def _nobody_of(config: Config, tenant: str, key: KeyConfig) -> str | None:
    """Return why no gateway of this config would accept a key of this tenant; None if they would."""
    if not is_name(tenant):
        return "can have no tenant whose name is not 1 to 128 characters without spaces"
    if key.weight is None and tenant not in [each.name for each in config.tenants]:
        return f"has no tenant named {tenant!r}, and the key brings no weight"
    return None


def _check_use(config: Config, key: KeyConfig, unix_s: float) -> None:
    """Raise KeyRefused if a term of a new key can never be of use.

    Models are checked if every pool names its models, and apps if the config has `apps`.
    """
    if key.expires_s <= unix_s:
        raise KeyRefused(f"expires: {key.expires} is past")
    are_known = all(pool.models for pool in config.pools)
    engines = [model for pool in config.pools for model in pool.models] if are_known else []
    terms = [("models", model, [*engines, *config.aliases] if engines else []) for model in key.models or ()]
    terms += [("quota", model, engines) for model in (key.quota.per_model if key.quota is not None else ())]
    for term, model, served in terms:
        if served and model not in served:
            known = ", ".join(sorted(served)[:NAMED_MAX])
            advice = "Name a new one under `models` of its pool first"
            raise KeyRefused(f"{term}: no pool serves {model!r}; there are: {known}. {advice}")
    of_keys = (app for _, each in named_keys(config).values() for app in each.apps)
    apps = {"default", *(app.name for app in config.apps), *of_keys}
    for app in key.apps:
        if config.apps and app not in apps:
            known = ", ".join(sorted(apps)[:NAMED_MAX])
            what = f"the config has no app {app!r} under `apps`; there are: {known}. Name a new one there first"
            raise KeyRefused(f"apps: {what}")
