"""A backend whose name has several addresses is several engines, which come and go with them."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from backends.simulated.simulated_server import SimulatedServer
from tests.certificates import Authority
from tests.gateway.capture import STREAM, Upstream, replies
from tests.gateway.live import CHAT, MODEL, SMALL, WAIT_S, Live, Starter, chat, events, until
from tests.kit.names import Names
from tests.kit.reloading import reloadable
from tests.ports import free_port

ONE, TWO, THREE = "127.0.0.2", "127.0.0.3", "127.0.0.4"
OFTEN = {"upstream_addresses_s": 0.1}


@asynccontextmanager
async def engines(*addresses: str) -> AsyncIterator[tuple[int, dict[str, SimulatedServer]]]:
    """Simulated engines at these addresses, all of one port."""
    async with AsyncExitStack() as stack:
        port, servers = 0, {}
        for address in addresses:
            server = servers[address] = SimulatedServer(SMALL, model_names=(MODEL,))
            port = await server.start(address, port)
            stack.push_async_callback(server.stop)
        yield port, servers


def pools(port: int, scheme: str = "http", **fields: Any) -> list[dict[str, Any]]:
    backend = {"url": f"{scheme}://engines.test:{port}", "name": "gpu", "each_address": True, **fields}
    return [{"name": "pool", "backends": [backend]}]


def from_nothing(port: int, **fields: Any) -> list[dict[str, Any]]:
    """The same pool, where requests wait for the start of an engine."""
    return [{**pool, "models": [MODEL], "start_s_max": 600} for pool in pools(port, **fields)]


def in_service(live: Live) -> list[str]:
    return [name for name, backend in live.gateway.pools[0].backends.items() if backend.in_service]


async def shown(live: Live) -> set[str]:
    """The engines on the page of metrics."""
    return {labels[1] for labels in await live.metrics() if labels[0] == "fairgate_backend_up"}


def stream(live: Live, length: int = 200) -> asyncio.Task[Any]:
    return asyncio.ensure_future(live.ask(CHAT, chat(stream=True, max_tokens=length, ignore_eos=True)))


async def test_engines_come_and_go_with_the_addresses_and_nothing_breaks(start: Starter) -> None:
    async with engines(ONE, TWO, THREE) as (port, servers):
        names = Names(ONE)
        async with start(pools=pools(port, max_num_seqs=6), limits=OFTEN, resolver=names) as live:
            assert set(names.asked) == {"engines.test"}
            assert [ledger.slots.count for ledger in live.engine.backends.values()] == [6]
            policy = live.engine.policy
            asked = [stream(live, 800) for _ in range(4)]
            await until(lambda: servers[ONE].gauges.running == 4)
            names.answer = [TWO, THREE]
            await until(lambda: in_service(live) == [f"gpu@{TWO}", f"gpu@{THREE}"])
            metrics = await live.metrics()
            assert metrics["fairgate_name_lookup_success", "engines.test"] == 1
            assert metrics["fairgate_name_addresses", "engines.test", "engine"] == 2
            gone = live.gateway.pools[0].backends[f"gpu@{ONE}"]
            assert gone.leaving
            assert not any(each.done() for each in asked), "what runs there goes on"
            asked += [stream(live) for _ in range(20)]
            assert all(events(each.body)[-1] == "[DONE]" for each in await asyncio.gather(*asked))
            assert servers[ONE].gauges.running == 0
            await until(lambda: len(live.engine.backends) == 2)
            async with asyncio.timeout(WAIT_S):
                while await shown(live) != {f"gpu@{TWO}", f"gpu@{THREE}"}:
                    pass
            assert live.engine.policy is policy, "engines come and go under one policy"
            lines = await live.lines(24)
            assert sum(line["backend"] == f"gpu@{ONE}" for line in lines) == 4
            assert {line["outcome"] for line in lines} == {"completed"}


async def test_one_that_is_back_while_it_ends_what_it_runs_is_used_again(start: Starter) -> None:
    async with engines(ONE, TWO) as (port, servers):
        names = Names(ONE, TWO)
        spread = {"name": "fairserve", "placement": "least_loaded"}
        async with start(pools=pools(port), limits=OFTEN, resolver=names, policy=spread) as live:
            asked = [stream(live, 800) for _ in range(4)]
            await until(lambda: servers[ONE].gauges.running)
            names.answer = [TWO]
            await until(lambda: in_service(live) == [f"gpu@{TWO}"])
            names.answer = [ONE, TWO]
            await until(lambda: sorted(in_service(live)) == [f"gpu@{ONE}", f"gpu@{TWO}"])
            assert all(events(each.body)[-1] == "[DONE]" for each in await asyncio.gather(*asked))
            await until(live.holds_nothing)
            assert sorted(live.engine.backends) == [f"gpu@{ONE}", f"gpu@{TWO}"]


@pytest.mark.parametrize("starts", [False, True])
async def test_what_waits_when_the_last_address_goes_is_refused_or_held_for_an_engine_that_starts(
    start: Starter, starts: bool
) -> None:
    async with engines(ONE, TWO) as (port, _):
        names, made = Names(ONE), from_nothing if starts else pools
        async with start(pools=made(port, max_num_seqs=1), limits=OFTEN, resolver=names) as live:
            asked = [stream(live) for _ in range(12)]
            await until(lambda: len(live.gateway.pools[0].dispatcher) == 12)
            last = live.gateway.pools[0].backends[f"gpu@{ONE}"]
            # An address of the other family is no news while one is known, and afterwards none can be looked up.
            names.answer, names.fails = ["fd00::1"], lambda: last.leaving
            await until(lambda: not live.engine.backends)
            waiting = live.engine.queued
            for path in ("/state", "/metrics", "/ready"):
                found = await live.get(path, admin=True)
                assert found.status == (503 if path == "/ready" and not starts else 200), path
            names.answer, names.fails = [TWO], lambda: False
            answers = await asyncio.gather(*asked)
            refused = [(each.status, each.error["code"]) for each in answers if each.status != 200]
            assert set(refused) == (set() if starts else {(503, "no_backend")})
            assert all(events(each.body)[-1] == "[DONE]" for each in answers if each.status == 200)
            await until(lambda: in_service(live) == [f"gpu@{TWO}"])
            assert events((await stream(live)).body)[-1] == "[DONE]"
            sent = [line["backend"] for line in await live.lines(13)].count(f"gpu@{TWO}")
            assert (sent, waiting > 0) == (waiting + 1, starts)


@pytest.mark.parametrize("fault", [OSError(-3, "Temporary failure in name resolution"), []], ids=["fails", "is empty"])
async def test_a_lookup_that_fails_changes_nothing_and_is_said_once(
    start: Starter, fault: Any, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "fairgate")
    async with engines(ONE) as (port, _):
        names = Names(ONE)
        async with start(pools=pools(port), limits=OFTEN, resolver=names) as live:
            names.answer = fault
            await names.asked_again(6)
            assert in_service(live) == [f"gpu@{ONE}"]
            assert (await live.ask(CHAT, chat(max_tokens=3))).status == 200
            assert (await live.metrics())["fairgate_name_lookup_success", "engines.test"] == 0
            assert sum("cannot be looked up (" in one.message for one in caplog.records) == 1
            names.answer = [ONE]
            await names.asked_again()
            assert (await live.metrics())["fairgate_name_lookup_success", "engines.test"] == 1
            assert sum("can be looked up again" in one.message for one in caplog.records) == 1


async def test_without_any_address_it_starts_and_refuses_what_comes_until_there_is_one(start: Starter) -> None:
    async with engines(ONE) as (port, _):
        names = Names()
        async with start(pools=pools(port), limits=OFTEN, resolver=names) as live:
            got = await live.ask(CHAT, chat())
            assert (got.status, got.error["code"]) == (503, "no_backend")
            ready = await live.get("/ready", admin=True)
            assert ready.status == 503
            assert "engines.test cannot be looked up: it has no address" in " ".join(ready.json["why_not"])
            for path in ("/state", "/metrics"):
                assert (await live.get(path, admin=True)).status == 200, path
            names.answer = [ONE]
            await until(lambda: not live.gateway.not_ready())
            assert (await live.ask(CHAT, chat(max_tokens=3))).status == 200


async def test_a_lookup_that_hangs_holds_up_neither_the_start_nor_another_name(
    start: Starter, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("gateway.pool.engine_addresses.LOOKUP_S", 0.01)
    async with engines(ONE, TWO) as (port, _):
        names, silent = Names(ONE), Names(THREE)
        silent.answers.clear()
        both = {"engines.test": names, "silent.test": silent}
        [pool] = pools(port)
        pool["backends"].append({"url": f"http://silent.test:{port}", "name": "other", "each_address": True})
        async with start(pools=[pool], limits=OFTEN, resolver=lambda host: both[host](host)) as live:
            assert (await live.metrics())["fairgate_name_lookup_success", "silent.test"] == 0
            monkeypatch.setattr("gateway.pool.engine_addresses.LOOKUP_S", 10 * WAIT_S)
            names.answer = [ONE, TWO]
            await until(lambda: in_service(live) == [f"gpu@{ONE}", f"gpu@{TWO}"])
            assert silent.asked == ["silent.test"], "one lookup of a name at a time"
            silent.answers.set()
            await until(lambda: f"other@{THREE}" in live.engine.backends)


async def test_of_hundreds_of_addresses_some_are_engines(start: Starter, caplog: pytest.LogCaptureFixture) -> None:
    names = Names(*(f"127.9.{n // 200}.{n % 200 + 1}" for n in range(400)))
    limits = {**OFTEN, "upstream_addresses_max": 8}
    async with start(pools=pools(free_port()), limits=limits, resolver=names) as live:
        await names.asked_again()
        assert len(live.engine.backends) == 8
        assert (await live.metrics())["fairgate_name_addresses", "engines.test", "left_out"] == 392
        assert sum("upstream_addresses_max (8)" in one.message for one in caplog.records) == 1


async def test_one_engine_is_drained_and_a_reload_keeps_it_so(tmp_path: Path) -> None:
    names = Names(ONE, TWO)
    async with engines(ONE, TWO) as (port, _):
        async with reloadable(tmp_path, resolver=names, limits=OFTEN, pools=pools(port)) as gate:
            live = gate.live
            assert (await gate.post(f"/drain/gpu@{TWO}")).json["drained"] is True
            unknown = await gate.post("/drain/gpu")
            assert (unknown.status, f"gpu@{ONE}" in unknown.body.decode()) == (404, True)
            await names.asked_again()
            kept = live.gateway.pools[0].backends.copy()
            assert await gate.changed(policy="vtc") == ["policy.name: fairserve -> vtc"]
            assert live.gateway.pools[0].backends == kept
            assert in_service(live) == [f"gpu@{ONE}"]
            await names.asked_again()
            assert in_service(live) == [f"gpu@{ONE}"]

            await gate.changed(pools=pools(port, each_address=False, url=f"http://{ONE}:{port}"))
            await until(lambda: list(live.engine.backends) == ["gpu"])
            asked = len(names.asked)
            assert [labels for labels in await live.metrics() if labels[0].startswith("fairgate_name_")] == []
            assert len(names.asked) == asked, "nobody looks the name up any more"


async def test_over_tls_the_certificate_is_of_the_name(start: Starter, tmp_path: Path) -> None:
    authority = Authority(tmp_path)
    for host, is_trusted in (("DNS:engines.test", True), ("IP:127.0.0.1", False)):
        async with Upstream(replies(STREAM), ssl=authority.server("shown", host=host)) as upstream:
            port = int(upstream.url.rpartition(":")[2])
            config = pools(port, "https", tls={"ca_file": authority.ca})
            async with start(pools=config, resolver=Names("127.0.0.1")) as live:
                assert bool(in_service(live)) is is_trusted
                assert (await live.ask(CHAT, chat(stream=True))).status == (200 if is_trusted else 503)
                assert [seen.headers["host"] for seen in upstream.requests] == [f"engines.test:{port}"] * is_trusted
