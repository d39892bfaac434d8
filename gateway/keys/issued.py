"""Which keys were made and revoked while the gateway ran? A table of hashes, in Redis or in the database of usage."""

from __future__ import annotations

import asyncio
import json
import logging
import re
import time
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Collection, Mapping
from typing import Annotated

import msgspec
from pydantic_core import PydanticCustomError

from gateway.config.checks import checked_name
from gateway.config.model import Config
from gateway.config.section import can_wait
from gateway.config.sections.keys import KeyConfig
from gateway.keys.identity import Keyring, Principal
from gateway.storage.store_errors import StoreError, StoreUnavailable

logger = logging.getLogger("fairgate")

KEYS_MAX = 100_000
ENTRIES_READ_MAX = 2 * KEYS_MAX
"""fairgate writes no more than `KEYS_MAX`, but others can write to the table, and every entry read is kept in memory.
Twice as many, since a scan may show an entry again while Redis makes room for more."""
POLL_S = 0.5
CLOSE_S = 1.0
USED_MAX = 10**10
"""Seconds since the epoch, for some centuries; others can write there, too."""
USES_S = 30.0
"""How often it is noted when keys were last used."""
REVOKED = ""
"""The entry of a key that nobody may use any more."""
_HASH = re.compile(rb"sha256:[0-9a-f]{64}")


class TableFull(StoreError):
    """No more keys can be noted."""


NAMES_MAX = 1000
"""Of apps, and of models, of one key (`KeyConfig`); of more each would be a fault of its own."""
NAMED_MAX = 20
"""In one message."""
_Names = Annotated[tuple[str, ...], msgspec.Meta(max_length=NAMES_MAX)]
_PerModel = Annotated[dict[str, dict[str, int]], msgspec.Meta(max_length=NAMES_MAX)]


class _Entry(msgspec.Struct, omit_defaults=True):
    tenant: str
    expires: str | None = None
    apps: _Names | None = None
    models: _Names | None = None
    weight: float | None = None
    label: str | None = None
    created: str | None = None
    can_wait: bool = False
    quota: dict[str, int | _PerModel] | None = None
    counted_as: str | None = None


_TERMS = ("expires", "apps", "models", "weight", "label", "created", "quota", "counted_as")
_encode = msgspec.json.Encoder().encode
_decode = msgspec.json.Decoder(_Entry).decode


def entry(tenant: str, key: KeyConfig) -> str:
    """What is noted of a key: whose it is and, if that is not all, on which terms."""
    terms = key.model_dump(include={*_TERMS}, exclude_unset=True, exclude_none=True)
    return _encode(_Entry(tenant, **terms, can_wait=can_wait(key))).decode()


def read_entry(key_hash: bytes, noted: bytes) -> tuple[str, KeyConfig]:
    """The tenant, empty if the key is revoked, and the key. ValueError: it is no such entry."""
    if not noted:
        return "", KeyConfig(hash=key_hash.decode())
    try:
        found = _decode(noted)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None
    if not found.tenant:
        raise ValueError("it names no tenant")
    terms = {name: getattr(found, name) for name in _TERMS}
    present = {name: value for name, value in terms.items() if value is not None}
    if found.can_wait:
        present["class"] = "batch"
    return found.tenant, KeyConfig.model_validate({"hash": key_hash.decode(), **present})


def nobody_of(config: Config, tenant: str, key: KeyConfig) -> str | None:
    """Why would no gateway of this config take a key of this tenant? None: it would."""
    try:
        checked_name(tenant)
    except PydanticCustomError:
        return "can have no tenant whose name is not 1 to 128 characters without spaces"
    if key.weight is None and tenant not in [each.name for each in config.tenants]:
        return f"has no tenant named {tenant!r}, and the key brings no weight"
    return None


def unfit(
    config: Config, key: KeyConfig, unix_s: float, models: Collection[str] | None = None
) -> tuple[str, str] | None:
    """Which term of a new key can never be of use, and why? None: none. `models`: the models served now; None: the
    models that the config names, where every pool names its models. Apps are known where the config has `apps`."""
    if key.expires_s <= unix_s:
        return "expires", f"{key.expires} is past"
    if models is None and all(pool.models for pool in config.pools):
        models = [*(model for pool in config.pools for model in pool.models), *config.aliases]
    engines = [model for model in models or () if model not in config.aliases]
    terms = [("models", model, models) for model in key.models or ()]
    terms += [("quota", model, engines) for model in (key.quota.per_model if key.quota is not None else ())]
    for term, model, served in terms:
        if served and model not in served:
            known = ", ".join(sorted(served)[:NAMED_MAX])
            return (
                term,
                f"no pool serves {model!r}; there are: {known}. Name a new one under `models` of its pool first",
            )
    of_keys = (app for tenant in config.tenants for each in tenant.keys for app in each.apps)
    apps = {"default", *(app.name for app in config.apps), *of_keys}
    for app in key.apps:
        if config.apps and app not in apps:
            known = ", ".join(sorted(apps)[:NAMED_MAX])
            return "apps", f"the config has no app {app!r} under `apps`; there are: {known}. Name a new one there first"
    return None


def in_words(tenant: str, key: KeyConfig) -> str:
    """The same for people to read."""
    words = [tenant]
    if key.expires is not None:
        words.append(f"until={key.expires}")
    if key.apps != KeyConfig.model_fields["apps"].default:
        words.append(f"apps={','.join(key.apps)}")
    if key.models is not None:
        words.append(f"models={','.join(key.models)}")
    if key.weight is not None:
        words.append(f"weight={key.weight:g}")
    if can_wait(key):
        words.append("class=batch")
    if key.quota is not None:
        words.append(f"quota={key.quota.model_dump_json(exclude_unset=True, exclude_none=True)}")
    if key.label is not None:
        words.append(f"label={json.dumps(key.label, ensure_ascii=False)}")
    if key.created is not None:
        words.append(f"created={key.created}")
    return " ".join(words)


class KeyTable(ABC):
    """Hash of a key, as the config writes it, to its entry; and when it was last used. All raise StoreUnavailable."""

    place: str
    """redis or database: where the table is."""

    @abstractmethod
    async def changed(self) -> bytes | None:
        """A mark that is another one after every change. None: nothing was ever noted."""

    @abstractmethod
    async def entry(self, key_hash: str) -> bytes | None:
        """What is noted of it. None: it is not in the table."""

    @abstractmethod
    def entries(self) -> AsyncIterator[tuple[bytes, bytes]]:
        """All of it, some at a time; what changes meanwhile may be missed. Not beyond `ENTRIES_READ_MAX`."""

    @abstractmethod
    async def note(self, changes: Mapping[str, str | None]) -> None:
        """These are the entries of these keys from now on (None: they have none), in one step. Raises TableFull."""

    @abstractmethod
    async def note_uses(self, uses: Mapping[str, int]) -> None:
        """The keys were last used then, in seconds since the epoch."""

    @abstractmethod
    async def uses(self) -> dict[str, int]:
        """When keys were last used, as far as that is known, in seconds since the epoch."""

    async def issue(self, key: KeyConfig, tenant: str) -> None:
        """The key is the tenant's, at every replica within a second. Raises TableFull."""
        await self.note({key.hash: entry(tenant, key)})

    async def revoke(self, key_hash: str) -> None:
        """Nobody takes the key any more, also if the config names it. Raises TableFull."""
        await self.note({key_hash: REVOKED})

    async def forget(self, key_hash: str) -> None:
        """The key is in the table no longer; it is as if it had not been issued or revoked."""
        await self.note({key_hash: None})


async def take_back(table: KeyTable, key_hash: str, *, is_named: bool) -> bool:
    """Nobody takes the key any more, also if the config names it. False, and nothing has changed: neither the table nor
    the config knows it. A table that was never written may be one that vanished: there it is noted all the same.
    Raises what `KeyTable` does."""
    if is_named or (_HASH.fullmatch(key_hash.encode()) and await table.changed() is None):
        await table.revoke(key_hash)
        return True
    if await table.entry(key_hash) is None:
        return False
    await table.forget(key_hash)
    return True


class Follower:
    """Lets the keyring know what the table says, within a second of every change, one `turn` after another.

    While the table cannot be asked, what was last known holds; also if it has vanished.
    """

    def __init__(self, table: KeyTable, keyring: Keyring) -> None:
        self._table = table
        self._keyring = keyring
        self._known: bytes | None = None
        self._revision = keyring.revision
        self.has_read = False
        """Does the keyring know what the table has said once?"""
        self._uses: dict[str, int] = {}
        """Uses of keys that are not written to the database yet."""
        self._noted_s = time.monotonic()
        self._looked_s = time.time()
        """Until when expired keys are in the log."""

    async def turn(self) -> None:
        table, keyring = self._table, self._keyring
        changed, revision = await table.changed(), keyring.revision
        if changed is None and self._known is not None:
            raise StoreUnavailable(
                f"the table of keys has vanished from the {table.place}: the keys known so far hold until it is "
                "written again"
            )
        if changed != self._known or self._revision != revision:
            await _learn(table, keyring, logs=self.has_read)
            self._revision = revision
            # One more time if it changed meanwhile: nobody knows what of that was seen.
            self._known = changed if changed == await table.changed() else b""
        self.has_read = True
        if time.monotonic() - self._noted_s >= USES_S:
            before_s, self._looked_s = self._looked_s, time.time()
            keyring.log_expired(before_s, self._looked_s)
            await self.note_uses()
        await asyncio.sleep(POLL_S)

    async def close(self) -> None:
        """Note the last uses, if that can be done soon."""
        try:
            async with asyncio.timeout(CLOSE_S):
                await self.note_uses()
        except (StoreError, TimeoutError) as error:
            logger.warning("when keys were last used is not noted: %s", error)

    async def note_uses(self) -> None:
        """Note when keys were last used, as far as that is not noted."""
        self._noted_s = time.monotonic()
        self._uses.update((f"sha256:{digest.hex()}", int(at_s)) for digest, at_s in self._keyring.take_uses().items())
        if self._uses:
            await self._table.note_uses(self._uses)
            self._uses = {}


def log_left_out(where: str) -> None:
    """A table is not read to its end."""
    logger.warning(
        "the table of keys (%s) is not read beyond %d entries: keys whose entries come later are not taken",
        where, ENTRIES_READ_MAX,
    )  # fmt: skip


async def _learn(table: KeyTable, keyring: Keyring, *, logs: bool) -> None:
    issued: dict[bytes, Principal] = {}
    revoked: set[bytes] = set()
    ignored: list[str] = []
    read = 0
    async for key_hash, noted in table.entries():
        read += 1
        if not _HASH.fullmatch(key_hash):
            ignored.append("one whose name is not the hash of a key")
            continue
        try:
            tenant, key = read_entry(key_hash, noted)
            holder = keyring.holder(tenant, key) if tenant else None
        except ValueError:
            ignored.append(f"{key_hash[:16].decode()}... whose entry cannot be read")
            continue
        if not tenant:
            revoked.add(_digest(key_hash))
        elif holder is None:
            ignored.append(f"{key_hash[:16].decode()}... of a tenant that this config does not have")
        else:
            issued[_digest(key_hash)] = holder
    if ignored:
        logger.warning("%d entries of the table of keys (%s) are ignored: %s", len(ignored), table.place, ignored[0])
    if read >= ENTRIES_READ_MAX:
        # What was not read may revoke a key that the config names, which would be taken otherwise.
        for digest in keyring.named():
            if digest not in revoked and await table.entry(f"sha256:{digest.hex()}") == REVOKED.encode():
                revoked.add(digest)
    keyring.learn(issued, revoked, logs=logs)


def _digest(key_hash: bytes) -> bytes:
    return bytes.fromhex(key_hash.removeprefix(b"sha256:").decode())
