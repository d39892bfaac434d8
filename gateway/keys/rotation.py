"""Rotation of a key: a new key on the terms of the old one, which ends at once or after a while."""

from __future__ import annotations

import re
from datetime import UTC, datetime

from pydantic import ValidationError

from gateway.config.model import Config
from gateway.config.sections.keys import KeyConfig
from gateway.keys.issued import REVOKED, KeyTable, entry, read_entry, unfit

_GRACE = re.compile(r"([0-9]{1,5})([smhd])")


class CannotRotate(ValueError):
    """A rotation that is not possible. The message says why, and what to do."""


def seconds_of(grace: str) -> int:
    """Parse a time such as 30m, 24h or 7d to seconds. Raise CannotRotate."""
    if (found := _GRACE.fullmatch(grace)) is None:
        raise CannotRotate(f"{grace[:20]!r} is no time to go on: write 0s, 30m, 24h or 7d")
    return int(found[1]) * {"s": 1, "m": 60, "h": 3600, "d": 86_400}[found[2]]


def moment(unix_s: float) -> str:
    """Return a time in the form of `expires` and `created`, in UTC, to the second."""
    return f"{datetime.fromtimestamp(int(unix_s), UTC):%Y-%m-%dT%H:%M:%SZ}"


async def rotate(
    table: KeyTable, config: Config, old_hash: str, new_hash: str, *, unix_s: float, grace_s: int, expires: str | None
) -> tuple[str, KeyConfig]:
    """Replace the old key by the new one in one step, and return the tenant and the new key.

    The new key has the terms of the old one, but for `expires` if that is given. The old key is accepted for `grace_s`
    more, or until it expires, if that is sooner. Raise CannotRotate, and what `KeyTable` raises.
    """
    tenant, old, is_named = await _present(table, config, old_hash)
    if is_named and grace_s:
        raise CannotRotate(
            "the config names this key, so its last day stands there: give it `expires`, or rotate at once"
        )
    changed = {"hash": new_hash, "created": moment(unix_s), **({} if expires is None else {"expires": expires})}
    if old.quota is not None:
        changed["counted_as"] = old.counted_as or old.hash
    try:
        new = KeyConfig.model_validate({**old.model_dump(exclude_unset=True), **changed})
    except ValidationError as error:
        [first, *_] = error.errors(include_url=False)
        raise CannotRotate(f"{first['loc'][0]}: {first['msg']}") from None
    if new.expires_s <= unix_s:
        raise CannotRotate(f"it would have expired ({new.expires}): give the new key another day")
    if (found := unfit(config, new, unix_s)) is not None:
        raise CannotRotate(f"{found[0]}: {found[1]}")
    left: str | None = REVOKED if is_named else None
    if grace_s:
        ends_s = min(old.expires_s, unix_s + grace_s)
        left = entry(tenant, old.model_copy(update={"expires": moment(ends_s)}))
    await table.note({new_hash: entry(tenant, new), old_hash: left})
    return tenant, new


async def _present(table: KeyTable, config: Config, key_hash: str) -> tuple[str, KeyConfig, bool]:
    """Return the tenant of the key, its terms, and whether the config names it. Raise CannotRotate."""
    noted = await table.entry(key_hash)
    if noted == REVOKED.encode():
        raise CannotRotate("this key is revoked: make a new one")
    for tenant in config.tenants:
        for key in tenant.keys:
            if key.hash == key_hash:
                return tenant.name, key, True
    if noted is None:
        raise CannotRotate("no such key: it is neither in the table of keys nor in the config")
    try:
        return *read_entry(key_hash.encode(), noted), False
    except ValueError:
        raise CannotRotate("its entry cannot be read: revoke it, and make a new one") from None
