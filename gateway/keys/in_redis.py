"""Table of the keys that are issued and revoked while the gateway runs, in Redis."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping

from gateway.keys.issued import ENTRIES_READ_MAX, KEYS_MAX, USED_MAX, KeyTable, TableFull, log_left_out
from gateway.storage.redis.redis_store import RedisStore, Script

TABLE = "fairgate:1:keys"
USES = "fairgate:1:key-uses"
CHANGED = "changed"
SCAN_COUNT = 250
_SCRIPT = Script("keys.lua")


class RedisKeys(KeyTable):
    """A `KeyTable` in Redis. Every entry is a field of one hash; the entry of a revoked key is empty."""

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

    def entries(self) -> AsyncIterator[tuple[bytes, bytes]]:
        return self._scan(TABLE)

    async def _scan(self, table: str) -> AsyncIterator[tuple[bytes, bytes]]:
        cursor, read = b"0", 0
        while True:
            answer = await self._store.command("HSCAN", table, cursor, "COUNT", SCAN_COUNT)
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
        log_left_out(f"{self.place} {TABLE}")

    async def note(self, changes: Mapping[str, str | None]) -> None:
        words: list[str | int] = [KEYS_MAX]
        for key_hash, noted in changes.items():
            words += ("forget", key_hash, "") if noted is None else ("note", key_hash, noted)
        if await self._store.run(_SCRIPT, [TABLE], words) == b"full":
            raise TableFull(f"{TABLE} holds {KEYS_MAX} keys already: revoke some that were issued before")
        if forgotten := [key_hash for key_hash, noted in changes.items() if noted is None]:
            await self._store.command("HDEL", USES, *forgotten)

    async def note_uses(self, uses: Mapping[str, int]) -> None:
        pairs = sorted(uses.items())
        for at in range(0, len(pairs), SCAN_COUNT):
            await self._store.command("HSET", USES, *(word for pair in pairs[at : at + SCAN_COUNT] for word in pair))

    async def uses(self) -> dict[str, int]:
        found = [(key_hash.decode("utf-8", "replace"), at_s) async for key_hash, at_s in self._scan(USES)]
        return {name: int(at_s) for name, at_s in found if at_s.isdigit() and len(at_s) < len(str(USED_MAX))}
