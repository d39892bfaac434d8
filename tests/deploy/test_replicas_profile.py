"""Compose's profile `cpu-replicas` from the very files that ship: two gateways, a Redis and nginx, as processes in
network namespaces. Shares, a replica that dies, and a restart of one after the other."""

from __future__ import annotations

import asyncio
import json
import re
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import aiohttp
import pytest

from tests.deploy.clients import Clients
from tests.deploy.composition import Composition, Service
from tests.deploy.conftest import COMPOSE, Images
from tests.waiting import WAIT_S

pytestmark = pytest.mark.deploy

CONFIG = "/etc/fairgate/config.yaml"
SHARES_S = 20.0
RESTARTS = 6
SETTLE_S = 10.0
"""Between two restarts, as docs/deploying.md has it: nginx asks for the names every 5 s."""


class Deployed:
    """The profile, a key for each tenant, and the way in."""

    def __init__(self, composition: Composition, http: aiohttp.ClientSession) -> None:
        self.replicas = composition.services["replica"]
        self.balancer = composition.services["balancer"][0]
        self.redis = composition.services["redis"][0]
        self.http = http
        self.keys: dict[str, str] = {}

    def clients(self, tenant: str, tokens: int = 32) -> Clients:
        return Clients(self.http, f"http://{self.balancer.address}:8080", self.keys[tenant], tokens)

    async def create_keys(self) -> None:
        """As config.compose.yaml says."""
        for tenant in ("alice", "bob"):
            command = ["fairgate", "keys", "create", "--tenant", tenant, "-c", CONFIG]
            status, said = await self.replicas[0].container.execute(command)
            assert status == 0, said
            [self.keys[tenant]] = re.findall(r"key: +(\S+)", said)
        async with asyncio.timeout(WAIT_S):
            for tenant in self.keys:
                while await self.clients(tenant).ask(stream=False):  # noqa: ASYNC110  # a new key is known within a second
                    await asyncio.sleep(0.2)

    def served_by(self, replica: Service) -> int:
        """How many requests it has completed since it was first started."""
        return replica.container.said.count('"outcome":"completed"')

    async def until_used(self, replica: Service) -> None:
        """Until the balancer has found it."""
        before = self.served_by(replica)
        async with asyncio.timeout(WAIT_S):
            while self.served_by(replica) == before:  # noqa: ASYNC110
                await asyncio.sleep(0.1)


@pytest.fixture
async def deployed(images: Images, tmp_path: Path) -> AsyncIterator[Deployed]:
    async with running(images, tmp_path) as found:
        yield found


@asynccontextmanager
async def running(images: Images, folder: Path) -> AsyncIterator[Deployed]:
    environment = {"REDIS_PASSWORD": "secret"}
    async with (
        Composition(COMPOSE, "cpu-replicas", images, folder, environment) as composition,
        aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0), timeout=aiohttp.ClientTimeout(total=WAIT_S)
        ) as http,
    ):
        for service in composition.all():
            await service.until_healthy()
        found = Deployed(composition, http)
        await found.create_keys()
        yield found


async def test_both_replicas_together_give_each_tenant_its_share(deployed: Deployed) -> None:
    alice, bob = deployed.clients("alice"), deployed.clients("bob")
    async with alice.asking(40), bob.asking(120):
        await asyncio.sleep(5)  # until both have more waiting than the engine can start
        before = alice.served, bob.served
        await asyncio.sleep(SHARES_S)
        shares = alice.served - before[0], bob.served - before[1]
    each = [deployed.served_by(replica) for replica in deployed.replicas]
    print(f"\nshares of weight 1:1, 40 and 120 clients: {shares}; served by the replicas: {each}")
    assert not alice.failed + bob.failed
    assert 0.9 < shares[0] / shares[1] < 1.1
    assert min(each) > 0.3 * sum(each), "nginx spreads what comes"
    line = json.loads(next(line for line in deployed.replicas[0].container.said.splitlines() if '"completed"' in line))
    assert line["client"].endswith(".1"), "the address of the client, not that of nginx"


async def test_a_replica_that_is_killed_takes_only_what_it_had_under_way(deployed: Deployed) -> None:
    alice = deployed.clients("alice")
    killed, other = deployed.replicas
    async with alice.asking(16):
        await deployed.until_used(killed)
        assert alice.failed == []
        await killed.remove()
        await asyncio.sleep(1)  # what was under way there has failed by now
        failed_at_once, served = len(alice.failed), alice.served
        async with asyncio.timeout(WAIT_S):
            while alice.served < served + 200:  # noqa: ASYNC110
                await asyncio.sleep(0.05)
        assert len(alice.failed) == failed_at_once, alice.faults()
        await killed.start()
        await killed.until_healthy()
        await deployed.until_used(killed)
    print(f"\nkilled: {len(alice.failed)} of 16 clients failed once, {alice.served} served; by the other: ", end="")
    print(deployed.served_by(other))
    assert len(alice.failed) == failed_at_once <= 16, alice.faults()


async def test_a_rolling_restart_fails_no_request(deployed: Deployed) -> None:
    short, long = deployed.clients("alice", tokens=1), deployed.clients("bob", tokens=100)
    began_s = time.monotonic()
    async with short.asking(24), long.asking(12):
        for _ in range(RESTARTS // 2):
            for replica in deployed.replicas:
                assert await replica.stop() == 0
                await replica.start()
                await replica.until_healthy()
                await asyncio.sleep(SETTLE_S)
    took_s = time.monotonic() - began_s
    faults = dict(short.faults() + long.faults())
    print(
        f"\n{RESTARTS} restarts in {took_s:.0f} s: {short.served} short and {long.served} long served, failed: {faults}"
    )
    assert min(short.served, long.served) > 50
    assert faults == {}
