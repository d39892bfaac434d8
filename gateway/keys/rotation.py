"""What takes the place of a key? A new one on the same terms, and the old one ends: at once, or after a while."""

from __future__ import annotations

import re
from datetime import UTC, datetime

from pydantic import ValidationError

from gateway.config.model import Config
from gateway.config.sections.keys import KeyConfig
from gateway.keys.issued import REVOKED, KeyTable, entry, read_entry, unfit

_GRACE = re.compile(r"([0-9]{1,5})([smhd])")


class CannotRotate(ValueError):
    """The message says why the key stays as it is, and what to do."""


def seconds_of(grace: str) -> int:
    """A time such as 30m, 24h or 7d, in seconds. CannotRotate: it is none."""
    if (found := _GRACE.fullmatch(grace)) is None:
        raise CannotRotate(f"{grace[:20]!r} is no time to go on: write 0s, 30m, 24h or 7d")
    return int(found[1]) * {"s": 1, "m": 60, "h": 3600, "d": 86_400}[found[2]]


def moment(unix_s: float) -> str:
    """A time as keys have it, by UTC, to the second."""
    return f"{datetime.fromtimestamp(int(unix_s), UTC):%Y-%m-%dT%H:%M:%SZ}"


async def rotate(
    table: KeyTable, config: Config, old_hash: str, new_hash: str, *, unix_s: float, grace_s: int, expires: str | None
) -> tuple[str, KeyConfig]:
    """Note the new key in place of the old one, in one step. Whose it is, and its terms: those of the old key, but for
    `expires` where that is given. The old one is taken for `grace_s` more, or until it expires, if that is sooner.
    Raises CannotRotate, and what `KeyTable` does."""
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
    """Whose is the key, on which terms, and is it the config that says so?"""
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
