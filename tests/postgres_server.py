"""Real PostgreSQL servers on free ports, which end with the test."""

from __future__ import annotations

import asyncio
import atexit
import os
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from functools import cache
from importlib.util import find_spec
from itertools import count
from pathlib import Path
from types import TracebackType
from typing import Any

import pytest

from tests.ports import free_port
from tests.waiting import WAIT_S

SETTINGS = (
    "listen_addresses = '127.0.0.1'\nunix_socket_directories = ''\nfsync = off\nmax_connections = 20\n"
    "shared_buffers = 16MB\n"
)


@cache
def program(name: str) -> str:
    """Where a program of PostgreSQL is; the test is skipped where there is none."""
    found = shutil.which(name) or next(map(str, Path("/usr/lib/postgresql").glob(f"*/bin/{name}")), None)
    if found is None:
        pytest.skip(f"runs a real PostgreSQL and needs {name}: apt-get install postgresql (with RUNLEVEL=1)")
    return found


def call(*command: str | Path) -> None:
    """As a user that PostgreSQL accepts: it never runs as root."""
    line = ["runuser", "-u", "postgres", "--", *command] if os.getuid() == 0 else list(command)
    subprocess.run(line, check=True, cwd="/", stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, timeout=WAIT_S)


@cache
def template() -> Path:
    """What `initdb` makes, once for all servers of this process: it takes longer than a server to start."""
    directory = _directory()
    atexit.register(shutil.rmtree, directory)
    call(program("initdb"), "-A", "trust", "-U", "postgres", "-N", "-D", directory / "data")
    return directory / "data"


def _directory() -> Path:
    made = Path(tempfile.mkdtemp(prefix="fairgate-postgres-"))
    if os.getuid() == 0:
        shutil.chown(made, "postgres")
    return made


class PostgresServer:
    """`async with PostgresServer() as server`; `crash` and `start` it again on the same port."""

    def __init__(self) -> None:
        self.port = free_port()
        self.directory = Path()

    @property
    def url(self) -> str:
        return f"postgresql://postgres@127.0.0.1:{self.port}/postgres"

    async def __aenter__(self) -> PostgresServer:
        if find_spec("psycopg") is None:
            pytest.skip("runs a real PostgreSQL and needs psycopg: pip install 'fairgate[postgresql]'")
        program("initdb")
        await asyncio.to_thread(self._make)
        await self.start()
        return self

    async def __aexit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if (self.directory / "data" / "postmaster.pid").exists():
            await self.crash()
        shutil.rmtree(self.directory)

    def _make(self) -> None:
        made, self.directory = template(), _directory()
        data = self.directory / "data"
        call("cp", "-R", made, data)
        with (data / "postgresql.conf").open("a") as file:
            file.write(SETTINGS + f"port = {self.port}\n")

    async def start(self) -> None:
        await self._control("start", "-w", "-l", str(self.directory / "log"))

    async def crash(self) -> None:
        """As if the machine had lost its power: what was committed is there afterwards."""
        await self._control("stop", "-m", "immediate")

    async def ask(self, statement: str) -> list[tuple[Any, ...]]:
        import psycopg

        def asked() -> list[tuple[Any, ...]]:
            with psycopg.connect(self.url, autocommit=True) as connection:
                cursor = connection.execute(statement)
                return cursor.fetchall() if cursor.description else []

        return await asyncio.to_thread(asked)

    async def _control(self, *what: str) -> None:
        await asyncio.to_thread(call, program("pg_ctl"), "-D", self.directory / "data", *what)


class Databases:
    """Empty databases of one server, for what breaks no server: `with Databases() as made`."""

    def __init__(self) -> None:
        self._server = PostgresServer()
        self._names = map("usage_{}".format, count())
        self._is_started = False

    def __enter__(self) -> Databases:
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if self._is_started:
            asyncio.run(self._server.__aexit__(kind, error, trace))

    async def another(self) -> str:
        """Return the url of a database of its own, which nobody has used yet."""
        if not self._is_started:
            await self._server.__aenter__()
            self._is_started = True
        name = next(self._names)
        await self._server.ask(f"CREATE DATABASE {name}")
        return self._server.url.removesuffix("postgres") + name


@asynccontextmanager
async def pooled(server: PostgresServer) -> AsyncIterator[str]:
    """The url of a PgBouncer before the server, in transaction mode, with few connections to the server."""
    found = shutil.which("pgbouncer", path=f"{os.environ.get('PATH', '')}:/usr/sbin")
    if found is None:
        pytest.skip("runs a real PgBouncer: apt-get install pgbouncer")
    directory = _directory()
    port = await asyncio.to_thread(_start_pooler, found, directory, server.port)
    try:
        yield f"postgresql://postgres@127.0.0.1:{port}/postgres"
    finally:
        pid = int((directory / "pid").read_text())
        os.kill(pid, signal.SIGKILL)
        shutil.rmtree(directory)


def _start_pooler(program: str, directory: Path, server_port: int) -> int:
    """Start a PgBouncer and return its port once it accepts connections; another port if one was taken meanwhile."""
    config = directory / "pgbouncer.ini"
    for port in (free_port() for _ in range(10)):
        config.write_text(
            "[databases]\n"
            f"postgres = host=127.0.0.1 port={server_port} user=postgres\n[pgbouncer]\nlisten_addr = 127.0.0.1\n"
            f"listen_port = {port}\nauth_type = any\npool_mode = transaction\ndefault_pool_size = 2\n"
            f"unix_socket_dir =\nlogfile = {directory / 'log'}\npidfile = {directory / 'pid'}\n"
        )
        call(program, "-q", "-d", config)
        if _accepts(port, directory):
            return port
    raise AssertionError((directory / "log").read_text())


def _accepts(port: int, directory: Path) -> bool:
    """Wait until a PgBouncer that was started accepts connections, or has written why it ended."""
    ends, log = time.monotonic() + WAIT_S, directory / "log"
    while time.monotonic() < ends:
        with suppress(ConnectionRefusedError), socket.create_connection(("127.0.0.1", port)):
            if (directory / "pid").exists():
                return True
        if log.exists() and "FATAL" in log.read_text():
            return False
        time.sleep(0.01)
    raise TimeoutError(f"PgBouncer on port {port} neither accepts connections nor says why: {log.read_text()}")
