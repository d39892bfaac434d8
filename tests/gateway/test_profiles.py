"""What was learned outlives a restart, and a file that holds something else stops nobody."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import pytest

from gateway.pool.learned import LearnedFile
from gateway.telemetry.background import OperationalError
from policies.admission import takeover
from tests.gateway.live import CHAT, Live, Starter, chat, simulated


def learned(live: Live) -> Any:
    return json.loads(json.dumps(takeover.snapshot(live.engine)))


async def use(live: Live, answers: int = 30) -> None:
    for number in range(answers):
        got = await live.ask(CHAT, chat(f"{number}", max_tokens=7, ignore_eos=True))
        assert got.status == 200


async def test_what_was_learned_outlives_a_restart_where_there_is_a_file(start: Starter) -> None:
    file = start.directory / "state" / "learned.json"
    async with simulated(time_scale=0) as sim:
        async with start(sim.url, access_log="off") as live:
            await use(live, 2)
        assert list(start.directory.iterdir()) == []
        async with start(sim.url, state_file=str(file)) as live:
            neutral = learned(live)
            await use(live)
            taught = learned(live)
            assert taught != neutral
        assert [each.name for each in file.parent.iterdir()] == ["learned.json"]
        async with start(sim.url, state_file=str(file)) as live:
            assert learned(live) == taught


def spoiled(good: dict[str, Any], **change: Any) -> bytes:
    return json.dumps({**good, **change}).encode()


BAD: dict[str, Any] = {
    "empty": lambda good: b"",
    "cut": lambda good: json.dumps(good).encode()[:-20],
    "binary": lambda good: b"\x00\xff" * 100,
    "list": lambda good: b"[]",
    "version": lambda good: spoiled(good, version=99),
    "pools": lambda good: spoiled(good, pools={"pool": 5}),
    "inner version": lambda good: spoiled(good, pools={"pool": {**good["pools"]["pool"], "version": 0}}),
    "inner rows": lambda good: spoiled(good, pools={"pool": {**good["pools"]["pool"], "interactions": [["x"]]}}),
    "larger than anything counted": lambda good: spoiled(
        good, pools={"pool": {**good["pools"]["pool"], "interactions": [["t", "a", 1, 10**400]]}}
    ),
    "not finite": lambda good: json.dumps(good).encode().replace(b"[[", b"[[1e999,", 1),
    "deep": lambda good: b"[" * 100_000,
}


@pytest.mark.parametrize("kind", BAD)
async def test_a_corrupt_file_is_kept_aside_and_all_begins_anew(
    start: Starter, kind: str, caplog: pytest.LogCaptureFixture
) -> None:
    file = start.directory / "learned.json"
    async with simulated(time_scale=0) as sim:
        async with start(sim.url, state_file=str(file)) as live:
            neutral = learned(live)
            await use(live)
        content = BAD[kind](json.loads(file.read_bytes()))
        file.write_bytes(content)
        with caplog.at_level(logging.WARNING):
            async with start(sim.url, state_file=str(file)) as live:
                assert learned(live) == neutral
                await use(live, 1)
        assert (start.directory / "learned.json.corrupt").read_bytes() == content
        assert "kept as" in caplog.text
        assert json.loads(file.read_bytes())["version"] == 1


async def test_a_fault_in_one_pool_leaves_none_half_restored(start: Starter) -> None:
    file = start.directory / "learned.json"
    async with simulated(time_scale=0, models=("a",)) as one, simulated(time_scale=0, models=("b",)) as two:
        pools = [{"name": "p", "backends": [{"url": one.url}]}, {"name": "q", "backends": [{"url": two.url}]}]
        async with start(pools=pools, state_file=str(file)) as live:
            neutral = learned(live)
            for number in range(30):
                got = await live.ask(CHAT, {**chat(f"{number}", max_tokens=3, ignore_eos=True), "model": "a"})
                assert got.status == 200
        good = json.loads(file.read_bytes())
        file.write_bytes(spoiled(good, pools={**good["pools"], "q": []}))
        async with start(pools=pools, state_file=str(file)) as live:
            assert learned(live) == neutral


async def test_a_file_is_whole_at_every_moment(start: Starter, monkeypatch: pytest.MonkeyPatch) -> None:
    file = start.directory / "learned.json"
    async with simulated(time_scale=0) as sim, start(sim.url) as live:
        saved = LearnedFile(file, {"pool": live.engine})
        await saved.save()
        before = file.read_bytes()
        await use(live)

        def breaks(self: Path, target: Path) -> Path:
            raise OSError("the disk is gone")

        with monkeypatch.context() as broken:
            broken.setattr(Path, "replace", breaks)
            with pytest.raises(OperationalError, match="the disk is gone"):
                await saved.save()
        assert file.read_bytes() == before
        await saved.save()
        assert file.read_bytes() != before
