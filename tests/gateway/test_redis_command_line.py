"""What an operator types where there is a Redis: real processes before real servers."""

from __future__ import annotations

import asyncio
import re
import signal
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from gateway.config.sections.keys import hash_key, new_key
from gateway.keys.in_redis import TABLE
from gateway.storage.redis.redis_store import LAYOUT
from tests.commands import Running, run, running
from tests.gateway.capture import Peer, Seen, Upstream
from tests.gateway.live import MODEL, chat
from tests.kit.served import OK, config_file
from tests.kit.stores import scripted
from tests.ports import free_port
from tests.redis_server import RedisServer
from tests.waiting import eventually

NAMED = new_key()
"""A key that the config names."""
TENANTS = [{"name": "alice", "keys": [hash_key(NAMED)]}, {"name": "bob"}]
NOWHERE = "http://127.0.0.1:1"


async def script(seen: Seen, peer: Peer) -> None:
    await peer.send(OK)


class Replica:
    """A gateway in a process of its own."""

    def __init__(self, command: Running, http: aiohttp.ClientSession, url: str, admin: str) -> None:
        self.command = command
        self.http = http
        self.url = url
        self.admin = admin

    async def status(self, key: str) -> int:
        headers = {"authorization": f"Bearer {key}"}
        async with self.http.post(self.url + "/v1/chat/completions", json=chat(), headers=headers) as response:
            await response.read()
            return response.status

    async def answers(self, key: str, status: int) -> None:
        """Until it does: a replica hears of changes within a second."""

        async def does() -> bool:
            return await self.status(key) == status

        await eventually(does)

    async def ready(self) -> dict[str, Any]:
        async with self.http.get(self.admin + "/ready") as response:
            found: dict[str, Any] = await response.json()
            return found

    async def metrics(self) -> str:
        async with self.http.get(self.admin + "/metrics") as response:
            return await response.text()

    async def state(self, pattern: str) -> None:
        async def says() -> object:
            return re.search(pattern, (await self.ready())["state"])

        await eventually(says)


@asynccontextmanager
async def replica(config: str) -> AsyncIterator[Replica]:
    async with running("serve", "-c", config) as command:
        found = await command.says(r"serving on (http://\S+), admin on (http://[^ ]+:\d+)")
        async with aiohttp.ClientSession() as http:
            yield Replica(command, http, found[1], found[2])


def shared(directory: Path, state: str, url: str = NOWHERE, **fields: Any) -> str:
    return config_file(directory, url, **{"tenants": TENANTS, "state": state, **fields})


# --- serve ---


async def refused(directory: Path, state: str, **fields: Any) -> str:
    """What `serve` says; it ends with 2, and never with a traceback."""
    code, out, said = await run("serve", "-c", shared(directory, state, **fields))
    assert (code, out) == (2, "")
    assert "Traceback" not in said
    return said


async def test_a_redis_that_may_not_be_used_is_said_and_ends_with_2(tmp_path: Path) -> None:
    async with RedisServer(requirepass="secret") as redis, RedisServer(tls=True) as tls, scripted("5.0.14") as old:
        where = f"127.0.0.1:{redis.port}"
        assert "answers WRONGPASS" in (said := await refused(tmp_path, f"redis://:hunter2@{where}"))
        assert "hunter2" not in said
        assert "does not speak TLS" in await refused(tmp_path, f"rediss://:secret@{where}")
        assert "expects TLS" in await refused(tmp_path, f"redis://127.0.0.1:{tls.port}")
        assert "is Redis 5.0; 6.2 or later is needed" in await refused(tmp_path, old)
        assert "should be memory, redis://" in await refused(tmp_path, f"redi://:hunter2@{where}")
        await redis.command("SET", "fairgate:{pool}:layout", LAYOUT + 1)
        assert f"keys of layout {LAYOUT + 1}" in await refused(tmp_path, redis.url)


async def test_two_deployments_on_one_redis(tmp_path: Path) -> None:
    async with RedisServer() as redis, replica(shared(tmp_path, redis.url)):
        pools = [{"name": "pool", "backends": [{"url": "http://127.0.0.1:2"}]}]
        said = await refused(tmp_path, redis.url, pools=pools)
        assert "pool pool is served by other backends (http://127.0.0.1:1)" in said
        assert "with policy fairserve, and this gateway has vtc" in await refused(tmp_path, redis.url, policy="vtc")


async def test_workers_that_may_not_use_redis_end_all(tmp_path: Path) -> None:
    async with RedisServer(requirepass="secret") as redis:
        said = await refused(tmp_path, f"redis://127.0.0.1:{redis.port}", workers=2)
        assert "answers NOAUTH" in said


async def test_a_gateway_starts_without_redis_says_so_and_joins_when_it_comes(tmp_path: Path) -> None:
    async with Upstream(script) as upstream, RedisServer() as redis:
        await redis.kill()
        async with replica(shared(tmp_path, redis.url, upstream.url)) as gate:
            assert await gate.status(NAMED) == 200
            found = await gate.ready()
            assert found["ready"]
            assert found["state"] == f"not shared: redis://127.0.0.1:{redis.port}/0: Connection refused"
            await gate.command.says("state is not shared, this replica goes on with what it knows: redis://.* refused")
            assert await redis.start()
            await gate.state("^shared$")
            page = await gate.metrics()
            assert "fairgate_state_shared 1.0\n" in page
            assert re.search(r'^fairgate_redis_commands_total\{outcome="answered"\} [1-9]', page, re.M)
            assert re.search(r'^fairgate_redis_commands_total\{outcome="failed"\} [1-9]', page, re.M)
            await gate.command.says("state is shared: redis://")
            await redis.kill()
            await gate.state("^not shared: ")
            assert "fairgate_state_shared 0.0\n" in await gate.metrics()
            assert await gate.status(NAMED) == 200
            gate.command.signal(signal.SIGTERM)
            assert await gate.command.ended() == 0
            assert "Traceback" not in gate.command.said


async def test_a_gateway_that_ends_leaves_at_once(tmp_path: Path) -> None:
    async with RedisServer() as redis:
        async with replica(shared(tmp_path, redis.url)) as gate:
            gate.command.signal(signal.SIGTERM)
            assert await gate.command.ended() == 0
        assert await redis.command("EXISTS", f"fairgate:{LAYOUT}:{{pool}}:members") == 0


async def test_redis_is_not_even_loaded_without_one() -> None:
    text = "import sys, gateway.commands.main, gateway.process.gateway; sys.exit('redis' in sys.modules)"
    process = await asyncio.create_subprocess_exec(sys.executable, "-c", text)
    assert await process.wait() == 0


# --- keys ---


async def test_a_key_is_made_for_some_models_and_for_a_time(tmp_path: Path) -> None:
    async with Upstream(script) as upstream, RedisServer() as redis:
        config = shared(tmp_path, redis.url, upstream.url)
        create = ("keys", "create", "--tenant", "bob", "-c", config)
        made = [
            (await run(*create, *more))[1].split()[1]
            for more in ((), ("--expires", "9000-01-31", "--model", MODEL), ("--model", "no"))
        ]
        expired = '{"tenant":"bob","expires":"2001-01-31"}'  # by now: none is made for a day that is past
        await redis.command("HSET", TABLE, hash_key(made[0]), expired)
        async with replica(config) as gate:
            for key, status in zip(made, (401, 200, 404), strict=True):
                await gate.answers(key, status)
        listed = (await run("keys", "list", "-c", config))[1].splitlines()
        assert [line.partition("  ")[2].partition(" created=")[0] for line in listed] == [
            "config   alice",
            "redis    bob expires=2001-01-31",
            f"redis    bob expires=9000-01-31 models={MODEL}",
            "redis    bob models=no",
        ]
        assert (await run("keys", "revoke", "-c", config, given=made[1].encode() + b"\n"))[0] == 0


async def test_what_is_revoked_is_listed_as_such_or_not_at_all(tmp_path: Path) -> None:
    async with RedisServer() as redis:
        config = shared(tmp_path, redis.url)
        assert (await run("keys", "revoke", hash_key(NAMED), "-c", config))[0] == 0
        code, _, said = await run("keys", "revoke", hash_key("x"), "-c", config)
        assert code == 2
        assert "is neither in the table of keys nor in" in said
        assert (await run("keys", "list", "-c", config))[1] == f"{hash_key(NAMED)}  revoked  alice\n"


async def test_keys_stay_known_while_redis_is_gone_or_has_forgotten_them(tmp_path: Path) -> None:
    async with Upstream(script) as upstream, RedisServer() as redis:
        config = shared(tmp_path, redis.url, upstream.url)
        key = (await run("keys", "create", "--tenant", "bob", "-c", config))[1].split()[1]
        async with replica(config) as gate:
            await gate.answers(key, 200)
            await redis.command("FLUSHALL")
            await gate.command.says("the table of keys has vanished from the redis: the keys known so far hold")
            assert await gate.status(key) == 200
            code, out, _ = await run("keys", "revoke", hash_key(key), "-c", config)
            assert (code, "the table of keys was empty" in out) == (0, True)
            await gate.answers(key, 401)
            key = (await run("keys", "create", "--tenant", "bob", "-c", config))[1].split()[1]
            await gate.answers(key, 200)
            await redis.kill()
            await gate.state("^not shared")
            assert await gate.status(key) == 200
            code, _, said = await run("keys", "create", "--tenant", "bob", "-c", config)
            assert (code, "Connection refused" in said, "Traceback" in said) == (1, True, False)


async def test_corrupt_entries_of_the_table_are_ignored_with_a_message(tmp_path: Path) -> None:
    async with Upstream(script) as upstream, RedisServer() as redis:
        config = shared(tmp_path, redis.url, upstream.url)
        key = (await run("keys", "create", "--tenant", "bob", "-c", config))[1].split()[1]
        await redis.command(
            "HSET", TABLE, b"\xff", "bob", "sha256:12", "bob", hash_key("x"), b"\xfe", hash_key("y"), '{"tenant":"eve"}'
        )
        async with replica(config) as gate:
            await gate.answers(key, 200)
            await gate.command.says(r"entries of the table of keys \(redis\) are ignored, 4 in all, ")
            assert await gate.status("y") == 401
        code, out, _ = await run("keys", "list", "-c", config)
        assert code == 0
        assert f"{hash_key('y')}  unknown  eve" in out
        await redis.command("DEL", TABLE)
        await redis.command("SET", TABLE, "x")
        async with replica(config) as gate:
            await gate.state("not shared: .*WRONGTYPE")
            assert await gate.status(NAMED) == 200


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("create", "--tenant", "bob"), "--tenant NAME and -c FILE belong together"),
        (("create", "--tenant", "eve", "-c", "{config}"), "has no tenant named 'eve'"),
        (
            ("create", "--tenant", "bob", "-c", "{memory}"),
            "has neither `usage:` nor `state: redis://...`: its keys stand in the file",
        ),
        (("create", "--expires", "2099-01-31"), "--label, --class, --quota need -c FILE; in the file"),
        (("create", "--tenant", "bob", "-c", "{config}", "--expires", "soon"), "--expires: should be a day such as"),
        (("create", "--tenant", "bob", "-c", "{config}", "--model", "a b"), "--model: should be 1 to 128 characters"),
        (("revoke", "fg-key", "-c", "{config}"), "give the key itself on standard input"),
        (("revoke", "-c", "{config}"), "no key or hash on standard input"),
        (("revoke", hash_key("x")), "Missing option '-c'"),
        (("list",), "Missing option '-c'"),
    ],
)
async def test_what_the_commands_for_keys_cannot_do(tmp_path: Path, arguments: tuple[str, ...], said: str) -> None:
    (tmp_path / "memory").mkdir()
    files = {
        "config": shared(tmp_path, f"redis://127.0.0.1:{free_port()}"),
        "memory": shared(tmp_path / "memory", "memory"),
    }
    code, out, errors = await run("keys", *(each.format(**files) for each in arguments), given=b"\n")
    assert (code, out) == (2, "")
    assert said in errors
