"""The keys that were made and revoked while the gateway ran, in the database of usage."""

from __future__ import annotations

import secrets
from collections.abc import AsyncIterator

from gateway.config.keys import KeyConfig
from gateway.keys.issued import KEYS_MAX, REVOKED, TableFull, entry
from gateway.usage.database import Database
from gateway.usage.thread import DatabaseThread

__all__ = ["DatabaseKeys"]

PAGE = 2000
_CHANGED = "SELECT value FROM fairgate_notes WHERE name = 'keys'"
_MARK = "INSERT INTO fairgate_notes VALUES ('keys', %s) ON CONFLICT (name) DO UPDATE SET value = excluded.value"
_NOTE = "INSERT INTO fairgate_keys VALUES (%s, %s) ON CONFLICT (hash) DO UPDATE SET entry = excluded.entry"
_FORGET = "DELETE FROM fairgate_keys WHERE hash = %s"
_OTHERS = "SELECT COUNT(*) FROM fairgate_keys WHERE hash <> %s"
_ENTRY = "SELECT entry FROM fairgate_keys WHERE hash = %s"
_PAGE = "SELECT hash, entry FROM fairgate_keys WHERE hash > %s ORDER BY hash LIMIT %s"


class DatabaseKeys:
    """A `KeyTable`. The entry of a revoked key is empty."""

    place = "database"

    def __init__(self, database: DatabaseThread) -> None:
        self._database = database

    async def changed(self) -> bytes | None:
        return await self._one(_CHANGED)

    async def entry(self, key_hash: str) -> bytes | None:
        return await self._one(_ENTRY, key_hash)

    async def entries(self) -> AsyncIterator[tuple[bytes, bytes]]:
        last = ""
        while page := await self._rows(_PAGE, last, PAGE):
            for key_hash, noted in page:
                yield key_hash.encode(), noted.encode()
            last = page[-1][0]

    async def issue(self, key: KeyConfig, tenant: str) -> None:
        await self._note(key.hash, entry(tenant, key))

    async def revoke(self, key_hash: str) -> None:
        await self._note(key_hash, REVOKED)

    async def forget(self, key_hash: str) -> None:
        def forgotten(database: Database) -> None:
            with database.transaction() as step:
                step.do(_FORGET, (key_hash,))
                step.do(_MARK, (secrets.token_hex(8),))

        await self._database.do(forgotten)

    async def _note(self, key_hash: str, noted: str) -> None:
        def written(database: Database) -> None:
            with database.transaction() as step:
                [(others,)] = step.ask(_OTHERS, (key_hash,))
                if others >= KEYS_MAX:
                    raise TableFull(f"it holds {KEYS_MAX} keys already: revoke some that were issued before")
                step.do(_NOTE, (key_hash, noted))
                step.do(_MARK, (secrets.token_hex(8),))

        await self._database.do(written)

    async def _one(self, statement: str, *values: object) -> bytes | None:
        rows = await self._rows(statement, *values)
        return rows[0][0].encode() if rows else None

    async def _rows(self, statement: str, *values: object) -> list[tuple[str, ...]]:
        def read(database: Database) -> list[tuple[str, ...]]:
            with database.transaction(writes=False) as step:
                return step.ask(statement, values)

        return await self._database.do(read)
