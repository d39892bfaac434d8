"""Which keys were made and revoked while the gateway ran? A table of hashes, in Redis or in the database of usage."""

from __future__ import annotations

import asyncio
import logging
import re
from collections.abc import AsyncIterator
from typing import Annotated, Protocol

import msgspec
from pydantic_core import PydanticCustomError

from gateway.config.fields import checked_name
from gateway.config.keys import KeyConfig
from gateway.config.model import Config
from gateway.redis.errors import StoreError, StoreRefused, StoreUnavailable
from gateway.request.identity import Keyring, Principal

__all__ = [
    "ENTRIES_READ_MAX",
    "KEYS_MAX",
    "REVOKED",
    "KeyTable",
    "TableFull",
    "entry",
    "follow",
    "in_words",
    "nobody_of",
    "read_entry",
]

logger = logging.getLogger("fairgate")

KEYS_MAX = 100_000
ENTRIES_READ_MAX = 2 * KEYS_MAX
"""fairgate writes no more than `KEYS_MAX`, but whoever else can write to the Redis may, and every entry read is kept in
memory. Twice as many, since a scan may show an entry again while Redis makes room for more."""
POLL_S = 0.5
REVOKED = ""
"""The entry of a key that nobody may use any more."""
_HASH = re.compile(rb"sha256:[0-9a-f]{64}")


class TableFull(StoreError):
    """No more keys can be noted."""


NAMES_MAX = 1000
"""Of apps, and of models, of one key (`KeyConfig`); of more each would be a fault of its own."""
_Names = Annotated[tuple[str, ...], msgspec.Meta(max_length=NAMES_MAX)]


class _Entry(msgspec.Struct, omit_defaults=True):
    tenant: str
    expires: str | None = None
    apps: _Names | None = None
    models: _Names | None = None
    weight: float | None = None


_encode = msgspec.json.Encoder().encode
_decode = msgspec.json.Decoder(_Entry).decode


def entry(tenant: str, key: KeyConfig) -> str:
    """What is noted of a key: whose it is and, if that is not all, until when, for what, and with which weight."""
    apps = key.apps if "apps" in key.model_fields_set else None
    return _encode(_Entry(tenant, key.expires, apps, key.models, key.weight)).decode()


def read_entry(key_hash: bytes, noted: bytes) -> tuple[str, KeyConfig]:
    """The tenant, empty if the key is revoked, and the key. ValueError: it is no such entry."""
    if not noted:
        return "", KeyConfig(hash=key_hash.decode())
    try:
        found = _decode(noted) if noted.startswith(b"{") else _in_old_words(noted.decode())
    except RecursionError:
        raise ValueError("it is nested too deeply") from None
    if not found.tenant:
        raise ValueError("it names no tenant")
    terms = {name: getattr(found, name) for name in ("expires", "apps", "models", "weight")}
    given = {name: value for name, value in terms.items() if value is not None}
    return found.tenant, KeyConfig.model_validate({"hash": key_hash.decode(), **given})


def _in_old_words(noted: str) -> _Entry:
    """As fairgate wrote it before it knew of apps and weights: tenant, expiry (-: none) and models."""
    tenant, *words = noted.split(" ", NAMES_MAX + 1)  # of more the last has spaces, which no name has
    expires = words[0] if words and words[0] != "-" else None
    return _Entry(tenant, expires, None, tuple(words[1:]) or None)


def nobody_of(config: Config, tenant: str, key: KeyConfig) -> str | None:
    """Why would no gateway of this config take a key of this tenant? None: it would."""
    try:
        checked_name(tenant)
    except PydanticCustomError:
        return "can have no tenant whose name is not 1 to 128 characters without spaces"
    if key.weight is None and tenant not in [each.name for each in config.tenants]:
        return f"has no tenant named {tenant!r}, and the key brings no weight"
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
    return " ".join(words)


class KeyTable(Protocol):
    """Hash of a key, as the config writes it, to its entry. All raise StoreUnavailable."""

    place: str
    """redis or database: where the table is."""

    async def changed(self) -> bytes | None:
        """A mark that is another one after every change. None: nothing was ever noted."""

    async def entry(self, key_hash: str) -> bytes | None:
        """What is noted of it. None: it is not in the table."""

    def entries(self) -> AsyncIterator[tuple[bytes, bytes]]:
        """All of it, some at a time; what changes meanwhile may be missed. A Redis is not read beyond
        `ENTRIES_READ_MAX`."""

    async def issue(self, key: KeyConfig, tenant: str) -> None:
        """The key is the tenant's, at every replica within a second. Raises TableFull."""

    async def revoke(self, key_hash: str) -> None:
        """Nobody takes the key any more, also if the config names it. Raises TableFull."""

    async def forget(self, key_hash: str) -> None:
        """The key is in the table no longer; it is as if it had not been issued or revoked."""


async def follow(table: KeyTable, keyring: Keyring) -> None:
    """Let the keyring know what the table says, within a second of every change, until cancelled.

    While the table cannot be asked, what was last known holds; also if it has vanished.
    """
    known: bytes | None = None
    revision = keyring.revision
    vanished = False
    while True:
        try:
            changed = await table.changed()
            if changed is None and known is not None:
                if not vanished:
                    logger.warning(
                        "the table of keys has vanished from the %s: the keys known so far hold", table.place
                    )
                vanished = True
            elif changed != known or revision != keyring.revision:
                revision = keyring.revision
                await _learn(table, keyring)
                vanished = False
                # One more time if it changed meanwhile: nobody knows what of that was seen.
                known = changed if changed == await table.changed() else b""
        except (StoreUnavailable, StoreRefused):
            pass  # whoever keeps the connection has said so
        await asyncio.sleep(POLL_S)


async def _learn(table: KeyTable, keyring: Keyring) -> None:
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
    keyring.learn(issued, revoked)


def _digest(key_hash: bytes) -> bytes:
    return bytes.fromhex(key_hash.removeprefix(b"sha256:").decode())
