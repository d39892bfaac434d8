"""Real Redis servers on free ports, and a proxy that breaks what stands between one and the gateway."""

from __future__ import annotations

import asyncio
import shutil
import signal
import subprocess
import tempfile
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from types import TracebackType
from typing import Any

import pytest
from redis import Redis as SyncRedis
from redis.asyncio import Redis

from tests.ports import free_port
from tests.waiting import WAIT_S

SLOTS = 16384
STARTS_MAX = 5
"""A free port may be taken before the server binds it: then another one is tried."""
INSTALL = (
    "apt-get install redis-server openssl (`make test` does it as root on Debian); see https://redis.io/docs/install"
)


def needed(program: str) -> str:
    """Where a program is that the tests run; they fail, and say how to get it, where it is missing."""
    found = shutil.which(program)
    if found is None:
        pytest.fail(f"these tests run a real server and need {program}: {INSTALL}")
    return found


class RedisServer:
    """One redis-server process, started with `options` as its configuration file names them.

    `async with RedisServer(requirepass="secret") as redis`. Nothing is kept on disk unless an option says so.
    """

    def __init__(
        self,
        *,
        tls: bool = False,
        cluster: bool = False,
        slots: tuple[int, int] = (0, SLOTS - 1),
        **options: str | int,
    ) -> None:
        """`slots`: the first and the last that a node of a cluster owns; those of several `meet`."""
        self.port, self.cluster_port = free_port(), free_port()
        self.options = {name.replace("_", "-"): str(value) for name, value in options.items()}
        self.tls = tls
        self.cluster = cluster
        self.slots = slots
        self.directory = Path()
        self._process: asyncio.subprocess.Process | None = None
        self._log: asyncio.Task[bytes] | None = None

    @property
    def pid(self) -> int:
        assert self._process is not None
        return self._process.pid

    @property
    def url(self) -> str:
        """With the password and the certificate, if there are."""
        password = f":{self.options['requirepass']}@" if "requirepass" in self.options else ""
        ca = f"?ssl_ca_certs={self.directory}/certificate.pem" if self.tls else ""
        return f"redis{'s' if self.tls else ''}://{password}127.0.0.1:{self.port}/0{ca}"

    async def __aenter__(self) -> RedisServer:
        self.directory = Path(tempfile.mkdtemp(prefix="fairgate-redis-"))
        if self.tls:
            self._make_certificate()
        for _ in range(STARTS_MAX):
            if await self.start():
                break
            self.port, self.cluster_port = free_port(), free_port()
        else:
            pytest.fail(f"redis-server could not start: {(self.directory / 'log').read_text()[-2000:]}")
        if self.cluster:
            await self.command("CLUSTER", "ADDSLOTSRANGE", *self.slots)
            if self.slots == (0, SLOTS - 1):
                await self._cluster_ok()
        return self

    async def __aexit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if self._process is not None:
            await self.kill()
        shutil.rmtree(self.directory)

    async def start(self) -> bool:
        """Start it, again on the same port after `kill`; is it ready?"""
        lines = {
            "bind": "127.0.0.1",
            "dir": str(self.directory),
            "save": '""',
            "repl-diskless-sync-delay": "0",
            "unixsocket": str(self.directory / "socket"),
            **(
                {"port": "0", "tls-port": str(self.port), **self._tls_options()}
                if self.tls
                else {"port": str(self.port)}
            ),
            **({"cluster-enabled": "yes", "cluster-port": str(self.cluster_port)} if self.cluster else {}),
            **self.options,
        }
        configuration = self.directory / "redis.conf"
        configuration.write_text("".join(f"{name} {value}\n" for name, value in lines.items()))
        self._process = await asyncio.create_subprocess_exec(
            needed("redis-server"), configuration, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.STDOUT
        )
        assert self._process.stdout is not None
        said = b""
        async with asyncio.timeout(WAIT_S):
            while line := await self._process.stdout.readline():
                said += line
                if b"Ready to accept connections" in line:
                    self._log = asyncio.create_task(self._process.stdout.read())  # so that the pipe never fills
                    return True
            await self._process.wait()
        (self.directory / "log").write_bytes(said)
        return False

    async def kill(self) -> None:
        """End the process as `kill -9` does."""
        assert self._process is not None
        if self._process.returncode is None:
            self._process.kill()
        await self._process.wait()
        if self._log is not None:
            await self._log

    def pause(self) -> None:
        """It keeps its connections and answers nothing."""
        assert self._process is not None
        self._process.send_signal(signal.SIGSTOP)

    def resume(self) -> None:
        assert self._process is not None
        self._process.send_signal(signal.SIGCONT)

    async def command(self, *words: str | bytes | int) -> Any:
        """What the server answers to one command, as redis-py gives it."""
        async with self.client() as client:
            return await client.execute_command(*words)

    def client(self) -> Redis:
        return Redis.from_url(self.url, protocol=2)

    async def meet(self, other: RedisServer) -> None:
        """Make one cluster of two nodes, which own all slots between them."""
        await self.command("CLUSTER", "MEET", "127.0.0.1", other.port, other.cluster_port)
        await self._cluster_ok()
        await other._cluster_ok()

    async def _cluster_ok(self) -> None:
        async with asyncio.timeout(WAIT_S):
            while b"cluster_state:ok" not in await self.command("CLUSTER", "INFO"):  # noqa: ASYNC110
                await asyncio.sleep(0.01)

    def _tls_options(self) -> dict[str, str]:
        certificate, key = self.directory / "certificate.pem", self.directory / "key.pem"
        return {
            "tls-cert-file": str(certificate),
            "tls-key-file": str(key),
            "tls-ca-cert-file": str(certificate),
            "tls-auth-clients": "no",
        }

    def _make_certificate(self) -> None:
        """One that signs itself, for 127.0.0.1."""
        files = ["-keyout", self.directory / "key.pem", "-out", self.directory / "certificate.pem"]
        kind = ["-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes", "-days", "2"]
        names = ["-subj", "/CN=127.0.0.1", "-addext", "subjectAltName=IP:127.0.0.1"]
        subprocess.run([needed("openssl"), "req", *kind, *names, *files], check=True, capture_output=True)


@asynccontextmanager
async def redis_client() -> AsyncIterator[SyncRedis]:
    """A client of a server of its own, for what waits for nothing but the answer: virtual time."""
    async with RedisServer() as server:
        client = SyncRedis(unix_socket_path=str(server.directory / "socket"))
        try:
            yield client
        finally:
            client.close()


class Proxy:
    """A TCP proxy that breaks what it stands before, when told: `async with Proxy(redis.port) as proxy`."""

    def __init__(self, port: int) -> None:
        self.to_port = port
        """Where new connections go; another server's port makes a failover of it."""
        self.port = 0
        self.delay_s = 0.0
        """What comes from either side is held for so long."""
        self.accepted = 0
        """Connections so far."""
        self.requests = 0
        """Pieces of what clients sent that have arrived here."""
        self.drops_requests = False
        """What clients send vanishes, and their connection stays open: they hear nothing on it any more."""
        self.drops_answers = False
        """The server does what it is asked, and its clients never hear of it."""
        self._server: asyncio.Server | None = None
        self._links: set[asyncio.StreamWriter] = set()
        self._pumps: set[asyncio.Task[None]] = set()

    async def __aenter__(self) -> Proxy:
        self._server = await asyncio.start_server(self._accept, "127.0.0.1", 0)
        self.port = self._server.sockets[0].getsockname()[1]
        return self

    async def __aexit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        assert self._server is not None
        self._server.close()
        self.cut()
        await asyncio.gather(*self._pumps, return_exceptions=True)

    def cut(self) -> None:
        """End all connections at once; new ones are accepted."""
        for writer in list(self._links):
            writer.transport.abort()

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._links.add(writer)
        self.accepted += 1
        try:
            server_reader, server_writer = await asyncio.open_connection("127.0.0.1", self.to_port)
        except OSError:
            writer.transport.abort()
            self._links.discard(writer)
            return
        self._links.add(server_writer)
        ways = [
            self._pump(reader, server_writer, self._takes_request),
            self._pump(server_reader, writer, lambda: self.drops_answers),
        ]
        for pump in map(asyncio.create_task, ways):
            self._pumps.add(pump)
            pump.add_done_callback(self._pumps.discard)

    def _takes_request(self) -> bool:
        self.requests += 1
        return self.drops_requests

    async def _pump(self, source: asyncio.StreamReader, sink: asyncio.StreamWriter, drops: Callable[[], bool]) -> None:
        lost = False  # what follows a gap would be garbage
        try:
            while data := await source.read(65536):
                lost = drops() or lost
                if self.delay_s:
                    await asyncio.sleep(self.delay_s)
                if not lost:
                    sink.write(data)
                    await sink.drain()
        except ConnectionError:
            pass
        finally:
            sink.close()
            self._links.discard(sink)
