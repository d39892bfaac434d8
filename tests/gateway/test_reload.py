"""Change without a restart: the file is read again while requests wait and run, and nothing of theirs is lost."""

from __future__ import annotations

import asyncio
import json
import os
import random
import re
import signal
import ssl
from contextlib import AsyncExitStack
from functools import partial
from pathlib import Path
from typing import Any

from gateway.config.sections.keys import hash_key
from gateway.pool.replication.ticker import SyncRounds
from tests.certificates import Authority
from tests.commands import run
from tests.gateway.capture import Upstream, token
from tests.gateway.live import Answer, Simulated, Starter, events, simulated, until
from tests.kit.reloading import ALICE, BOB, is_whole, pool, reloadable
from tests.kit.served import Streams, config_file, serving
from tests.kit.working import working
from tests.redis_server import RedisServer

# --- what goes on ---


async def test_what_waits_and_runs_is_served_whatever_changes(tmp_path: Path) -> None:
    async with simulated() as one, simulated() as two, reloadable(tmp_path, one, two) as gate:
        asked = await gate.streams(40)
        gateway = gate.live.gateway
        for fields in (
            {"policy": "vtc"},
            {"policy": {"name": "fairserve", "window_tokens": 5}, "pools": pool(one, two, max_num_seqs=6)},
            {"tenants": [{"name": "alice", "weight": 3, "keys": [hash_key(ALICE)]}], "quota": {"concurrent": 1}},
            {"policy": "dlpm", "limits": {"queue_requests_max": 1, "upstream_silence_s": 60}},
            {"pools": pool(one), "overload": {"enter": 0.9}},
            {"policy": "d2lpm", "pools": pool(one, two), "quota": {}, "limits": {}, "interactions": {"idle_s": 7}},
            {"policy": "fcfs", "drain_s": 7},
            {"policy": "fairserve"},
        ):
            assert await gate.changed(**fields)
            await until(lambda: len(gateway.pools[0].dispatcher) + sum(one.done() for one in asked) >= len(asked))
        assert all(map(is_whole, await asyncio.gather(*asked)))
        await until(gate.live.holds_nothing)
        assert is_whole(await gate.ask(stream=True))
        await until(lambda: all(len(one.backends) == 2 for one in gateway.pools))


async def test_the_same_config_touches_nothing(tmp_path: Path, start: Starter) -> None:
    async with simulated() as engine, reloadable(tmp_path, engine) as gate:
        gateway = gate.live.gateway
        before = gateway.config, gateway.pools[0].dispatcher.engine.policy, gateway.pools[0].backends["e0"].upstream
        first = await gate.reload()
        assert (first.status, first.json["outcome"], first.json["changes"]) == (200, "unchanged", [])
        turned = {"tenants": gate.fields["tenants"][::-1]}
        assert (await gate.reload(**turned)).json == first.json, "the order of a list is no change"
        pool_now = gateway.pools[0]
        after = gateway.config, pool_now.dispatcher.engine.policy, pool_now.backends["e0"].upstream
        assert all(mine is theirs for mine, theirs in zip(before, after, strict=True))
        async with start(engine.url) as live:
            reloaded = await live.gateway.reloading.run()
        assert (reloaded.outcome, reloaded.why_not) == (
            "unchanged",
            ["there is no file: it was started with --backend"],
        )


async def test_a_file_that_is_wrong_changes_nothing_and_says_so(tmp_path: Path) -> None:
    async with simulated() as engine, reloadable(tmp_path, engine) as gate:
        metrics = await gate.live.metrics()
        shown = (await gate.reload()).json["hash"]
        assert metrics["fairgate_config_reload_success",] == 1
        assert metrics["fairgate_config_info", shown] == 1
        first_s = metrics["fairgate_config_reload_timestamp_seconds",]
        for fields, words in (
            ({"policy": "vtx"}, "did you mean 'vtc'?"),
            ({"tenants": []}, "nobody could call"),
            ({"policy": "vtc", "drain_s": -1}, "greater than or equal to 0"),
            ({"policy": "vtc", "pools": [{**gate.fields["pools"][0], "tokenizer": "/no/such.json"}]}, "/no/such.json"),
            ({"policy": "vtc", "access_log": "/no/such/directory/log"}, "access_log"),
            (
                {"policy": "vtc", "listen": "127.0.0.1:1", "state_file": str(tmp_path / "learned")},
                "listen is set at the start: it needs a restart state_file is set at the start: it needs a restart",
            ),
        ):
            good = gate.fields
            got = await gate.reload(**fields)
            assert (got.status, got.json["outcome"], got.json["hash"]) == (409, "refused", shown)
            assert words in " ".join(got.json["why_not"])
            assert gate.live.gateway.config.policy.name == gate.live.gateway.pools[0].policy_name == "fairserve"
            assert (await gate.live.metrics())["fairgate_config_reload_success",] == 0
            gate.fields = good
        gate.path.write_text("pools: [")
        assert (await gate.post("/reload")).status == 409
        gate.path.unlink()
        got = await gate.post("/reload")
        assert (got.status, "No such file" in got.json["why_not"][0]) == (409, True)
        other = tmp_path / "other.yaml"
        other.write_text(json.dumps({**gate.fields, "drain_s": 8}))
        gate.path.symlink_to(other)  # as Kubernetes mounts it
        assert (await gate.post("/reload")).json["outcome"] == "changed"
        gate.path.unlink()
        gate.fields["drain_s"] = 8
        assert is_whole(await gate.ask(stream=True))
        assert await gate.changed(policy="vtc") == ["policy.name: fairserve -> vtc"]
        metrics = await gate.live.metrics()
        assert metrics["fairgate_config_reload_success",] == 1
        assert metrics["fairgate_config_reload_timestamp_seconds",] > first_s
        assert [labels for name, *labels in metrics if name == "fairgate_config_info"] != [[shown]]


# --- who may call ---


async def test_tenants_and_keys_come_and_go(tmp_path: Path) -> None:
    async with simulated() as engine, reloadable(tmp_path, engine, tenants=[{"name": "carol"}]) as gate:
        (minted,) = gate.live.gateway.minted_keys
        assert (await gate.ask(minted.key)).status == 200
        assert (await gate.ask(ALICE)).status == 401
        alice = {"name": "alice", "keys": [{"hash": hash_key(ALICE), "apps": ["chat"]}]}
        assert await gate.changed(tenants=[{"name": "carol"}, alice]) == ["tenants[alice]: added"]
        assert (await gate.ask(ALICE)).status == (await gate.ask(minted.key)).status == 200
        running = gate.ask(ALICE, stream=True, max_tokens=300)
        await until(lambda: gate.live.engine.dispatched)
        assert await gate.changed(tenants=[{"name": "carol"}]) == ["tenants[alice]: removed"]
        assert (await gate.ask(ALICE)).status == 401
        assert is_whole(await running), "what was admitted is served"


async def test_the_admin_token_changes_at_once_and_a_page_of_another_origin_changes_nothing(tmp_path: Path) -> None:
    async with simulated() as engine, reloadable(tmp_path, engine, admin_token="first-token") as gate:
        assert (await gate.reload(admin_token="other-token")).status == 401
        first, other = ({"authorization": f"Bearer {word}-token"} for word in ("first", "other"))
        assert (await gate.post("/reload", **first)).status == 200
        assert (await gate.post("/reload", **first)).status == 401
        assert (await gate.post("/reload", **other)).json["outcome"] == "unchanged"
        for path in ("/reload", "/drain/e0", "/resume/e0"):
            assert (await gate.post(path, origin="https://evil.example", **other)).status == 403
        assert (await gate.post("/reload", origin=gate.live.admin_url, **other)).status == 200


async def test_the_listener_shows_another_certificate(tmp_path: Path) -> None:
    authority = Authority(tmp_path)
    files = [authority.sign(name) for name in ("first", "second")]
    certificates = [Path(certificate).read_text() for certificate, _ in files]  # noqa: ASYNC240 (nobody else waits)
    sections = [{"cert_file": certificate, "key_file": key} for certificate, key in files]
    async with simulated() as engine, reloadable(tmp_path, engine, tls=sections[0]) as gate:
        address = ("127.0.0.1", gate.live.gateway.port)
        assert await gate.changed(tls=sections[1])
        shown = await asyncio.to_thread(ssl.get_server_certificate, address)
        assert shown.strip() in certificates[1]
        got = await gate.reload(tls=None)
        assert got.json["why_not"] == ["tls is spoken or not by every connection: it needs a restart"]
        assert (await gate.reload(tls={**sections[1], "cert_file": "/no/such.pem"})).status == 409
        assert (await asyncio.to_thread(ssl.get_server_certificate, address)) == shown


# --- where it goes ---


async def test_a_backend_that_is_added_is_used_and_one_that_is_removed_ends_what_it_runs(tmp_path: Path) -> None:
    async with simulated() as one, simulated() as two, reloadable(tmp_path, one) as gate:
        gateway = gate.live.gateway
        asked = await gate.streams(24)
        assert await gate.changed(pools=pool(one, two)) == ["pools[pool].backends[e1]: added"]
        assert gate.live.engine.backends["e1"].leases, "what waits goes there without a wait for its first probe"
        assert gate.live.engine.policy.prefixes is not None
        await until(lambda: one.server.gauges.running and two.server.gauges.running)
        assert await gate.changed(pools=pool(one)) == ["pools[pool].backends[e1]: removed"]
        assert gateway.pools[0].backends["e1"].leaving
        assert all(map(is_whole, await asyncio.gather(*asked)))
        await until(lambda: list(gateway.pools[0].backends) == ["e0"])
        assert list(gate.live.engine.backends) == ["e0"]
        metrics = await gate.live.metrics()
        assert [labels for name, *labels in metrics if name == "fairgate_backend_up"] == [["e0", "pool"]]


async def test_a_backend_elsewhere_takes_the_place_of_one_by_its_name(tmp_path: Path) -> None:
    async with simulated() as one, simulated() as two, reloadable(tmp_path, one) as gate:
        asked = await gate.streams(12)
        before = gate.live.gateway.pools[0].backends["e0"]
        (change,) = await gate.changed(pools=pool(two))
        assert change.startswith("pools[pool].backends[e0].url: ")
        assert is_whole(await gate.ask(stream=True))
        assert two.server.gauges.running or two.is_idle()
        assert all(map(is_whole, await asyncio.gather(*asked)))
        assert gate.live.gateway.pools[0].backends["e0"] is not before
        lines = await gate.live.lines(13)
        assert {line["outcome"] for line in lines} == {"completed"}


async def test_pools_come_and_go_and_models_get_other_names_at_once(tmp_path: Path) -> None:
    async with simulated() as one, simulated(models=("other",)) as two, reloadable(tmp_path, one) as gate:
        assert (await gate.ask(model="other")).status == 404
        more = [*pool(one), {"name": "second", "backends": [{"url": two.url}]}]
        assert await gate.changed(pools=more) == ["pools[second]: added"]
        asked = [gate.ask(model="other", stream=True, max_tokens=300) for _ in range(20)]
        second = gate.live.gateway.pools[1]
        await until(lambda: len(second.dispatcher) == 20)
        assert await gate.changed(pools=pool(one)) == ["pools[second]: removed"]
        assert (await gate.ask(model="other")).status == 404
        assert all(map(is_whole, await asyncio.gather(*asked)))
        assert (await gate.ask()).status == 200
        assert await gate.changed(aliases={"other": "simulated"}) == ["aliases[other]: not set -> simulated"]
        assert (await gate.ask(model="other")).status == 200
        assert await gate.changed(aliases={}, limits={"waiting_comment_s": 1}) == [
            "aliases[other]: simulated -> not set",
            "limits.waiting_comment_s: 15 -> 1",
        ]
        assert (await gate.ask(model="other")).status == 404


async def test_a_drained_backend_gets_nothing_new_until_it_is_resumed(tmp_path: Path) -> None:
    async with simulated() as one, simulated() as two, reloadable(tmp_path, one, two) as gate:
        asked = await gate.streams(24)
        await until(lambda: two.server.gauges.running)
        answer = (await gate.post("/drain/e1")).json
        assert (answer["pool"], answer["drained"], answer["in_service"]) == ("pool", True, False)
        assert answer["running"] > 0
        metrics = await gate.live.metrics()
        assert metrics["fairgate_backend_draining", "e1", "pool"] == 1
        assert metrics["fairgate_backend_draining", "e0", "pool"] == 0
        assert all(map(is_whole, await asyncio.gather(*asked)))
        assert await gate.changed(drain_s=1) == ["drain_s: 30 -> 1"]
        await asyncio.gather(*(gate.ask() for _ in range(12)))
        lines = (await gate.live.lines(36))[24:]
        assert {line["backend"] for line in lines} == {"e0"}
        assert (await gate.post("/resume/e1")).json["in_service"]
        await asyncio.gather(*(gate.ask() for _ in range(40)))
        assert {line["backend"] for line in (await gate.live.lines(76))[36:]} == {"e0", "e1"}


async def test_to_drain_the_last_backend_is_warned_of_and_an_unknown_one_is_named(tmp_path: Path) -> None:
    async with simulated() as one, reloadable(tmp_path, one) as gate:
        assert "no backend of pool pool is in service" in (await gate.post("/drain/e0")).json["warning"]
        assert (await gate.ask()).status == 503
        ready = await gate.live.get("/ready", admin=True)
        assert "e0: drained" in "".join(ready.json["why_not"])
        assert (await gate.post("/resume/e0")).status == 200
        assert (await gate.ask()).status == 200
        unknown = await gate.post("/drain/host:1/a")
        assert unknown.status == 404
        assert "there are: e0" in unknown.json["error"]


# --- the log ---


async def test_the_log_reopens_and_may_go_elsewhere(tmp_path: Path) -> None:
    async with simulated() as one, reloadable(tmp_path, one) as gate:
        log, moved, other = gate.live.log, tmp_path / "access.log.1", tmp_path / "other.log"
        await gate.ask()
        await gate.live.lines(1)
        log.rename(moved)
        assert (await gate.reload()).json["outcome"] == "unchanged"
        await gate.ask()
        await gate.live.lines(1)
        assert moved.read_bytes().count(b"\n") == 1
        await gate.changed(access_log=str(other))
        await gate.ask()
        await until(lambda: other.exists() and other.read_bytes().count(b"\n") == 1)
        assert log.read_bytes().count(b"\n") == 1


# --- processes ---


async def test_sighup_and_the_commands_reload_while_a_stream_goes_on(tmp_path: Path) -> None:
    engine = Streams()
    async with Upstream(engine) as upstream, serving(tmp_path, upstream.url) as gate:
        async with gate.ask(stream=True) as response:
            assert await response.content.readexactly(len(token("a"))) == token("a")
            config_file(tmp_path, upstream.url, policy="vtc")
            gate.command.signal(signal.SIGHUP)
            await gate.command.says(r"the config is reloaded \([0-9a-f]{16}\): policy.name: fairserve -> vtc")
            path = config_file(tmp_path, upstream.url, policy="vtc", tenants=[{"name": "alice", "weight": 2}])
            code, out, _ = await run("reload", "-c", path, "--admin", gate.admin)
            assert code == 0
            assert out.startswith("tenants[alice].weight: 1 -> 2\nchanged: ")
            assert (await run("reload", "--admin", gate.admin))[1].startswith("unchanged: ")
            config_file(tmp_path, upstream.url, listen="127.0.0.1:1")
            code, _, said = await run("reload", "--admin", gate.admin)
            assert code == 1
            assert "not reloaded: listen is set at the start: it needs a restart" in said
            name = upstream.url.removeprefix("http://")
            code, out, said = await run("drain", name, "--admin", gate.admin)
            assert (code, out) == (0, f"pool/{name}: drained, 1 running there\n")
            assert "no backend of pool pool is in service" in said
            assert (await run("resume", name, "--admin", gate.admin))[0] == 0
            assert (await run("drain", "nobody", "--admin", gate.admin))[0] == 1
            engine.go_on.set()
            assert events(await response.content.read())[-1] == "[DONE]"
        async with gate.ask() as response:
            assert response.status == 200, "a key that was minted at the start is as good as before"


async def test_all_workers_reload_however_one_is_asked(tmp_path: Path) -> None:
    async with Upstream(Streams()) as upstream, working(tmp_path, upstream.url) as gate:

        def write(weight: int, *more: dict[str, Any]) -> None:
            config_file(tmp_path, upstream.url, workers=2, tenants=[{"name": "alice", "weight": weight}, *more])

        write(3)
        gate.command.signal(signal.SIGHUP)
        await until(lambda: gate.command.said.count("tenants[alice].weight: 1 -> 3") == 2)
        write(4)
        async with gate.http.post(gate.admin + "/reload") as response:
            assert (await response.json())["outcome"] == "changed"
        await until(lambda: gate.command.said.count("tenants[alice].weight: 3 -> 4") == 2)
        assert await gate.serves(), "with the key that was minted at the start"
        before = gate.pids()
        os.kill(before[0], signal.SIGKILL)
        await until(lambda: gate.pids()[0] != before[0])
        hashes = re.findall(r'^fairgate_config_info\{hash="(\w+)"\} 1', await gate.page("/metrics"), re.M)
        assert len(hashes) == 1, "a worker that is started later has the config of the others"
        write(4, {"name": "dora"})
        async with gate.http.post(gate.admin + "/reload") as response:
            assert "dora has no key" in "".join((await response.json())["why_not"])
        assert "Traceback" not in gate.command.said


# --- under load: random files, and replicas that take turns ---


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
                rounds = gate.live.gateway.sync_rounds
                assert rounds[0].answered > rounds[0].lost, "one may be late where the machine is slow"
                for each in rounds:
                    await until(partial(_is_heard, each))


def _is_heard(rounds: SyncRounds) -> bool:
    return not rounds.schedule.is_alone
