"""Where is it written down? One connection to SQLite or PostgreSQL, in the words that both understand.

Used by one thread at a time, and not by the loop's. Statements have %s for their values.
"""

from __future__ import annotations

import os
import sqlite3
from collections.abc import Iterable, Iterator, Sequence
from contextlib import closing, contextmanager, suppress
from pathlib import Path
from typing import Any, Protocol

from gateway.config.sections.usage import UsageConfig
from gateway.storage.store_errors import StoreError, StoreRefused, StoreUnavailable

LAYOUT = "1"
CONNECT_S = 3
ANSWER_S = 5
"""How long a statement may take, and how long a server may give no sign of life."""
BUSY_S = 2.0
"""How long SQLite waits for another process that writes."""

_TABLES = (
    """CREATE TABLE IF NOT EXISTS fairgate_usage (
        hour_s BIGINT NOT NULL, tenant TEXT NOT NULL, app TEXT NOT NULL, end_user TEXT NOT NULL, model TEXT NOT NULL,
        requests BIGINT NOT NULL, refused BIGINT NOT NULL, input_tokens BIGINT NOT NULL, cached_tokens BIGINT NOT NULL,
        output_tokens BIGINT NOT NULL, wasted_tokens BIGINT NOT NULL, queue_us BIGINT NOT NULL,
        PRIMARY KEY (hour_s, tenant, app, end_user, model)
    )""",
    # Beside the table above and not a column of its key: gateways of an earlier version go on writing both databases.
    """CREATE TABLE IF NOT EXISTS fairgate_key_usage (
        hour_s BIGINT NOT NULL, tenant TEXT NOT NULL, key_label TEXT NOT NULL, model TEXT NOT NULL,
        requests BIGINT NOT NULL, refused BIGINT NOT NULL, input_tokens BIGINT NOT NULL, cached_tokens BIGINT NOT NULL,
        output_tokens BIGINT NOT NULL, wasted_tokens BIGINT NOT NULL, queue_us BIGINT NOT NULL,
        engine_ms BIGINT NOT NULL, PRIMARY KEY (hour_s, tenant, key_label, model)
    )""",
    """CREATE TABLE IF NOT EXISTS fairgate_shares (
        hour_s BIGINT NOT NULL, tenant TEXT NOT NULL, received DOUBLE PRECISION NOT NULL, due DOUBLE PRECISION NOT NULL,
        PRIMARY KEY (hour_s, tenant)
    )""",
    """CREATE TABLE IF NOT EXISTS fairgate_writers (
        writer TEXT PRIMARY KEY, batch BIGINT NOT NULL, written_s BIGINT NOT NULL
    )""",
    "CREATE TABLE IF NOT EXISTS fairgate_keys (hash TEXT PRIMARY KEY, entry TEXT NOT NULL)",
    "CREATE TABLE IF NOT EXISTS fairgate_key_uses (hash TEXT PRIMARY KEY, used_s BIGINT NOT NULL)",
    "CREATE TABLE IF NOT EXISTS fairgate_notes (name TEXT PRIMARY KEY, value TEXT NOT NULL)",
    """CREATE TABLE IF NOT EXISTS fairgate_files (
        id TEXT PRIMARY KEY, tenant TEXT NOT NULL, purpose TEXT NOT NULL, filename TEXT NOT NULL, bytes BIGINT NOT NULL,
        made_s BIGINT NOT NULL, is_whole BIGINT NOT NULL
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
_ADDED = (("fairgate_usage", "engine_ms"), ("fairgate_files", "expires_s"))
"""Columns that tables of before have not."""
_NOTE_LAYOUT = "INSERT INTO fairgate_notes VALUES ('layout', %s) ON CONFLICT (name) DO NOTHING"
_READ_LAYOUT = "SELECT value FROM fairgate_notes WHERE name = 'layout'"


def place_of(config: UsageConfig) -> str:
    """The database as it may be shown: without a password."""
    text = config.url.get_secret_value()
    scheme, is_url, rest = text.partition("://")
    return f"{scheme}://{rest.rpartition('@')[2].partition('?')[0]}" if is_url else text


class Transaction:
    """What is done in one step, or not at all."""

    def __init__(self, cursor: Any, kind: _Kind) -> None:
        self._cursor = cursor
        self._mark = kind.mark
        self._lock = kind.lock

    def ask(self, statement: str, values: Sequence[object] = ()) -> list[tuple[Any, ...]]:
        """The rows that it finds."""
        self._cursor.execute(statement.replace("%s", self._mark), values)
        return list(self._cursor.fetchall())

    def do(self, statement: str, values: Sequence[object] = ()) -> int:
        """How many rows it changed."""
        self._cursor.execute(statement.replace("%s", self._mark), values)
        return int(self._cursor.rowcount)

    def lock(self, name: str) -> None:
        """Wait until no other transaction has locked this name; the lock holds until this one ends."""
        self.ask(self._lock, (name,))

    def do_each(self, statement: str, rows: Iterable[Sequence[object]]) -> None:
        self._cursor.executemany(statement.replace("%s", self._mark), rows)


class _Kind(Protocol):
    """What is different between the two."""

    mark: str
    begin: str
    """A transaction that reads."""
    begin_writing: str
    lock: str
    """Locks a name, where a transaction that writes is not alone anyway."""
    has_column: str
    """Asks whether a table has a column."""

    def connect(self) -> Any: ...

    def is_another(self) -> bool:
        """Is there another database now, or none, where the one was that was connected to last? Says so once."""

    def fault(self, error: Exception) -> StoreError | None:
        """What an error means; None: it is none of the database's."""


class Database:
    """Connects when it is asked something, and again after a fault."""

    def __init__(self, config: UsageConfig, *, makes: bool = True) -> None:
        """`makes`: a file, or tables, that are not there are made; otherwise that is StoreRefused."""
        url = config.url.get_secret_value()
        self._kind: _Kind = _PostgreSql(url) if config.is_server else _Sqlite(Path(url), makes=makes)
        self._place = place_of(config)
        self._makes = makes
        self._connection: Any = None
        self.replaced = 0
        """How often the file was replaced or removed while it was open."""

    @contextmanager
    def transaction(self, *, writes: bool = True) -> Iterator[Transaction]:
        """Committed at its end, undone if that is an error. Raises StoreUnavailable or StoreRefused; after that it may
        have been committed all the same. A file that was replaced or removed is opened anew; what is committed to one
        that was replaced meanwhile is StoreUnavailable."""
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
        except BaseException as error:  # undone whatever ended it, and raised
            self.close()
            fault = kind.fault(error) if isinstance(error, Exception) else None
            if fault is None:
                raise
            raise type(fault)(f"{self._place}: {fault}") from error

    def close(self) -> None:
        """Nothing is open after this; what was begun is undone."""
        connection, self._connection = self._connection, None
        if connection is not None:
            connection.close()

    def _lose_replaced(self) -> bool:
        """Disconnect from a file that is no longer the one at its place. False: it is."""
        if not self._kind.is_another():
            return False
        self.replaced += 1
        self.close()
        return True

    def _prepare(self) -> None:
        with closing(self._connection.cursor()) as cursor:
            step = Transaction(cursor, self._kind)
            if self._makes:
                step.do(self._kind.begin_writing)
                if isinstance(self._kind, _PostgreSql):
                    step.ask("SELECT pg_advisory_xact_lock(20260117)")  # two that make the same table are in conflict
                for table in _TABLES:
                    step.do(table)
                for table, column in _ADDED:
                    if not step.ask(self._kind.has_column, (table, column)):
                        step.do(f"ALTER TABLE {table} ADD COLUMN {column} BIGINT NOT NULL DEFAULT 0")
                step.do(_NOTE_LAYOUT, (LAYOUT,))
                step.do("COMMIT")
            [(layout,)] = step.ask(_READ_LAYOUT) or [("none",)]
        if layout != LAYOUT:
            raise StoreRefused(
                f"has tables of layout {layout}, and this version writes layout {LAYOUT}: give it a database of its own"
            )


class _Sqlite:
    mark = "?"
    begin = "BEGIN"
    begin_writing = "BEGIN IMMEDIATE"
    lock = "SELECT %s"
    has_column = "SELECT 1 FROM pragma_table_info(%s) WHERE name = %s"

    def __init__(self, path: Path, *, makes: bool) -> None:
        self._path = path
        self._makes = makes
        self._opened: tuple[int, int] | None = None
        """Which file the connection is to."""

    def connect(self) -> sqlite3.Connection:
        if self._makes:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            # Hashes of keys are for the owner only. A file that is there is not opened here: to close it would end the
            # locks that other connections of this process have on it.
            with suppress(FileExistsError):
                os.close(os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600))
        elif not self._path.is_file():
            raise StoreRefused("there is no such file: no gateway has written it yet")
        self._opened = self._present()  # first: what takes its place while it is opened is noticed later
        connection = sqlite3.connect(self._path, timeout=BUSY_S, isolation_level=None, check_same_thread=False)
        connection.text_factory = _as_text
        try:
            # Not WAL: its second file stays while the first one is replaced, and the pages in it would be taken for
            # pages of the new one. So between two transactions everything is in the one file.
            connection.execute("PRAGMA journal_mode = DELETE")
            connection.execute("PRAGMA synchronous = EXTRA")
        except sqlite3.Error:
            connection.close()
            raise
        return connection

    def is_another(self) -> bool:
        if self._opened is None or self._opened == self._present():
            return False
        self._opened = None
        return True

    def _present(self) -> tuple[int, int] | None:
        """Which file is at the path. None: none."""
        try:
            found = os.stat(self._path)
        except FileNotFoundError:
            return None
        return (found.st_dev, found.st_ino)

    def fault(self, error: Exception) -> StoreError | None:
        if isinstance(error, StoreError):
            return error
        if isinstance(error, OSError):
            return StoreUnavailable(error.strerror or str(error))
        if not isinstance(error, sqlite3.Error):
            return None
        if error.sqlite_errorname in ("SQLITE_NOTADB", "SQLITE_CORRUPT"):
            return StoreRefused(f"{error}; move it away, and a new one is made")
        return StoreUnavailable(f"{error} ({error.sqlite_errorname})")


def _as_text(stored: bytes) -> str:
    """What others wrote into a column of text may be none."""
    return stored.decode("utf-8", "replace")


class _PostgreSql:
    mark = "%s"
    # A pooler in transaction mode then gives the session to others: settings end with the transaction, and nothing
    # is prepared.
    begin = f"BEGIN; SET LOCAL statement_timeout = {ANSWER_S * 1000}; SET LOCAL lock_timeout = {ANSWER_S * 1000}"
    begin_writing = begin
    lock = "SELECT pg_advisory_xact_lock(20260118, hashtext(%s))"
    has_column = "SELECT 1 FROM pg_attribute WHERE attrelid = to_regclass(%s) AND attname = %s"

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
        except psycopg.Error:  # what it says may repeat the password
            raise StoreRefused("is no url that PostgreSQL understands") from None
        return psycopg.connect(**{**bounds, **where}, autocommit=True, prepare_threshold=None)

    def is_another(self) -> bool:
        """A server that has moved ends its connections."""
        return False

    def fault(self, error: Exception) -> StoreError | None:
        if isinstance(error, StoreError):
            return error
        import psycopg

        if not isinstance(error, psycopg.Error):
            return None
        text = " ".join(str(error).split())
        passes = isinstance(error, psycopg.OperationalError | psycopg.InterfaceError | psycopg.InternalError)
        return StoreUnavailable(text) if passes else StoreRefused(text)
