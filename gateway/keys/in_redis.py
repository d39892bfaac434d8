"""Table of the keys that are issued and revoked while the gateway runs, in Redis."""

from __future__ import annotations

import secrets
from collections.abc import AsyncIterator, Mapping

from gateway.keys.issued import KEYS_MAX, KeyTable
from gateway.storage.redis.redis_store import RedisStore, Script
from gateway.storage.store_errors import StoreRefused

TABLE = "fairgate:1:keys"
CHANGED = "changed"
SCAN_COUNT = 250
_SCRIPT = Script("keys.lua")


class RedisKeys(KeyTable):
    """A `KeyTable` in Redis. Every entry is a field of one hash; the entry of a revoked key is empty."""

    place = "redis"

    def __init__(self, store: RedisStore) -> None:
        self._store = store

    async def change_mark(self) -> bytes | None:
        return await self.entry(CHANGED)

    async def entry(self, key_hash: str) -> bytes | None:
        found: bytes | None = self._store.shaped(bytes | None, await self._store.command("HGET", TABLE, key_hash))
        return found

    async def entries(self) -> AsyncIterator[tuple[bytes, bytes]]:
        cursor = b"0"
        while True:
            answer = await self._store.command("HSCAN", TABLE, cursor, "COUNT", SCAN_COUNT)
            cursor, found = self._store.shaped(tuple[bytes, list[bytes]], answer)
            for pair in zip(found[::2], found[1::2], strict=False):
                if pair[0] != CHANGED.encode():
                    yield pair
            if cursor == b"0":
                return

    async def note(self, changes: Mapping[str, str | None]) -> None:
        words: list[str | int] = [KEYS_MAX + 1]
        for field, value in {**changes, CHANGED: secrets.token_hex(8)}.items():
            words += ("forget", field, "") if value is None else ("note", field, value)
        if await self._store.run(_SCRIPT, [TABLE], words) == b"full":
            raise StoreRefused(f"{TABLE} holds {KEYS_MAX} keys already: revoke some that were issued before")
