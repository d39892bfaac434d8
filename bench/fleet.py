"""Replicas before one engine, with a Redis of their own, and tenants that flood them."""

import asyncio
import contextlib
import os
import random
import shutil
import signal
import sys
import tempfile
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

from redis import Redis

from bench.flood import RAMP_S
from bench.load import Client
from bench.ports import free_port
from bench.shares import Tenant
from bench.stack import PROXY_START_S, BenchError, Engine, Route, fairgate, process, wait_ready

WEIGHTS = {"heavy": 4.0, "light": 1.0}
FAIR_RATIO = WEIGHTS["heavy"] / WEIGHTS["light"]


class RedisProcess:
    """A redis-server of our own."""

    def __init__(self, port: int, pid: int) -> None:
        self.url = f"redis://127.0.0.1:{port}/0"
        self.pid = pid
        self.client = Redis(port=port)

    def calls(self) -> int:
        """Commands that gateways have sent: what scripts call inside is not on the way."""
        stats: dict[str, Any] = self.client.info("commandstats")
        outside = ("evalsha", "eval")
        return sum(int(stats[f"cmdstat_{name}"]["calls"]) for name in outside if f"cmdstat_{name}" in stats)


@contextlib.asynccontextmanager
async def redis_server() -> AsyncIterator[RedisProcess]:
    binary = shutil.which("redis-server")
    if binary is None:
        raise BenchError("redis-server is missing: apt-get install redis-server")
    with tempfile.TemporaryDirectory(prefix="fairgate-bench-") as folder:
        port, log = free_port(), Path(folder, "redis.log")
        command = [binary, "--port", str(port), "--save", "", "--appendonly", "no", "--bind", "127.0.0.1"]
        with process(command, log) as child:
            redis = RedisProcess(port, child.pid)
            for _ in range(100):
                if "Ready to accept" in log.read_text():  # noqa: ASYNC240
                    break
                await asyncio.sleep(0.05)
            else:
                raise BenchError(f"redis-server is not ready:\n{log.read_text()[-2000:]}")  # noqa: ASYNC240
            try:
                yield redis
            finally:
                redis.client.close()
                with contextlib.suppress(ProcessLookupError):
                    os.kill(child.pid, signal.SIGCONT)


@contextlib.asynccontextmanager
async def simulated(profile: str) -> AsyncIterator[Engine]:
    """A simulated vLLM on a free port."""
    with tempfile.TemporaryDirectory(prefix="fairgate-bench-") as folder:
        port, log = free_port(), Path(folder, "engine.log")
        command = [sys.executable, "-m", "gateway.commands.main", "sim", "--port", str(port), "--profile", profile]
        with process([*command, "--model", "tiny"], log) as child:
            url = f"http://127.0.0.1:{port}"
            await wait_ready(url, "/health", child, log, PROXY_START_S)
            yield Engine(url)


class Fleet:
    """Replicas before one engine, with one Redis. `tenants`: their weights."""

    def __init__(self, target: Engine, redis: RedisProcess, stack: contextlib.AsyncExitStack, **fields: Any) -> None:
        self.target = target
        self.redis = redis
        self.routes: list[Route] = []
        self.tenants: dict[str, float] = fields.pop("tenants", WEIGHTS)
        self._fields = fields
        self._stack = stack

    async def add(self, count: int = 1) -> None:
        for _ in range(count):
            state = {"state": self.redis.url} | self._fields
            self.routes.append(await self._stack.enter_async_context(fairgate(self.target.url, self.tenants, **state)))


@contextlib.asynccontextmanager
async def fleet(target: Engine, replicas: int, **fields: Any) -> AsyncIterator[Fleet]:
    await target.wait_idle()
    async with redis_server() as redis, contextlib.AsyncExitStack() as stack:
        found = Fleet(target, redis, stack, **fields)
        await found.add(replicas)
        yield found


class Floods:
    """Both tenants at once, each at the routes that `where` names, and what they had by when."""

    def __init__(self, routes: list[Route], where: Callable[[str], int], clients: int) -> None:
        self.tenants = {
            name: Tenant(routes, name, 1, clients, lambda name=name: where(name))  # type: ignore[misc]
            for name in WEIGHTS
        }

    async def shares(self, window_s: float) -> dict[str, Any]:
        """How far the ratio of what both get from now on is from that of their weights."""
        before = {name: tenant.service() for name, tenant in self.tenants.items()}
        await asyncio.sleep(window_s)
        got = {name: tenant.service() - before[name] for name, tenant in self.tenants.items()}
        ratio = got["heavy"] / got["light"] if got["light"] else float("inf")
        return {"service": got, "ratio": ratio, "off": abs(ratio / FAIR_RATIO - 1)}

    def add(self, route: Route) -> None:
        """One more that `where` may name."""
        for tenant in self.tenants.values():
            tenant.clients.append(Client(route.url))

    @property
    def failed(self) -> int:
        return sum(tenant.failed for tenant in self.tenants.values())

    async def stop(self) -> None:
        await asyncio.gather(*(tenant.stop() for tenant in self.tenants.values()))


def skewed(replicas: int, share: float = 1.0, moves_s: float = float("inf")) -> Callable[[str], int]:
    """So much of each tenant's traffic comes to its own half of the replicas; the halves change places now and then."""
    rng, half = random.Random(2026), replicas // 2
    begin_s = asyncio.get_running_loop().time()

    def where(tenant: str) -> int:
        own = (tenant == "light") ^ (rng.random() >= share)
        moved = int((asyncio.get_running_loop().time() - begin_s) / moves_s) % 2
        return rng.randrange(half) + half * (int(own) ^ moved)

    return where


@contextlib.asynccontextmanager
async def flooded(routes: list[Route], where: Callable[[str], int], clients: int) -> AsyncIterator[Floods]:
    floods = Floods(routes, where, clients)
    try:
        await asyncio.sleep(RAMP_S)
        yield floods
    finally:
        await floods.stop()
