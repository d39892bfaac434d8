"""Keys made, listed and revoked while gateways run, in effect at every gateway of one table."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import AsyncIterator
from datetime import datetime
from itertools import product
from pathlib import Path
from typing import Any

import pytest

from gateway.config.sections.keys import hash_key, new_key
from gateway.keys.issuance import KeyRefused, make_keys
from gateway.proxy.exchange import Exchange
from gateway.storage.store_errors import StoreUnavailable
from policies.request import of_batch
from tests.commands import run
from tests.gateway.capture import OK, Peer, Seen, Upstream, answer, replies
from tests.gateway.live import MODEL, Starter, chat, until
from tests.kit.held import Held, one_at_a_time
from tests.kit.keys import MOMENT, NAMED, TENANTS, TOKEN, admin, answers, issuing, listed, made, revoked, rotated
from tests.kit.served import config_file
from tests.postgres_server import Databases, PostgresServer
from tests.redis_server import RedisServer

pytestmark = pytest.mark.usefixtures("quick_keys")


@pytest.fixture(params=["sqlite", "postgresql", "redis"])
async def place(request: pytest.FixtureRequest, tmp_path: Path, databases: Databases) -> AsyncIterator[dict[str, str]]:
    """Where the table of keys is, as the config says it."""
    if request.param == "redis":
        async with RedisServer() as redis:
            yield {"state": redis.url}
    else:
        yield {"usage": await databases.another() if request.param == "postgresql" else str(tmp_path / "usage.db")}


async def test_keys_are_made_and_revoked_at_every_gateway(start: Starter, place: dict[str, str]) -> None:
    fields: dict[str, Any] = {"tenants": TENANTS, **place}
    async with (
        Upstream(replies(OK)) as upstream,
        start(upstream.url, **fields) as one,
        start(upstream.url, **fields) as two,
    ):
        terms = {"tenant": "bob", "apps": ["chat", "batch"], "models": [MODEL], "expires": "9000-01-31", "weight": 4}
        terms |= {"label": "laptop of Ann", "class": "batch"}
        key = await made(one, **terms)
        for live in (one, two):
            await answers(live, key, 200, x_fairgate_app="batch")
        asked = (await one.ask("/v1/chat/completions", chat(), key=key)).headers["x-request-id"]
        last = two.engine.recent.last((await two.ask("/v1/chat/completions", chat(), key=key)).headers["x-request-id"])
        assert last is not None
        assert last.flow.tenant == of_batch("bob")  # noted with the key
        await until(lambda: asked in one.log.read_text())
        line = (await one.lines(1))[-1]
        assert (line["tenant"], line["weight"], line["app"]) == ("bob", 4.0, "chat")

        known = await listed(two)
        terms["created"] = known[1]["created"]
        assert datetime.fromisoformat(terms["created"]).tzinfo is not None
        of_config = {"tenant": "alice", "apps": ["default"], "class": "interactive", "from": "config"}
        assert known == [
            {**of_config, "hash": hash_key(NAMED), "revoked": False},
            {**terms, "hash": hash_key(key), "from": "redis" if "state" in place else "database", "revoked": False},
        ]
        for name in (hash_key(key), hash_key(NAMED)):
            await revoked(two, name)
        for live in (one, two):
            await answers(live, key, 401)
            await answers(live, NAMED, 401)
        assert [each["revoked"] for each in await listed(one)] == [True]
        with pytest.raises(KeyRefused, match="nothing is revoked"):
            await revoked(one, hash_key(key))
    async with Upstream(replies(OK)) as upstream, start(upstream.url, **fields) as later:
        await answers(later, NAMED, 401)


@pytest.mark.parametrize("way", ["revoked", "its tenant is removed", "the key is removed"])
async def test_what_waits_by_a_key_that_is_taken_back_is_refused(start: Starter, way: str) -> None:
    other, engine = new_key(), Held()
    bob = {"name": "bob", "keys": [hash_key(NAMED), hash_key(other)]}
    fields = {"admin_token": TOKEN, **({"usage": str(start.directory / "usage.db")} if way == "revoked" else {})}
    left = {"its tenant is removed": [TENANTS[1]], "the key is removed": [{**bob, "keys": [hash_key(other)]}]}.get(way)
    async with Upstream(engine) as upstream:
        pools = one_at_a_time(upstream.url)
        config = start.config(pools=pools, tenants=left or [bob], **fields)
        async with start(load=lambda: config, pools=pools, tenants=[bob], **fields) as live:
            runs = asyncio.create_task(live.ask("/v1/chat/completions", chat(), key=NAMED))
            await until(lambda: upstream.requests)
            stays = asyncio.create_task(live.ask("/v1/chat/completions", chat(), key=other))
            await until(lambda: live.engine.queued == 1)
            each = product(("/v1/chat/completions", "/v1/responses", "/v1/messages"), (False, True))
            wait = [asyncio.create_task(live.ask(path, chat(stream=stream), key=NAMED)) for path, stream in each]
            await until(lambda: live.engine.queued == 7)
            if left is not None:
                assert (await admin(live, "POST", "/reload")).status == 200
            else:
                await revoked(live, hash_key(NAMED))
            for got in await asyncio.gather(*wait):
                assert (got.status, "revoked" in got.error["message"]) == (401, True)
            assert live.engine.queued == (left != [TENANTS[1]])
            engine.may.set()
            assert (await runs).status == 200, "what an engine has is answered"
            assert (await stays).status == (401 if left == [TENANTS[1]] else 200)
            assert len(upstream.requests) == (1 if left == [TENANTS[1]] else 2)


async def test_what_waits_of_a_removed_tenant_does_not_start_by_the_room_that_the_same_reload_makes(
    start: Starter,
) -> None:
    engine, gone = Held(), {"name": "carol", "keys": [hash_key(other := new_key())]}
    async with Upstream(engine) as upstream:
        pools = one_at_a_time(upstream.url)
        roomy = [{**pool, "backends": [{**one, "max_num_seqs": 8} for one in pool["backends"]]} for pool in pools]
        config = start.config(pools=roomy, tenants=TENANTS, admin_token=TOKEN)
        async with start(load=lambda: config, pools=pools, tenants=[*TENANTS, gone], admin_token=TOKEN) as live:
            runs = asyncio.create_task(live.ask("/v1/chat/completions", chat(), key=NAMED))
            await until(lambda: upstream.requests)
            waits = [asyncio.create_task(live.ask("/v1/chat/completions", chat(), key=other)) for _ in range(3)]
            await until(lambda: live.engine.queued == 3)
            assert (await admin(live, "POST", "/reload")).status == 200
            assert [(await each).status for each in waits] == [401] * 3
            engine.may.set()
            assert (await runs).status == 200
            assert len(upstream.requests) == 1
            assert live.holds_nothing()


@pytest.mark.parametrize("preempted", [False, True])
async def test_what_returns_to_the_queue_after_its_key_was_revoked_is_refused(start: Starter, preempted: bool) -> None:
    """The engine refuses it, or it is preempted: in both cases it would be sent again."""
    may = asyncio.Event()

    async def refuses(seen: Seen, peer: Peer) -> None:
        await may.wait()
        await peer.send(answer(b"", status=b"503 Service Unavailable") if not preempted else OK)

    fields: dict[str, Any] = {"usage": str(start.directory / "usage.db")}
    async with Upstream(refuses) as upstream, start(upstream.url, tenants=TENANTS, **fields) as live:
        asked = asyncio.create_task(live.ask("/v1/chat/completions", chat(), key=NAMED, x_fairgate_class="batch"))
        await until(lambda: upstream.requests)
        await revoked(live, hash_key(NAMED))
        [exchange] = live.gateway.pools[0].dispatcher.exchanges()
        assert isinstance(exchange, Exchange)
        await until(lambda: not exchange.context.keyring.takes(exchange.context.principal))
        assert live.engine.dispatched == 1, "what an engine has is not aborted"
        if preempted:
            exchange.preempt()
        may.set()
        got = await asked
        assert (got.status, "revoked" in got.error["message"]) == (401, True)
        assert len(upstream.requests) == 1
        [line] = await live.lines(1)
        assert (line["outcome"], line["reason"]) == ("refused", "invalid_api_key")


async def test_a_body_that_comes_after_its_key_was_revoked_goes_nowhere(start: Starter) -> None:
    async with issuing(start) as (upstream, live):
        body = json.dumps(chat("x" * 300_000)).encode()
        for path in ("/v1/chat/completions", "/tokenize"):
            key = await made(live)
            await answers(live, key, 200)
            reader, writer = await asyncio.open_connection("127.0.0.1", live.gateway.port)
            head = f"POST {path} HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {key}\r\nConnection: close\r\n"
            writer.write(f"{head}Expect: 100-continue\r\nContent-Length: {len(body)}\r\n\r\n".encode())
            assert await reader.readuntil(b"\r\n\r\n") == b"HTTP/1.1 100 Continue\r\n\r\n"
            await revoked(live, hash_key(key))
            await answers(live, key, 401)
            writer.write(body)
            assert (await reader.read()).startswith(b"HTTP/1.1 401 ")
            writer.close()
        assert not [seen for seen in upstream.requests if len(seen.unsalted) == len(body)]


async def test_the_command_makes_tenants_that_the_file_does_not_have(start: Starter) -> None:
    url = str(start.directory / "usage.db")
    async with Upstream(replies(OK)) as upstream, start(upstream.url, tenants=[], usage=url) as live:
        config = config_file(start.directory, upstream.url, tenants=[], usage=url)
        terms = "--tenant carol --weight 3 --app x --class batch"
        code, out, said = await run("keys", "create", *terms.split(), "--label", "laptop of Ann", "-c", config)
        assert (code, said) == (0, "")
        key = out.split()[1]
        await answers(live, key, 200)
        await until(lambda: b'"completed"' in live.log.read_bytes())
        line = next(line for line in await live.lines(1) if line["outcome"] == "completed")
        assert (line["tenant"], line["weight"], line["app"]) == ("carol", 3.0, "x")
        told = json.loads((await run("keys", "list", "-c", config))[1])
        assert re.fullmatch(MOMENT, told.pop("created"))
        assert told == {
            "tenant": "carol", "hash": hash_key(key), "apps": ["x"], "weight": 3.0, "label": "laptop of Ann",
            "class": "batch", "from": "database", "revoked": False,
        }  # fmt: skip
        assert (await run("keys", "revoke", "-c", config, given=key.encode() + b"\n"))[1].endswith("revoked\n")
        await answers(live, key, 401)
        code, _, said = await run("keys", "create", "--tenant", "carol", "-c", config)
        assert (code, "has no tenant named 'carol', and the key brings no weight" in said) == (2, True)


async def test_keys_stay_known_while_the_database_is_gone(start: Starter) -> None:
    async with PostgresServer() as server, issuing(start, usage=server.url) as (_, live):
        key = await made(live)
        await answers(live, key, 200)
        await server.crash()
        with pytest.raises(StoreUnavailable, match=r"127\.0\.0\.1"):
            await made(live)
        assert (await live.ask("/v1/chat/completions", chat(), key=key)).status == 200
        await server.start()
        usage = live.gateway.usage
        assert usage is not None
        await answers(live, await made(live), 200)
        await until(lambda: usage.fault is None)


async def test_keys_stay_known_while_redis_is_gone_or_has_forgotten_them(
    start: Starter, caplog: pytest.LogCaptureFixture
) -> None:
    async with RedisServer() as redis, issuing(start, usage=None, state=redis.url) as (upstream, live):
        config = config_file(start.directory, upstream.url, tenants=TENANTS, state=redis.url)
        key = await made(live)
        await answers(live, key, 200)
        await redis.command("FLUSHALL")
        await until(lambda: "the table of keys has vanished from the redis: the keys known so far hold" in caplog.text)
        assert (await live.ask("/v1/chat/completions", chat(), key=key)).status == 200
        code, out, _ = await run("keys", "revoke", hash_key(key), "-c", config)
        assert (code, "the table of keys was empty" in out) == (0, True)
        await answers(live, key, 401)
        key = await made(live)
        await answers(live, key, 200)
        await redis.kill()
        await until(lambda: live.gateway.store.fault)
        assert (await live.ask("/v1/chat/completions", chat(), key=key)).status == 200
        code, _, said = await run("keys", "create", "--tenant", "bob", "-c", config)
        assert (code, "Connection refused" in said, "Traceback" in said) == (1, True, False)


def test_a_key_that_cannot_be_made_says_why(start: Starter) -> None:
    fields: dict[str, Any] = {
        "tenants": TENANTS,
        "apps": [{"name": "chat"}],
        "aliases": {"also": "a"},
        "pools": [{"name": "pool", "models": ["a"], "backends": [{"url": "http://127.0.0.1:1"}]}],
    }
    config = start.config(**fields)
    for terms, said in [
        ({"tenant": "eve"}, "has no tenant named 'eve', and the key brings no weight"),
        ({"tenant": "a b", "weight": 1}, "can have no tenant whose name is not 1 to 128 characters"),
        ({"tenant": "", "weight": 1}, "can have no tenant whose name is not"),
        ({"weight": 0}, "weight: Input should be greater than 0"),
        ({"weight": "3"}, "weight: Input should be a valid number"),
        ({"expires": "soon"}, "expires: should be a day such as"),
        ({"expires": "2001-01-31"}, "expires: 2001-01-31 is past"),
        ({"models": ["a", "b"]}, "models: no pool serves 'b'; there are: a, also. Name a new one"),
        ({"models": ["a b"]}, "models: should be 1 to 128 characters"),
        ({"apps": ["chat", "cat"]}, "apps: the config has no app 'cat' under `apps`; there are: chat, default"),
        ({"apps": []}, "apps: "),
        ({"label": "a\nb"}, "label: should be 1 to 100 characters that can be printed"),
        ({"quota": {"requests_per_day": 0}}, "quota.requests_per_day: Input should be greater than or equal to 1"),
        ({"quota": {"per_model": {"a": {"words": 1}}}}, "quota.per_model.a.words: Extra inputs are not permitted"),
        ({"quota": 7}, "quota: Input should be a valid dictionary"),
        ({"quota": {"tokens_per_minute": 9, "tokens_per_day": 5}}, "tokens_per_day: 5 is less than tokens_per_min"),
        ({"quota": {"per_model": {"b": {"concurrent": 1}}}}, "quota: no pool serves 'b'; there are: a. "),
        ({"quota": {"per_model": {"also": {"concurrent": 1}}}}, "quota: no pool serves 'also'; there are: a. "),
    ]:
        with pytest.raises(KeyRefused, match=re.escape(said)):
            make_keys(config, [terms.pop("tenant", "bob")], terms)


async def test_a_key_for_each_of_thirty_tenants_is_made_at_once_and_told_with_its_tenant(tmp_path: Path) -> None:
    names = [f"team-{number}" for number in range(30)]
    tenants = [{"name": name, "keys": [hash_key(name)]} for name in names]
    config = config_file(tmp_path, "http://127.0.0.1:1", tenants=tenants, usage=str(tmp_path / "usage.db"))
    options = [word for name in names for word in ("--tenant", name)]
    code, out, said = await run("keys", "create", "-c", config, "--json", *options)
    assert (code, said) == (0, "")
    keys = [json.loads(line) for line in out.splitlines()]
    assert [each["tenant"] for each in keys] == names
    assert all(hash_key(each["key"]) == each["hash"] for each in keys)
    listed = (await run("keys", "list", "-c", config))[1]
    known = [json.loads(line) for line in listed.splitlines()]
    assert {one["hash"] for one in known if one["from"] == "database"} == {each["hash"] for each in keys}
    code, out, said = await run("keys", "create", "-c", config, "--tenant", "team-0", "--tenant", "nobody")
    assert (code, out, "no tenant named 'nobody'" in said) == (2, "", True)
    assert (await run("keys", "list", "-c", config))[1] == listed, "all of them, or none"
    out = (await run("keys", "create", "-c", config, "--tenant", "team-0"))[1]
    assert re.fullmatch(r"key:  fg-\S{43}\nhash: sha256:[0-9a-f]{64}\ntenant: team-0\n", out)


async def test_what_becomes_of_keys_is_in_the_log(start: Starter, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", "fairgate")

    def events() -> list[str]:
        said = [re.sub(r"sha256:[0-9a-f]{60}", "", record.getMessage()) for record in caplog.records]
        return [text for text in said if text.startswith("key ") and "first" not in text]

    tenants = [TENANTS[0] | {"keys": [{"hash": hash_key(NAMED), "label": "old"}]}, TENANTS[1]]
    async with issuing(start, tenants=tenants) as (_, live):
        await answers(live, await made(live, label="first"), 200)  # what the table says at the start is no event
        laptop = await made(live, label="laptop")
        tail = hash_key(laptop)[-4:]
        await until(lambda: events() == [f"key {tail} of bob (laptop) is made"])
        moved = hash_key(await rotated(live, laptop, grace="1h"))
        await until(lambda: len(events()) == 3)
        assert events()[1] == f"key {moved[-4:]} of bob (laptop) is made"
        assert re.fullmatch(rf"key {tail} of bob \(laptop\) has other terms, until 2\d{{3}}-.* UTC", events()[2])
        await revoked(live, hash_key(NAMED))
        await until(lambda: events()[3:] == [f"key {hash_key(NAMED)[-4:]} of alice (old) is revoked"])
