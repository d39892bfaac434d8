"""Reloads while requests come, wait and run: from random files, and of replicas that take turns."""

from __future__ import annotations

import asyncio
import random
from contextlib import AsyncExitStack
from functools import partial
from pathlib import Path
from typing import Any

from gateway.config.sections.keys import hash_key
from gateway.pool.replication.ticker import Exchanges
from tests.gateway.live import Answer, Simulated, simulated, until
from tests.kit.reloading import ALICE, BOB, is_whole, pool, reloadable
from tests.redis_server import RedisServer


def tenants_of(*weights: int, also: int = 0) -> list[dict[str, Any]]:
    named = zip(("alice", "bob"), (ALICE, BOB), weights, strict=True)
    others = [{"name": f"other-{number}", "weight": 2} for number in range(also)]
    return [{"name": name, "weight": weight, "keys": [hash_key(key)]} for name, key, weight in named] + others


POLICIES = [
    "fairserve",
    "vtc",
    "wsc",
    "rr",
    {"name": "fairserve", "window_tokens": 100},
    {"name": "dlpm", "quantum": 500},
]
WRONG: list[dict[str, Any]] = [
    {"policy": "vtx"}, {"drain_s": -1}, {"tenants": []}, {"listen": "127.0.0.1:1"}, {"workers": 2},
    {"access_log": "/no/such/directory/log"}, {"limits": {"attempts_max": 0}},
]  # fmt: skip


def good(chance: random.Random, engines: list[Simulated]) -> dict[str, Any]:
    return chance.choice(
        [
            {"tenants": tenants_of(chance.randint(1, 4), chance.randint(1, 4), also=chance.randrange(3))},
            {"policy": chance.choice(POLICIES)},
            {"pools": pool(*chance.sample(engines, chance.randint(1, 3)), max_num_seqs=chance.choice((6, 8)))},
            {"limits": {"upstream_silence_s": chance.choice((500, 600)), "attempts_max": chance.choice((3, 9))}},
            {"quota": chance.choice(({}, {"concurrent": 10_000})), "interactions": {"idle_s": chance.choice((60, 90))}},
            {},
        ]
    )


async def test_no_reload_loses_a_request_or_breaks_a_stream(tmp_path: Path) -> None:
    chance, answers, outcomes = random.Random(3), list[Answer](), set[str]()
    async with AsyncExitStack() as stack:
        engines = [await stack.enter_async_context(simulated()) for _ in range(3)]
        gate = await stack.enter_async_context(reloadable(tmp_path, *engines))
        is_over = False

        async def keep_asking(key: str) -> None:
            while not is_over:
                answers.append(await gate.ask(key, stream=True, max_tokens=40))

        asking = [asyncio.ensure_future(keep_asking(key)) for key in (ALICE, BOB) * 9]
        for turn in range(40):
            fields, are_wrong = gate.fields, chance.random() < 0.4
            if are_wrong and turn % 2:
                gate.path.write_text(chance.choice(("pools: [", "pools: []\n", "\x00", "")))
                got = await gate.post("/reload")
            else:
                got = await gate.reload(**(chance.choice(WRONG) if are_wrong else good(chance, engines)))
            gate.fields = fields if are_wrong else gate.fields
            outcomes.add(got.json["outcome"])
            assert (got.json["outcome"] == "refused") is are_wrong, got.json
            drains = len(gate.fields["pools"][0]["backends"]) > 1 and turn % 5 == 0
            if drains:
                await gate.post("/drain/e0")
            more = len(answers) + 6
            await until(lambda more=more: len(answers) >= more)  # type: ignore[misc]
            if drains:
                await gate.post("/resume/e0")
        is_over = True
        await asyncio.gather(*asking)
        assert all(map(is_whole, answers))
        assert {line["outcome"] for line in await gate.live.lines(len(answers))} == {"completed"}
        assert outcomes == {"changed", "unchanged", "refused"}
        await until(gate.live.holds_nothing)


async def test_replicas_reload_one_by_one(tmp_path: Path) -> None:
    (tmp_path / "one").mkdir()
    (tmp_path / "two").mkdir()
    async with RedisServer() as redis, simulated() as one, simulated() as two, simulated() as three:
        shared: dict[str, Any] = {"state": redis.url, "quota": {"concurrent": 1000}}
        async with (
            reloadable(tmp_path / "one", one, two, **shared) as first,
            reloadable(tmp_path / "two", one, two, **shared) as second,
        ):
            gates = [first, second]
            asked = [gate.ask(key, stream=True, max_tokens=200) for gate in gates for key in (ALICE, BOB) * 8]
            for gate in gates:
                assert await gate.changed(tenants=tenants_of(3, 1), quota={"concurrent": 900})
                assert await gate.changed(pools=pool(one, two, three)) == ["pools[pool].backends[e2]: added"]
                asked += [gate.ask(key, stream=True) for key in (ALICE, BOB) * 8]
            for gate in gates:
                assert await gate.changed(pools=pool(one, two)) != []
            assert all(map(is_whole, await asyncio.gather(*asked)))
            for gate in gates:
                got = await gate.reload(policy="vtc")
                assert got.status == 409
                assert "is what replicas count together by" in "".join(got.json["why_not"])
                await until(gate.live.holds_nothing)
                exchanges = gate.live.gateway.exchanges
                assert exchanges[0].answered > exchanges[0].lost, "one may be late where the machine is slow"
                for exchange in exchanges:
                    await until(partial(_is_heard, exchange))


def _is_heard(exchange: Exchanges) -> bool:
    return not exchange.is_alone
