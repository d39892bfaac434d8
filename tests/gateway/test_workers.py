"""Several processes on one port are one gateway: what each owns, what they do together, what happens at their end."""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
import stat
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from gateway.config import machine
from gateway.config.load import load_config
from gateway.config.memory_bounds import MEMORY_MAX_LEAST
from gateway.config.model import Config
from gateway.process.supervisor import share_of
from tests.commands import Running, run, running
from tests.gateway.capture import Upstream
from tests.gateway.live import CHAT, SMALL, Answer, Simulated, chat, simulated, until
from tests.gateway.load import tenants
from tests.kit.floods import Flood, answered
from tests.kit.served import Streams, config_file
from tests.kit.working import WORKERS, Workers, working
from tests.redis_server import RedisServer
from tests.waiting import eventually


def meeting_of(pid: int) -> Path:
    """The directory where a hub meets its workers."""
    inodes = {os.readlink(link)[8:-1] for link in Path(f"/proc/{pid}/fd").iterdir() if link.is_symlink()}
    lines = [line.split() for line in Path("/proc/net/unix").read_text().splitlines()]
    [path] = {line[7] for line in lines if line[6] in inodes and line[-1].endswith("/exchange")}
    return Path(path).parent


async def test_connections_are_spread_and_every_worker_knows_the_keys(tmp_path: Path) -> None:
    log = tmp_path / "access.log"
    async with Upstream(Streams()) as upstream:
        async with working(tmp_path, upstream.url, access_log=str(log)) as gate:
            for _ in range(40):
                assert await gate.serves()
            gate.command.signal(signal.SIGTERM)
            assert await gate.command.ended() == 0
        assert "Traceback" not in gate.command.said
        lines = [json.loads(line) for line in log.read_text().splitlines()]  # whole lines, whoever wrote them
        assert len(lines) == 40
        by_worker = {line["request_id"][:16] for line in lines}
        assert len(by_worker) == WORKERS


async def test_a_worker_that_dies_is_started_again_and_all_end_with_their_supervisor(tmp_path: Path) -> None:
    engine = Streams()
    async with Upstream(engine) as upstream, working(tmp_path, upstream.url) as gate:
        before = gate.pids()
        os.kill(before[0], signal.SIGKILL)
        await gate.command.says(r"worker 0 was ended by signal 9; started again in 0\.1 s")
        for _ in range(20):
            assert await gate.serves()  # what the kernel gives to the dead one waits for its successor
        await until(lambda: gate.pids()[0] != before[0])
        again, other = gate.pids()
        assert other == before[1]
        os.kill(again, signal.SIGKILL)
        await gate.command.says(r"worker 0 was ended by signal 9; started again in 0\.2 s")
        await until(lambda: gate.pids()[0] != again)
        pids = [*gate.pids(), gate.hub()]
        directory = meeting_of(gate.hub())
        assert stat.S_IMODE(directory.stat().st_mode) == 0o700
        gate.command.process.kill()
        await until(lambda: not any(Path(f"/proc/{pid}").exists() for pid in pids))
        assert not directory.exists()


def test_a_worker_owns_its_part_of_what_one_machine_has() -> None:
    config = Config.model_validate({
        "workers": 4,
        "state_file": "/tmp/learned.json",
        "usage": "/tmp/usage.db",
        "pools": [{"name": "p", "backends": [{"url": "http://a:1", "max_num_seqs": 33}]}],
        "tenants": [{"name": "a", "quota": {"tokens_per_day": 400}}, {"name": "b"}],
        "limits": {"queue_requests_max": 1000, "connections_max": 100},
    })  # fmt: skip
    first, last = share_of(config, 0), share_of(config, 3)
    assert (first.state_file, last.state_file) == ("/tmp/learned.json", None)
    assert (last.limits.queue_requests_max, last.limits.connections_max) == (250, 25)
    assert last.memory_max == config.memory_max, "is what each process has"
    shared = (config.pools, config.quota, config.tenants, config.usage)
    assert (last.pools, last.quota, last.tenants, last.usage) == shared


SUPERVISED = """
import os, signal, sys
from gateway.config.model import Config
from gateway.process.supervisor import supervise

def serve(config, child):
    if child.name == sys.argv[1]:
        sys.exit(2)
    stop = lambda: os.kill(os.getppid(), signal.SIGTERM)
    signal.signal(signal.SIGTERM, lambda *_: (stop(), sys.exit(1)))  # a second signal
    if child.name == sys.argv[2]:
        stop()
    while True:
        signal.pause()

config = Config.model_validate({
    "workers": 2, "listen": "127.0.0.1:0", "admin": "127.0.0.1:0",
    "pools": [{"name": "p", "backends": [{"url": "http://a:1"}]}],
})
sys.exit(supervise(config, serve, serve, lambda *ports: None))
"""


@pytest.mark.parametrize(
    ("cannot_serve", "stops", "status"), [("worker 1", "", 2), ("", "worker 0", 0)], ids=["cannot serve", "is stopped"]
)
def test_the_status_is_that_of_a_worker_that_cannot_serve_and_of_none_that_is_stopped(
    cannot_serve: str, stops: str, status: int
) -> None:
    command = [sys.executable, "-c", SUPERVISED, cannot_serve, stops]
    assert subprocess.run(command, timeout=60, check=False).returncode == status


MIB = 1 << 20


@pytest.mark.parametrize(
    ("files", "workers", "expected"),
    [
        ([], 1, machine.MEMORY_OF_MACHINE),
        (["max\n"], 1, machine.MEMORY_OF_MACHINE),
        ([f"{512 * MIB}\n"], 1, 448 * MIB),
        ([None, f"{1024 * MIB}\n"], 1, 896 * MIB),
        (["max", "9223372036854771712"], 1, machine.MEMORY_OF_MACHINE),
        ([f"{1024 * MIB}"], 4, 224 * MIB),
        ([f"{1024 * MIB}"], "auto", 448 * MIB),
        ([f"{64 * MIB}"], 1, MEMORY_MAX_LEAST),
        ([], 5, 16384 * MIB // 2 // 5),
    ],
)
def test_auto_is_the_memory_that_the_container_allows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, files: list[str | None], workers: int | str, expected: int
) -> None:
    paths = (tmp_path / "2", tmp_path / "1")
    for path, text in zip(paths, files, strict=False):
        if text is not None:
            path.write_text(text)
    monkeypatch.setattr(machine, "MEMORY", paths)
    monkeypatch.setattr(machine, "cores", lambda: 2)
    monkeypatch.setattr(os, "sysconf", {"SC_PAGE_SIZE": 4096, "SC_PHYS_PAGES": 16384 * MIB // 4096}.__getitem__)
    more = {} if workers == 1 else {"workers": workers}
    for written in ({}, {"memory_max": "auto"}):
        assert load_config(config_file(tmp_path, "http://127.0.0.1:1", **more, **written)).memory_max == expected


@pytest.mark.parametrize(
    ("quota", "affinity", "expected"),
    [
        (None, 8, 8),
        ("max 100000\n", 8, 8),
        ("250000 100000\n", 8, 3),
        ("50000 100000\n", 8, 1),
        ("900000 100000\n", 2, 2),
    ],
)
def test_auto_is_a_worker_for_each_core_that_may_be_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, quota: str | None, affinity: int, expected: int
) -> None:
    if quota is not None:
        (tmp_path / "cpu.max").write_text(quota)
    monkeypatch.setattr(machine, "QUOTA", tmp_path / "cpu.max")
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(affinity)))
    path = config_file(tmp_path, "http://127.0.0.1:1", workers="auto")
    assert load_config(path).workers == load_config(path, workers="auto").workers == expected
    assert load_config(config_file(tmp_path, "sim:demo", workers="auto")).workers == 1, "an engine is in one process"


# --- several workers are one gateway, whatever worker a connection comes to ---


OUTPUT_TOKENS = 5
ENGINE = replace(SMALL, base_s=2e-2)
"""Slow enough that it is short of slots, not this process of time."""
CONNECTIONS_MAX = 200
"""To find one that the kernel gives to a certain worker."""


class Gate(Workers):
    """A running gateway with its workers, and connections to each of them."""

    def __init__(
        self, command: Running, http: aiohttp.ClientSession, url: str, admin: str, stack: AsyncExitStack
    ) -> None:
        super().__init__(command, http, url, admin, key="")
        self.workers: list[str] = []
        """The beginning of the ids of each worker's requests: it names the process."""
        self._stack = stack

    async def connection(self, worker: str | None = None) -> tuple[aiohttp.ClientSession, str]:
        """A connection that stays, to this worker; else to any. And which it is."""
        for _ in range(CONNECTIONS_MAX):
            connector = aiohttp.TCPConnector(limit=1)
            session = await self._stack.enter_async_context(aiohttp.ClientSession(self.url, connector=connector))
            got = await self.request(session, "probe", max_tokens=1)
            assert got.status == 200
            found = got.headers["x-request-id"][:16]
            if worker in (None, found):
                return session, found
            await session.close()
        raise AssertionError(f"no connection of {CONNECTIONS_MAX} came to {worker}")

    async def request(self, session: aiohttp.ClientSession, tenant: str, **fields: Any) -> Answer:
        headers = {"authorization": f"Bearer key-of-{tenant}"}
        async with session.post(CHAT, json=chat(tenant, ignore_eos=True, **fields), headers=headers) as response:
            return await Answer.of(response)

    async def flood(self, tenant: str, worker: str, clients: int) -> Flood:
        """Let so many clients flood one worker, each on a connection of its own."""
        sessions = [(await self.connection(worker))[0] for _ in range(clients)]
        return Flood(tenant, [partial(self.request, each, tenant, max_tokens=OUTPUT_TOKENS) for each in sessions])

    async def find_workers(self) -> None:
        """Both of them, as they are now."""
        self.workers = []
        while len(self.workers) < WORKERS:
            session, worker = await self.connection()
            await session.close()
            if worker not in self.workers:
                self.workers.append(worker)

    async def see(self, path: str, method: str = "GET") -> Any:
        """What the admin listener answers."""
        async with self.http.request(method, self.admin + path) as response:
            text = await response.text()
            assert response.status == 200, text
            return json.loads(text) if response.content_type == "application/json" else text

    async def is_shared(self) -> bool:
        async with self.http.get(self.admin + "/ready") as response:
            return dict(await response.json()).get("state") == "shared"


async def is_full(gate: Gate) -> bool:
    """Do the workers together use the engine?"""
    [pool] = (await gate.see("/state"))["pools"]
    return bool(pool["backends"][0]["running_sequences"] >= ENGINE.max_num_seqs - 1)


@asynccontextmanager
async def gate_of(directory: Path, engine: Simulated, **fields: Any) -> AsyncIterator[Gate]:
    """The number of slots is configured: all workers together keep to it."""
    pools = [{"name": "pool", "backends": [{"url": engine.url, "max_num_seqs": ENGINE.max_num_seqs}]}]
    named = tenants(heavy=4, light=1, probe=1)
    config = config_file(
        directory,
        engine.url,
        workers=WORKERS,
        pools=pools,
        policy="vtc",
        tenants=named,
        access_log="off",
        drain_s=1,
        **fields,
    )
    async with running("serve", "-c", config) as command, AsyncExitStack() as stack:
        found = await command.says(r"serving on (http://\S+) with 2 workers, admin on (http://\S+) for all of them")
        http = await stack.enter_async_context(aiohttp.ClientSession())
        gate = Gate(command, http, found[1], found[2], stack)
        await until(lambda: len(gate.pids()) == WORKERS)
        await gate.find_workers()
        yield gate
        assert "Traceback" not in command.said, command.said


async def test_one_worker_may_use_the_whole_engine_and_all_answers_are_of_all_workers(tmp_path: Path) -> None:
    async with simulated(ENGINE) as engine, gate_of(tmp_path, engine) as gate:
        ours, others = gate.workers
        heavy, light = await gate.flood("heavy", ours, 12), await gate.flood("light", ours, 12)
        await eventually(lambda: is_full(gate))
        [pool] = (await gate.see("/state"))["pools"]
        assert pool["queued_requests"] == sum(one["queued_requests"] for one in pool["tenants"]) > 0
        assert pool["limited_by_is"].startswith(f"{pool['queued_requests']} requests ")
        await answered(heavy, light, more=200)
        [served] = (await gate.see("/state"))["pools"]
        shares = {one["tenant"]: one["share_received"] for one in served["tenants"]}
        assert shares["heavy"] > shares["light"]
        sessions = [(await gate.connection(each))[0] for each in (others, ours)]
        for session in sessions:
            async with session.get("/fairgate/me", headers={"authorization": "Bearer key-of-heavy"}) as response:
                [own] = (await response.json())["pools"]
            assert own["interactive"]["queued_requests"] + own["interactive"]["running_requests"] > 0
        asked = [await gate.request(session, "probe", max_tokens=1) for session in sessions]
        ids = [each.headers["x-request-id"] for each in asked]
        assert {each[:16] for each in ids} == set(gate.workers)
        for each in ids:
            assert (await gate.see(f"/explain/{each}"))["state"] == "dispatched"
        code, out, said = await run("top", "--admin", gate.admin)
        assert (code, said) == (0, "")
        assert re.search(r"^heavy +4 ", out, re.M)
        await asyncio.gather(heavy.end(), light.end())
        [name] = [one["backend"] for one in (await gate.see("/state"))["pools"][0]["backends"]]
        drained = await gate.see(f"/drain/{name}", "POST")
        assert (drained["drained"], drained["running"], "no backend" in drained["warning"]) == (True, 0, True)
        assert (await gate.see(f"/resume/{name}", "POST"))["in_service"]
        page = await gate.see("/metrics")
        ended = re.findall(r'^fairgate_requests_total\{.*tenant="(\w+)"\} (\d+)\.0$', page, re.M)
        assert dict(ended)["heavy"] == str(heavy.answers)
        assert "fairgate_workers 2.0" in page
        assert re.search(r"^fairgate_backend_slots\{.*\} 8\.0$", page, re.M), "which both see of one engine"


async def test_the_hub_may_die_and_workers_go_on(tmp_path: Path) -> None:
    async with simulated(ENGINE) as engine, gate_of(tmp_path, engine) as gate:
        floods = [await gate.flood(name, gate.workers[at], 6) for at, name in enumerate(("heavy", "light"))]
        await answered(*floods, more=50)
        assert await gate.is_shared()
        hub = gate.hub()
        os.kill(hub, signal.SIGSTOP)  # as good as gone, and not started again
        await gate.command.says("state is not shared, this worker goes on with what it knows: the hub has not answered")
        await answered(*floods, more=50)
        os.kill(hub, signal.SIGKILL)
        await gate.command.says(r"the hub was ended by signal 9; started again in 0\.1 s")
        await eventually(gate.is_shared)  # who asks meanwhile waits for the next hub
        await answered(*floods, more=50)
        await asyncio.gather(*(flood.end() for flood in floods))


async def test_with_a_redis_any_worker_answers_for_all(tmp_path: Path) -> None:
    async with (
        RedisServer() as redis,
        simulated(ENGINE) as engine,
        gate_of(tmp_path, engine, state=redis.url) as gate,
    ):
        heavy, light = await gate.flood("heavy", gate.workers[0], 12), await gate.flood("light", gate.workers[1], 12)
        await answered(heavy, light, more=100)

        async def shows_both() -> bool:
            [pool] = (await gate.see("/state"))["pools"]
            at = {one["gateway"].partition(" ")[2]: one["queued_requests"] for one in pool["gateways"]}
            return at.keys() == {"worker 0", "worker 1"} and all(at.values())

        await eventually(shows_both)
        [served] = (await gate.see("/state"))["pools"]
        ended = sum(one["ended_requests"]["completed"] for one in served["tenants"] if one["tenant"] != "probe")
        answers = heavy.answers + light.answers
        await asyncio.gather(heavy.end(), light.end())
        assert 0 < ended <= answers + 24, "each end counts once; what was under way may not have been read"
