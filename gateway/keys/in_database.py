"""Table of the keys that are issued and revoked while the gateway runs, in the usage database."""

from __future__ import annotations

import secrets
from collections.abc import AsyncIterator, Mapping
from typing import Any

from gateway.keys.issued import KEYS_MAX, KeyTable
from gateway.storage.store_errors import StoreRefused
from gateway.usage.database import Database
from gateway.usage.thread import DatabaseThread

PAGE = 2000
_MARK = "INSERT INTO fairgate_notes VALUES ('keys', %s) ON CONFLICT (name) DO UPDATE SET value = excluded.value"
_NOTE = "INSERT INTO fairgate_keys VALUES (%s, %s) ON CONFLICT (hash) DO UPDATE SET entry = excluded.entry"
_PAGE = "SELECT hash, entry FROM fairgate_keys WHERE hash > %s ORDER BY hash LIMIT %s OFFSET %s"


class DatabaseKeys(KeyTable):
    """A `KeyTable` in the usage database. The entry of a revoked key is empty."""

    place = "database"

    def __init__(self, database: DatabaseThread) -> None:
        self._database = database

    async def change_mark(self) -> bytes | None:
        return await self._one("SELECT value FROM fairgate_notes WHERE name = 'keys'")

    async def entry(self, key_hash: str) -> bytes | None:
        return await self._one("SELECT entry FROM fairgate_keys WHERE hash = %s", key_hash)

    async def entries(self) -> AsyncIterator[tuple[bytes, bytes]]:
        last, after = "", 0
        while page := await self._rows(_PAGE, last, PAGE, after):
            for key_hash, noted in page:
                # SQLite may order a hash that is not ASCII otherwise than its decoded text: OFFSET skips such a row.
                is_text = isinstance(key_hash, str) and key_hash.isascii()
                last, after = (key_hash, 0) if is_text else (last, after + 1)
                yield key_hash.encode() if is_text else b"?", _bytes(noted)

    async def note(self, changes: Mapping[str, str | None]) -> None:
        noted = [(key_hash, entry) for key_hash, entry in changes.items() if entry is not None]

        def written(database: Database) -> None:
            with database.transaction() as step:
                step.do_each("DELETE FROM fairgate_keys WHERE hash = %s", [(key_hash,) for key_hash in changes])
                step.do_each(_NOTE, noted)
                [(count,)] = step.ask("SELECT COUNT(*) FROM fairgate_keys")
                if count > KEYS_MAX and noted:
                    raise StoreRefused(f"it holds {KEYS_MAX} keys already: revoke some that were issued before")
                step.do(_MARK, (secrets.token_hex(8),))

        await self._database.do(written)

    async def _one(self, statement: str, *values: object) -> bytes | None:
        """Return the first column of the first row that a statement finds, or None."""
        rows = await self._rows(statement, *values)
        return _bytes(rows[0][0]) if rows else None

    async def _rows(self, statement: str, *values: object) -> list[tuple[Any, ...]]:
        def read(database: Database) -> list[tuple[Any, ...]]:
            with database.transaction(writes=False) as step:
                return step.ask(statement, values)

        return await self._database.do(read)


def _bytes(noted: Any) -> bytes:
    """Return an entry as bytes: SQLite stores a value of any type in a text column."""
    return noted if isinstance(noted, bytes) else str(noted).encode()
