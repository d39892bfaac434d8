"""Several processes on one port: who they are, what each owns, and what happens when they end."""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from gateway.config.model import Config, StateConfig
from gateway.workers import share_of
from policies.capacity.gauges import CapacitySettings, Gauges
from policies.capacity.lease import Lease
from policies.capacity.ledger import BackendLedger
from tests.gateway.capture import Upstream
from tests.gateway.live import chat, events, until
from tests.gateway.test_command_line import DONE, OK, Running, Streams, _refused, config_file, run, running, token
from tests.policies.making import make_request

WORKERS = 2


class Workers:
    """A running gateway of several processes."""

    def __init__(self, command: Running, url: str, key: str) -> None:
        self.command = command
        self.url = url
        self.key = key

    def pids(self) -> list[int]:
        """The processes that serve now."""
        pid = self.command.process.pid
        return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]

    def admins(self) -> list[str]:
        """The admin listener of each worker, the last that it said."""
        found = re.findall(r"worker (\d): admin on (http://\S+)", self.command.said)
        return [url for _, url in sorted(dict(found).items())]

    @asynccontextmanager
    async def ask(self, **fields: Any) -> AsyncIterator[aiohttp.ClientResponse]:
        """On a connection of its own."""
        headers = {"authorization": f"Bearer {self.key}"}
        async with aiohttp.ClientSession() as http:
            async with http.post(self.url + "/v1/chat/completions", json=chat(**fields), headers=headers) as response:
                yield response

    async def serves(self) -> bool:
        async with self.ask() as response:
            return await response.read() == OK.partition(b"\r\n\r\n")[2]


@asynccontextmanager
async def working(directory: Path, url: str, **fields: Any) -> AsyncIterator[Workers]:
    config = config_file(directory, url, workers=WORKERS, **fields)
    async with running("serve", "-c", config) as command:
        found = await command.says(r"serving on (http://\S+) with 2 workers")
        key = await command.says(r"alice +(fg-\S+)")
        started = Workers(command, found[1], key[1])
        await until(lambda: len(started.admins()) == WORKERS)
        yield started


async def test_connections_are_spread_and_every_worker_knows_the_keys(tmp_path: Path) -> None:
    log = tmp_path / "access.log"
    async with Upstream(Streams()) as upstream:
        async with working(tmp_path, upstream.url, access_log=str(log)) as gate:
            assert "each worker owns 1/2 of every engine and every limit" in gate.command.said
            for _ in range(40):
                assert await gate.serves()
            gate.command.signal(signal.SIGTERM)
            assert await gate.command.ended() == 0
        assert "Traceback" not in gate.command.said
        lines = [json.loads(line) for line in log.read_text().splitlines()]  # whole lines, whoever wrote them
        assert len(lines) == 40
        by_worker = {line["request_id"][:16] for line in lines}
        assert len(by_worker) == WORKERS


async def test_each_worker_has_an_admin_listener_and_its_part_of_the_engine(tmp_path: Path) -> None:
    async with Upstream(Streams()) as upstream, aiohttp.ClientSession() as http:
        pools = [{"name": "pool", "backends": [{"url": upstream.url, "max_num_seqs": 9}]}]
        async with working(tmp_path, upstream.url, pools=pools) as gate:
            for admin in gate.admins():
                async with http.get(admin + "/metrics") as page:
                    assert re.search(r"^fairgate_backend_slots\{.*\} 4\.0$", await page.text(), re.M)


async def test_sigterm_lets_streams_end_and_takes_no_more(tmp_path: Path) -> None:
    engine = Streams()
    async with Upstream(engine) as upstream, working(tmp_path, upstream.url) as gate:
        async with gate.ask(stream=True) as response:
            assert await response.content.readexactly(len(token("a"))) == token("a")
            gate.command.signal(signal.SIGTERM)
            await gate.command.says("draining")
            await until(lambda: _refused(gate.url))
            engine.go_on.set()
            assert await response.content.read() == token("b", "stop") + DONE
        assert await gate.command.ended() == 0
        assert "Traceback" not in gate.command.said


async def test_a_second_signal_ends_at_once(tmp_path: Path) -> None:
    async with Upstream(Streams()) as upstream, working(tmp_path, upstream.url, drain_s=3600) as gate:
        async with gate.ask(stream=True) as response:
            await response.content.readexactly(len(token("a")))
            gate.command.signal(signal.SIGTERM)
            await gate.command.says("draining")
            await until(lambda: _refused(gate.url))
            gate.command.signal(signal.SIGINT)
            rest = await response.content.read()
        assert events(rest)[-1]["error"]["code"] == "draining"
        assert await gate.command.ended() == 0


async def test_a_worker_that_dies_is_started_again_and_the_other_goes_on(tmp_path: Path) -> None:
    engine = Streams()
    async with Upstream(engine) as upstream, working(tmp_path, upstream.url) as gate:
        before = gate.pids()
        os.kill(before[0], signal.SIGKILL)
        await gate.command.says(r"worker 0 was ended by signal 9; started again in 0\.1 s")
        for _ in range(20):
            assert await gate.serves()  # what the kernel gives to the dead one waits for its successor
        after = gate.pids()
        assert len(after) == WORKERS
        assert before[1] in after
        os.kill(next(pid for pid in after if pid != before[1]), signal.SIGKILL)
        await gate.command.says(r"worker 0 was ended by signal 9; started again in 0\.2 s")


async def test_workers_end_with_their_supervisor(tmp_path: Path) -> None:
    async with Upstream(Streams()) as upstream, working(tmp_path, upstream.url) as gate:
        pids = gate.pids()
        gate.command.process.kill()
        await until(lambda: not any(Path(f"/proc/{pid}").exists() for pid in pids))


async def test_a_taken_port_is_said_at_once(tmp_path: Path) -> None:
    async with Upstream(Streams()) as upstream, working(tmp_path, upstream.url) as gate:
        port = gate.url.rpartition(":")[2]
        listen = f"127.0.0.1:{port}"
        code, _, said = await run("serve", "-c", config_file(tmp_path, upstream.url, workers=2, listen=listen))
        assert (code, "another process listens there" in said) == (1, True)


async def test_workers_that_cannot_listen_end_all(tmp_path: Path) -> None:
    async with Upstream(Streams()) as upstream:
        server = await asyncio.start_server(lambda reader, writer: None, "127.0.0.1", 0)
        admin = f"127.0.0.1:{server.sockets[0].getsockname()[1]}"
        code, _, said = await run("serve", "-c", config_file(tmp_path, upstream.url, workers=2, admin=admin))
        assert (code, "another process listens there" in said) == (1, True)
        server.close()


@pytest.mark.parametrize(
    ("fields", "fault"),
    [
        ({"workers": 0}, "workers: should be greater than or equal to 1"),
        ({"workers": 3, "listen": "127.0.0.1:8192", "admin": "127.0.0.1:8190"}, "admin: takes 3 ports"),
        ({"workers": 9, "admin": "127.0.0.1:65530"}, "admin: takes 9 ports, one for each worker: begin lower"),
        ({"workers": 2, "pools": [{"name": "p", "backends": [{"url": "sim:a"}]}]}, "workers: several cannot share"),
    ],
)
async def test_what_cannot_be_is_a_fault_of_the_config(tmp_path: Path, fields: dict[str, Any], fault: str) -> None:
    code, _, said = await run("check", config_file(tmp_path, "http://127.0.0.1:1", **fields))
    assert code == 2
    assert fault in said


def test_a_worker_owns_its_part_of_whatever_is_counted() -> None:
    config = Config.model_validate({
        "workers": 4,
        "admin": "127.0.0.1:8190",
        "state_file": "/tmp/learned.json",
        "policy": {"name": "rpm", "requests_per_minute": 100},
        "pools": [{
            "name": "p",
            "backends": [{"url": "http://a:1", "max_num_seqs": 33}],
            "capacity": {"max_concurrency": 2},
        }],
        "tenants": [{"name": "a", "quota": {"tokens_per_day": 400}}, {"name": "b"}],
        "quota": {"concurrent": 8},
        "throttle": {"user": {"starts": 60}},
        "limits": {"queue_requests_max": 1000, "queue_bytes_max": 40_000_000, "connections_max": 100},
    })  # fmt: skip
    share = share_of(config, 3)
    assert (share.admin, share.state_file) == ("127.0.0.1:8193", "/tmp/learned.json.3")
    assert share.policy.settings() == {"requests_per_minute": 25}
    assert (share.pools[0].backends[0].max_num_seqs, share.pools[0].capacity.max_concurrency) == (8, 1)
    assert share.tenants[0].quota is not None
    assert (share.tenants[0].quota.tokens_per_day, share.tenants[1].quota) == (100, None)
    assert (share.quota.concurrent, share.quota.tokens_per_day) == (2, None)
    assert (share.throttle.user.starts, share.throttle.user.tokens) == (15, "auto")
    assert (share.limits.queue_requests_max, share.limits.connections_max) == (250, 25)
    assert share.limits.queue_bytes_max == config.limits.body_bytes_max  # the largest request must still fit
    sharing = share_of(config.model_copy(update={"state": StateConfig.model_validate({"url": "redis://h"})}), 3)
    assert (sharing.admin, sharing.limits, sharing.quota) == (share.admin, share.limits, config.quota)
    assert (sharing.pools, sharing.policy) == (config.pools, config.policy)


def test_a_worker_owns_its_part_of_what_a_policy_counts_unasked() -> None:
    def parts(policy: str) -> dict[str, Any]:
        pools = [{"name": "p", "backends": [{"url": "http://a:1"}]}]
        config = Config.model_validate({"workers": 4, "policy": policy, "open_access": True, "pools": pools})
        return share_of(config, 0).policy.settings()

    assert parts("rpm") == {"requests_per_minute": 7}, "a quarter of its default"
    assert parts("vtc") == {}


def test_a_ledger_counts_its_part_of_what_an_engine_says() -> None:
    said = Gauges(0.0, running=6, waiting=3, kv_usage=0.5, kv_capacity_tokens=1000)
    half = said.scaled(0.5)
    assert (half.running, half.waiting, half.kv_usage, half.kv_capacity_tokens) == (3, 2, 0.5, 500)
    assert said.scaled(1.0) == said

    def ledger(part: float) -> BackendLedger:
        """With eight requests dispatched, of which the engine says that it runs six and three wait."""
        made = BackendLedger("b", CapacitySettings(part=part, waiting_target=2))
        for _ in range(8):
            made.add(Lease(make_request(), "b", 0.0))
        made.observe(said, 0.0)
        return made

    of_half, of_whole = ledger(0.5), ledger(1.0)
    assert (of_half.kv.capacity_tokens, of_whole.kv.capacity_tokens) == (500, 1000)
    assert (of_half.occupancy(None, None, 0.0)[0], of_whole.occupancy(None, None, 0.0)[0]) == (0.5, 0.5)
    # Two that wait are as many as may; three are a queue inside the engine, until the gauge is too old to be trusted.
    assert (of_half.opens_s(0.0), of_whole.opens_s(0.0)) == (None, 1.0)
    # Once nobody waits, as many slots are believed as are seen to run.
    for one in (of_half, of_whole):
        one.observe(replace(said, waiting=0, running=12), 0.1)
    assert (of_half.slots.count, of_whole.slots.count) == (6, 8)
