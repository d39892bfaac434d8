"""Real PostgreSQL servers on free ports, which end with the test."""

from __future__ import annotations

import asyncio
import atexit
import os
import shutil
import signal
import subprocess
import tempfile
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import cache
from importlib.util import find_spec
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


@asynccontextmanager
async def pooled(server: PostgresServer) -> AsyncIterator[str]:
    """The url of a PgBouncer before the server, in transaction mode, with few connections to the server."""
    found = shutil.which("pgbouncer", path=f"{os.environ.get('PATH', '')}:/usr/sbin")
    if found is None:
        pytest.skip("runs a real PgBouncer: apt-get install pgbouncer")
    port, directory = free_port(), _directory()
    config = directory / "pgbouncer.ini"
    config.write_text(
        "[databases]\n"
        f"postgres = host=127.0.0.1 port={server.port} user=postgres\n[pgbouncer]\nlisten_addr = 127.0.0.1\n"
        f"listen_port = {port}\nauth_type = any\npool_mode = transaction\ndefault_pool_size = 2\nunix_socket_dir =\n"
        f"logfile = {directory / 'log'}\npidfile = {directory / 'pid'}\n"
    )
    await asyncio.to_thread(call, found, "-q", "-d", config)
    try:
        yield f"postgresql://postgres@127.0.0.1:{port}/postgres"
    finally:
        pid = int((directory / "pid").read_text())
        os.kill(pid, signal.SIGKILL)
        shutil.rmtree(directory)
