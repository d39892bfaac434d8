"""A connection to the usage database, SQLite or PostgreSQL, in SQL that both understand.

One thread at a time uses it, and never the loop's. Statements have %s for their values.
"""

from __future__ import annotations

import os
import sqlite3
from collections.abc import Iterable, Iterator, Sequence
from contextlib import closing, contextmanager, suppress
from pathlib import Path
from typing import Any

from gateway.config.sections.services import UsageConfig
from gateway.storage.store_errors import StoreError, StoreRefused, StoreUnavailable

LAYOUT = "2"
CONNECT_S = 3
ANSWER_S = 5
"""Seconds that a statement may take, and that a server may give no sign of life."""
BUSY_S = 2.0
"""Seconds for which SQLite waits for another process that writes."""

_TABLES = (
    """CREATE TABLE IF NOT EXISTS fairgate_usage (
        hour_s BIGINT NOT NULL, tenant TEXT NOT NULL, app TEXT NOT NULL, end_user TEXT NOT NULL, model TEXT NOT NULL,
        key_label TEXT NOT NULL, requests BIGINT NOT NULL, refused BIGINT NOT NULL, input_tokens BIGINT NOT NULL,
        cached_tokens BIGINT NOT NULL, output_tokens BIGINT NOT NULL, wasted_tokens BIGINT NOT NULL,
        queue_us BIGINT NOT NULL, engine_ms BIGINT NOT NULL,
        PRIMARY KEY (hour_s, tenant, app, end_user, model, key_label)
    )""",
    """CREATE TABLE IF NOT EXISTS fairgate_writers (
        writer TEXT PRIMARY KEY, batch BIGINT NOT NULL, written_s BIGINT NOT NULL
    )""",
    "CREATE TABLE IF NOT EXISTS fairgate_keys (hash TEXT PRIMARY KEY, entry TEXT NOT NULL)",
    "CREATE TABLE IF NOT EXISTS fairgate_notes (name TEXT PRIMARY KEY, value TEXT NOT NULL)",
    """CREATE TABLE IF NOT EXISTS fairgate_files (
        id TEXT PRIMARY KEY, tenant TEXT NOT NULL, purpose TEXT NOT NULL, filename TEXT NOT NULL, bytes BIGINT NOT NULL,
        made_s BIGINT NOT NULL, is_whole BIGINT NOT NULL, expires_s BIGINT NOT NULL
    )""",
    """CREATE TABLE IF NOT EXISTS fairgate_lines (
        file TEXT NOT NULL, n BIGINT NOT NULL, line BYTEA NOT NULL, PRIMARY KEY (file, n)
    )""",
    """CREATE TABLE IF NOT EXISTS fairgate_batches (
        id TEXT PRIMARY KEY, tenant TEXT NOT NULL, input TEXT NOT NULL, status TEXT NOT NULL, owner TEXT NOT NULL,
        lease_s BIGINT NOT NULL, completed BIGINT NOT NULL, failed BIGINT NOT NULL, entry TEXT NOT NULL,
        caller TEXT NOT NULL
    )""",
    "CREATE INDEX IF NOT EXISTS fairgate_batches_by_status ON fairgate_batches (status)",
    "CREATE INDEX IF NOT EXISTS fairgate_files_by_tenant ON fairgate_files (tenant)",
)
_NOTE_LAYOUT = "INSERT INTO fairgate_notes VALUES ('layout', %s) ON CONFLICT (name) DO NOTHING"
_READ_LAYOUT = "SELECT value FROM fairgate_notes WHERE name = 'layout'"


def place_of(config: UsageConfig) -> str:
    """Return the database's name for people, without the password."""
    text = config.url.get_secret_value()
    scheme, is_url, rest = text.partition("://")
    return f"{scheme}://{rest.rpartition('@')[2].partition('?')[0]}" if is_url else text


class Transaction:
    """A transaction: its statements take effect together or not at all."""

    def __init__(self, cursor: Any, kind: _SqliteDialect | _PostgreSqlDialect) -> None:
        self._cursor = cursor
        self.kind = kind

    def ask(self, statement: str, values: Sequence[object] = ()) -> list[tuple[Any, ...]]:
        """Return the rows that a query finds."""
        self._cursor.execute(statement.replace("%s", self.kind.mark), values)
        return list(self._cursor.fetchall())

    def do(self, statement: str, values: Sequence[object] = ()) -> int:
        """Return the number of rows that a statement changed."""
        self._cursor.execute(statement.replace("%s", self.kind.mark), values)
        return int(self._cursor.rowcount)

    def lock(self, name: str) -> None:
        """Wait until no other transaction has locked this name. The lock holds until this transaction ends."""
        self.ask(self.kind.lock, (name,))

    def do_each(self, statement: str, rows: Iterable[Sequence[object]]) -> None:
        self._cursor.executemany(statement.replace("%s", self.kind.mark), rows)


class Database:
    """A database that connects for the first transaction, and again after a fault."""

    def __init__(self, config: UsageConfig, *, makes: bool = True) -> None:
        """Connect later. `makes`: make a missing file and missing tables; otherwise a missing file is StoreRefused."""
        url = config.url.get_secret_value()
        self._kind = _PostgreSqlDialect(url) if config.is_server else _SqliteDialect(Path(url), makes=makes)
        self._place = place_of(config)
        self._makes = makes
        self._connection: Any = None

    @contextmanager
    def transaction(self, *, writes: bool = True) -> Iterator[Transaction]:
        """Run a transaction: commit at its end, or roll back on an error. Raise StoreUnavailable or StoreRefused; the
        transaction may have been committed nonetheless.

        A file that was replaced or removed before is opened anew. Raise StoreUnavailable if it was replaced during the
        transaction.
        """
        kind = self._kind
        try:
            self._lose_replaced()
            if self._connection is None:
                self._connection = kind.connect()
                self._prepare()
            with closing(self._connection.cursor()) as cursor:
                cursor.execute(kind.begin_writing if writes else kind.begin)
                yield Transaction(cursor, kind)
                cursor.execute("COMMIT")
            if self._lose_replaced():
                raise StoreUnavailable("the file was replaced or removed meanwhile: try again")
        except BaseException as error:  # rolled back whatever the error is, and raised
            self.close()
            fault = error if isinstance(error, StoreError) else kind.fault(error)
            if fault is None:
                raise
            raise type(fault)(f"{self._place}: {fault}") from error

    def close(self) -> None:
        """Disconnect, and roll back an open transaction."""
        connection, self._connection = self._connection, None
        if connection is not None:
            connection.close()

    def _lose_replaced(self) -> bool:
        """Disconnect if the file was replaced or removed, and return whether it was."""
        is_lost = self._connection is not None and self._kind.is_another()
        if is_lost:
            self.close()
        return is_lost

    def _prepare(self) -> None:
        with closing(self._connection.cursor()) as cursor:
            step = Transaction(cursor, self._kind)
            if self._makes:
                step.do(self._kind.begin_writing)
                step.lock("tables")  # two connections that create one table would conflict
                for table in _TABLES:
                    step.do(table)
                step.do(_NOTE_LAYOUT, (LAYOUT,))
                step.do("COMMIT")
            [(layout,)] = step.ask(_READ_LAYOUT) or [("none",)]
        if layout != LAYOUT:
            raise StoreRefused(
                f"has tables of layout {layout}, and this version writes layout {LAYOUT}: give it a database of its own"
            )


class _SqliteDialect:
    """SQLite's dialect and connections."""

    mark = "?"
    begin = "BEGIN"
    """Begins a transaction that only reads."""
    begin_writing = "BEGIN IMMEDIATE"
    lock = "SELECT %s"
    """Locks a name; here nothing, since one transaction writes at a time."""
    month = "strftime('%Y-%m', hour_s, 'unixepoch')"

    def __init__(self, path: Path, *, makes: bool) -> None:
        self._path = path
        self._makes = makes
        self._opened: tuple[int, int] | None = None
        """Device and inode of the connection's file; None if there is none."""

    def connect(self) -> sqlite3.Connection:
        if self._makes:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            # Hashes of keys are for the owner only. An existing file is not opened here: closing it would release the
            # locks that other connections of this process have on it.
            with suppress(FileExistsError):
                os.close(os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600))
        elif not self._path.is_file():
            raise StoreRefused("there is no such file: no gateway has written it yet")
        self._opened = self._file_id()  # before connecting, so that a replacement meanwhile is noticed later
        connection = sqlite3.connect(self._path, timeout=BUSY_S, isolation_level=None, check_same_thread=False)
        connection.text_factory = lambda stored: stored.decode("utf-8", "replace")  # other programs may store any bytes
        try:
            # Not WAL: its second file stays when the database file is replaced, and its pages would be taken for pages
            # of the new file. With DELETE the one file has everything between two transactions.
            connection.execute("PRAGMA journal_mode = DELETE")
            connection.execute("PRAGMA synchronous = EXTRA")
        except sqlite3.Error:
            connection.close()
            raise
        return connection

    def is_another(self) -> bool:
        """Return whether the file of the last connection was replaced or removed."""
        return self._opened != self._file_id()

    def _file_id(self) -> tuple[int, int] | None:
        """Return the device and inode of the file at the path; None if there is no file."""
        try:
            found = os.stat(self._path)
        except FileNotFoundError:
            return None
        return (found.st_dev, found.st_ino)

    def fault(self, error: BaseException) -> StoreError | None:
        """Return the StoreError for an error; None if the error is not the database's."""
        if isinstance(error, OSError):
            return StoreUnavailable(error.strerror or str(error))
        if not isinstance(error, sqlite3.Error):
            return None
        if error.sqlite_errorname in ("SQLITE_NOTADB", "SQLITE_CORRUPT"):
            return StoreRefused(f"{error}; move it away, and a new one is made")
        return StoreUnavailable(f"{error} ({error.sqlite_errorname})")


class _PostgreSqlDialect:
    """PostgreSQL's dialect and connections, as those of `_SqliteDialect`."""

    mark = "%s"
    # A pooler in transaction mode gives the session to other clients afterwards. So settings end with the transaction,
    # and nothing is prepared.
    begin = f"BEGIN; SET LOCAL statement_timeout = {ANSWER_S * 1000}; SET LOCAL lock_timeout = {ANSWER_S * 1000}"
    begin_writing = begin
    lock = "SELECT pg_advisory_xact_lock(20260118, hashtext(%s))"
    month = "to_char(to_timestamp(hour_s) AT TIME ZONE 'UTC', 'YYYY-MM')"

    def __init__(self, url: str) -> None:
        self._url = url

    def connect(self) -> Any:
        try:
            import psycopg
        except ImportError as error:
            raise StoreRefused("needs psycopg: pip install 'fairgate[postgresql]'") from error
        bounds: dict[str, Any] = {
            "connect_timeout": CONNECT_S,
            "tcp_user_timeout": ANSWER_S * 1000,
            "keepalives_idle": ANSWER_S,
            "keepalives_interval": 1,
            "keepalives_count": ANSWER_S,
            "application_name": "fairgate",
        }
        try:
            where = psycopg.conninfo.conninfo_to_dict(self._url)
        except psycopg.Error:  # its text may repeat the password
            raise StoreRefused("is no url that PostgreSQL understands") from None
        return psycopg.connect(**{**bounds, **where}, autocommit=True, prepare_threshold=None)

    def is_another(self) -> bool:
        """Return False: a server that has moved ends its connections."""
        return False

    def fault(self, error: BaseException) -> StoreError | None:
        import psycopg

        if not isinstance(error, psycopg.Error):
            return None
        text = " ".join(str(error).split())
        passes = isinstance(error, psycopg.OperationalError | psycopg.InterfaceError | psycopg.InternalError)
        return StoreUnavailable(text) if passes else StoreRefused(text)
