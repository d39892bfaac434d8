"""Which keys were made and revoked while the gateway ran? A table of hashes in Redis, which every replica follows."""

from __future__ import annotations

import asyncio
import logging
import re
from collections.abc import AsyncIterator

from gateway.config.keys import KeyConfig
from gateway.redis.errors import StoreError, StoreUnavailable
from gateway.redis.store import Script, Store
from gateway.request.identity import Keyring, Principal

__all__ = ["KeyTable", "TableFull", "entry", "follow", "read_entry"]

logger = logging.getLogger("fairgate")

TABLE = "fairgate:1:keys"
CHANGED = "changed"
KEYS_MAX = 100_000
SCAN_COUNT = 250
POLL_S = 0.5
_SCRIPT = Script("keys.lua")
_HASH = re.compile(rb"sha256:[0-9a-f]{64}")


class TableFull(StoreError):
    """No more keys can be noted."""


def entry(tenant: str, key: KeyConfig) -> str:
    """What is noted of a key: its tenant, and if that is not all, until when (-: for ever), and for which models."""
    words = [tenant, key.expires or "-", *(key.models or ())]
    return tenant if words[1:] == ["-"] and not key.models else " ".join(words)


def read_entry(key_hash: bytes, noted: bytes) -> tuple[str, KeyConfig]:
    """The tenant, empty if the key is revoked, and the key. ValueError: it is no such entry."""
    tenant, *words = noted.decode().split(" ")
    expires = words[0] if words and words[0] != "-" else None
    return tenant, KeyConfig(hash=key_hash.decode(), expires=expires, models=tuple(words[1:]) or None)


class KeyTable:
    """Hash of a key, as the config writes it, to its entry; an empty one if the key is revoked."""

    def __init__(self, store: Store) -> None:
        self._store = store

    async def changed(self) -> bytes | None:
        """A mark that is another one after every change. None: nothing was ever noted."""
        found: bytes | None = await self._store.command("HGET", TABLE, CHANGED)
        return found

    async def entry(self, key_hash: str) -> str | None:
        """What is noted of it. None: it is not in the table."""
        found: bytes | None = await self._store.command("HGET", TABLE, key_hash)
        return None if found is None else found.decode("utf-8", "replace")

    async def entries(self) -> AsyncIterator[tuple[bytes, bytes]]:
        """All of it, some at a time; what changes meanwhile may be missed."""
        cursor = b"0"
        while True:
            cursor, found = await self._store.command("HSCAN", TABLE, cursor, "COUNT", SCAN_COUNT)
            for key_hash, noted in zip(found[::2], found[1::2], strict=True):
                if key_hash != CHANGED.encode():
                    yield key_hash, noted
            if cursor == b"0":
                return

    async def issue(self, key: KeyConfig, tenant: str) -> None:
        """The key is the tenant's, at every replica within a second. Raises TableFull."""
        await self._note("issue", key.hash, entry(tenant, key))

    async def revoke(self, key_hash: str) -> None:
        """Nobody takes the key any more, also if the config names it. Raises TableFull."""
        await self._note("revoke", key_hash)

    async def forget(self, key_hash: str) -> None:
        """The key is in the table no longer; it is as if it had not been issued or revoked."""
        await self._note("forget", key_hash)

    async def _note(self, what: str, key_hash: str, noted: str = "") -> None:
        if await self._store.run(_SCRIPT, [TABLE], [what, key_hash, noted, KEYS_MAX]) == b"full":
            raise TableFull(f"{TABLE} holds {KEYS_MAX} keys already: revoke some that were issued before")


async def follow(table: KeyTable, keyring: Keyring) -> None:
    """Let the keyring know what the table says, within a second of every change, until cancelled.

    While Redis cannot be asked, what was last known holds; also if the table has vanished from it.
    """
    known: bytes | None = None
    revision = keyring.revision
    vanished = False
    while True:
        try:
            changed = await table.changed()
            if changed is None and known is not None:
                if not vanished:
                    logger.warning("the table of keys (%s) has vanished from Redis: the keys known so far hold", TABLE)
                vanished = True
            elif changed != known or revision != keyring.revision:
                revision = keyring.revision
                await _learn(table, keyring)
                vanished = False
                # One more time if it changed meanwhile: nobody knows what of that was seen.
                known = changed if changed == await table.changed() else b""
        except StoreUnavailable:
            pass  # the store has said so
        await asyncio.sleep(POLL_S)


async def _learn(table: KeyTable, keyring: Keyring) -> None:
    issued: dict[bytes, Principal] = {}
    revoked: set[bytes] = set()
    ignored: list[str] = []
    async for key_hash, noted in table.entries():
        if not _HASH.fullmatch(key_hash):
            ignored.append("one whose name is not the hash of a key")
            continue
        try:
            tenant, key = read_entry(key_hash, noted)
        except ValueError:
            ignored.append(f"{key_hash[:16].decode()}... whose entry cannot be read")
            continue
        if not tenant:
            revoked.add(_digest(key_hash))
        elif (holder := keyring.holder(tenant, key)) is None:
            ignored.append(f"{key_hash[:16].decode()}... of a tenant that this config does not have")
        else:
            issued[_digest(key_hash)] = holder
    if ignored:
        logger.warning("%d entries of the table of keys (%s) are ignored: %s", len(ignored), TABLE, ignored[0])
    keyring.learn(issued, revoked)


def _digest(key_hash: bytes) -> bytes:
    return bytes.fromhex(key_hash.removeprefix(b"sha256:").decode())
