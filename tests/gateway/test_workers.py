"""Several processes on one port: who they are, what each owns, and what happens when they end."""

from __future__ import annotations

import json
import os
import signal
import stat
from pathlib import Path

import pytest

from gateway.config import machine
from gateway.config.load import Overrides, load_config
from gateway.config.memory_bounds import MEMORY_MAX_LEAST
from gateway.config.model import Config
from gateway.process.supervisor import share_of
from tests.gateway.capture import Upstream
from tests.gateway.live import until
from tests.kit.served import Streams, config_file
from tests.kit.working import WORKERS, working


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
        "pools": [{"name": "p", "backends": [{"url": "http://a:1", "max_num_seqs": 33}]}],
        "tenants": [{"name": "a", "quota": {"tokens_per_day": 400}}, {"name": "b"}],
        "limits": {"queue_requests_max": 1000, "connections_max": 100},
    })  # fmt: skip
    first, last = share_of(config, 0), share_of(config, 3)
    assert (first.state_file, last.state_file) == ("/tmp/learned.json", None)
    assert (last.limits.queue_requests_max, last.limits.connections_max) == (250, 25)
    assert last.memory_max == config.memory_max, "is what each process has"
    assert (last.pools, last.quota, last.tenants) == (config.pools, config.quota, config.tenants)


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
    assert load_config(path).workers == load_config(path, Overrides(workers="auto")).workers == expected
    assert load_config(config_file(tmp_path, "sim:demo", workers="auto")).workers == 1, "an engine is in one process"
