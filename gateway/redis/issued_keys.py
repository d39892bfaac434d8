"""The keys that were made and revoked while the gateway ran, as a table in Redis."""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator

from gateway.config.keys import KeyConfig
from gateway.keys.issued import ENTRIES_READ_MAX, KEYS_MAX, TableFull, entry
from gateway.redis.store import RedisStore, Script

__all__ = ["CHANGED", "TABLE", "RedisKeys"]

logger = logging.getLogger("fairgate")

TABLE = "fairgate:1:keys"
CHANGED = "changed"
SCAN_COUNT = 250
_SCRIPT = Script("keys.lua")


class RedisKeys:
    """A `KeyTable`. Every entry is a field of one hash; the entry of a revoked key is empty."""

    place = "redis"

    def __init__(self, store: RedisStore) -> None:
        self._store = store
        self._has_left_out = False

    async def changed(self) -> bytes | None:
        found: bytes | None = self._store.shaped(bytes | None, await self._store.command("HGET", TABLE, CHANGED))
        return found

    async def entry(self, key_hash: str) -> bytes | None:
        found: bytes | None = self._store.shaped(bytes | None, await self._store.command("HGET", TABLE, key_hash))
        return found

    async def entries(self) -> AsyncIterator[tuple[bytes, bytes]]:
        cursor, read = b"0", 0
        while True:
            answer = await self._store.command("HSCAN", TABLE, cursor, "COUNT", SCAN_COUNT)
            cursor, found = self._store.shaped(tuple[bytes, list[bytes]], answer)
            for key_hash, noted in zip(found[::2], found[1::2], strict=False):
                if key_hash == CHANGED.encode():
                    continue
                if read == ENTRIES_READ_MAX:
                    self._leave_out()
                    return
                read += 1
                yield key_hash, noted
            if cursor == b"0":
                return

    def _leave_out(self) -> None:
        if self._has_left_out:
            return
        self._has_left_out = True
        logger.warning(
            "the table of keys (%s %s) is not read beyond %d entries: keys whose entries come later are not taken",
            self.place, TABLE, ENTRIES_READ_MAX,
        )  # fmt: skip

    async def issue(self, key: KeyConfig, tenant: str) -> None:
        await self._note("issue", key.hash, entry(tenant, key))

    async def revoke(self, key_hash: str) -> None:
        await self._note("revoke", key_hash)

    async def forget(self, key_hash: str) -> None:
        await self._note("forget", key_hash)

    async def _note(self, what: str, key_hash: str, noted: str = "") -> None:
        if await self._store.run(_SCRIPT, [TABLE], [what, key_hash, noted, KEYS_MAX]) == b"full":
            raise TableFull(f"{TABLE} holds {KEYS_MAX} keys already: revoke some that were issued before")
