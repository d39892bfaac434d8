"""Which keys were issued and revoked while the gateway ran? A table of hashes, in Redis or in the usage database."""

from __future__ import annotations

import asyncio
import logging
import re
from collections.abc import AsyncIterator, Mapping
from typing import Any, Protocol

import msgspec

from gateway.config.sections.keys import KeyConfig
from gateway.keys.identity import Keyring, Principal
from gateway.storage.store_errors import StoreUnavailable

logger = logging.getLogger("fairgate")

KEYS_MAX = 100_000
ENTRIES_READ_MAX = 2 * KEYS_MAX
"""Entries beyond which a table is not read. fairgate writes `KEYS_MAX` at most, but other programs can write to the
table, and every entry is kept in memory. Twice as many, since a scan may show an entry again while Redis enlarges the
table.
"""
POLL_S = 0.5
REVOKED = ""
"""Entry of a revoked key."""
_HASH = re.compile(rb"sha256:[0-9a-f]{64}")


def entry(tenant: str, key: KeyConfig) -> str:
    """Serialize a key: its tenant and any terms that are set."""
    terms = key.model_dump(mode="json", exclude={"hash"}, exclude_unset=True, exclude_none=True)
    return msgspec.json.encode({"tenant": tenant, **terms}).decode()


def read_entry(key_hash: bytes, noted: bytes) -> tuple[str, KeyConfig]:
    """Return the tenant, empty if the key is revoked, and the key. Raise ValueError if the entry is malformed."""
    if not noted:
        return "", KeyConfig(hash=key_hash.decode())
    try:
        terms = msgspec.json.decode(noted, type=dict[str, Any])
    except RecursionError:
        raise ValueError("it is nested too deeply") from None
    tenant = terms.pop("tenant", None)
    if not isinstance(tenant, str) or not tenant:
        raise ValueError("it names no tenant")
    return tenant, KeyConfig.model_validate({**terms, "hash": key_hash.decode()})


class KeyTable(Protocol):
    """A table from the hash of a key to its entry. All methods raise StoreUnavailable."""

    place: str
    """Kind of store that has the table: redis or database."""

    async def change_mark(self) -> bytes | None:
        """Return a mark that differs after every change; None if nothing was ever noted."""

    async def entry(self, key_hash: str) -> bytes | None:
        """Return the entry of a key; None if there is none."""

    def entries(self) -> AsyncIterator[tuple[bytes, bytes]]:
        """Yield all entries. Changes meanwhile may be missed."""

    async def note(self, changes: Mapping[str, str | None]) -> None:
        """Replace entries of keys in one step; None deletes an entry. Raise StoreRefused if the table is full."""


class KeyReader:
    """Reader of the table for the keyring. The reader's repeated `run_once` learns of every change within a second.

    While the table cannot be read, is too long, or has vanished, the keys of the last read hold.
    """

    def __init__(self, table: KeyTable, keyring: Keyring) -> None:
        self._table = table
        self._keyring = keyring
        self._known: bytes | None = None
        self._revision = keyring.revision
        self.has_read = False

    async def run_once(self) -> None:
        table, keyring = self._table, self._keyring
        changed, revision = await table.change_mark(), keyring.revision
        if changed is None and self._known is not None:
            raise StoreUnavailable(
                f"the table of keys has vanished from the {table.place}: the keys known so far hold until it is "
                "written again"
            )
        if changed != self._known or self._revision != revision:
            await _learn(table, keyring, logs=self.has_read)
            self._revision = revision
            # Read again if it changed meanwhile, since the scan may have missed a part of that change.
            self._known = changed if changed == await table.change_mark() else b""
        self.has_read = True
        await asyncio.sleep(POLL_S)


async def _learn(table: KeyTable, keyring: Keyring, *, logs: bool) -> None:
    """Read the table for the keyring. Raise StoreUnavailable if it has more entries than are read."""
    issued: dict[bytes, Principal] = {}
    revoked: set[bytes] = set()
    ignored: list[str] = []
    read = 0
    async for key_hash, noted in table.entries():
        read += 1
        if read > ENTRIES_READ_MAX:
            raise StoreUnavailable(f"the table of keys ({table.place}) has more than {ENTRIES_READ_MAX} entries")
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
            revoked.add(key.digest)
        elif holder is None:
            ignored.append(f"{key_hash[:16].decode()}... of a tenant that this config does not have")
        else:
            issued[key.digest] = holder
    if ignored:
        logger.warning(
            "%d entries of the table of keys (%s) are ignored, such as %s", len(ignored), table.place, ignored[0],
        )  # fmt: skip
    keyring.learn(issued, revoked, logs=logs)
