"""What an operator types where there is a Redis: real processes before real servers."""

from __future__ import annotations

import asyncio
import json
import re
import signal
import sys
from pathlib import Path
from typing import Any

import pytest

from gateway.config.sections.keys import hash_key, new_key
from gateway.keys.in_redis import TABLE
from gateway.storage.redis.redis_store import pool_key
from tests.commands import run
from tests.gateway.capture import OK, Upstream, replies
from tests.gateway.live import MODEL
from tests.kit.served import Served, config_file, served
from tests.ports import free_port
from tests.redis_server import RedisServer
from tests.waiting import eventually

NAMED = new_key()
"""A key that the config names."""
TENANTS = [{"name": "alice", "keys": [hash_key(NAMED)]}, {"name": "bob"}]
NOWHERE = "http://127.0.0.1:1"


async def answers(gate: Served, key: str, status: int) -> None:
    """Until it does: a replica hears of changes within a second."""

    async def does() -> bool:
        return await gate.status(key) == status

    await eventually(does)


async def ready(gate: Served) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(await gate.page("/ready"))
    return found


async def says_of_state(gate: Served, pattern: str) -> None:
    """Until it does."""

    async def says() -> object:
        return re.search(pattern, (await ready(gate))["state"])

    await eventually(says)


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
    """For one worker and for two; `test_store.py` has all that may be wrong with a Redis."""
    async with RedisServer(requirepass="secret") as redis:
        for workers in (1, 2):
            said = await refused(tmp_path, f"redis://:hunter2@127.0.0.1:{redis.port}", workers=workers)
            assert "answers WRONGPASS" in said
            assert "hunter2" not in said
        assert "should be memory, redis://" in await refused(tmp_path, f"redi://:hunter2@127.0.0.1:{redis.port}")


async def test_a_gateway_starts_without_redis_says_so_and_joins_when_it_comes(tmp_path: Path) -> None:
    known = [pool_key("pool", name) for name in ("members", "replicas")]

    async def has_joined() -> bool:
        return await redis.command("EXISTS", *known) == len(known)

    async with Upstream(replies(OK)) as upstream, RedisServer() as redis:
        await redis.kill()
        async with served(shared(tmp_path, redis.url, upstream.url)) as gate:
            assert await gate.status(NAMED) == 200
            found = await ready(gate)
            assert found["ready"]
            assert found["state"] == f"not shared: redis://127.0.0.1:{redis.port}/0: Connection refused"
            await gate.command.says("state is not shared, this replica goes on with what it knows: redis://.* refused")
            assert await redis.start()
            await says_of_state(gate, "^shared$")
            page = await gate.page("/metrics")
            assert "fairgate_state_shared 1.0\n" in page
            assert re.search(r'^fairgate_redis_commands_total\{outcome="answered"\} [1-9]', page, re.M)
            assert re.search(r'^fairgate_redis_commands_total\{outcome="failed"\} [1-9]', page, re.M)
            await gate.command.says("state is shared: redis://")
            await redis.kill()
            await says_of_state(gate, "^not shared: ")
            assert "fairgate_state_shared 0.0\n" in await gate.page("/metrics")
            assert await gate.status(NAMED) == 200
            assert await redis.start()
            await says_of_state(gate, "^shared$")
            await eventually(has_joined)
            assert await gate.ends(signal.SIGTERM) == 0
            assert "Traceback" not in gate.command.said
        assert await redis.command("EXISTS", *known) == 0, "who ends leaves at once"


async def test_redis_is_not_even_loaded_without_one() -> None:
    text = "import sys, gateway.commands.main, gateway.process.gateway; sys.exit('redis' in sys.modules)"
    process = await asyncio.create_subprocess_exec(sys.executable, "-c", text)
    assert await process.wait() == 0


# --- keys ---


async def test_keys_are_made_for_some_models_and_for_a_time_listed_and_revoked(tmp_path: Path) -> None:
    async with Upstream(replies(OK)) as upstream, RedisServer() as redis:
        config = shared(tmp_path, redis.url, upstream.url)
        create = ("keys", "create", "--tenant", "bob", "-c", config)
        made = [
            (await run(*create, *more))[1].split()[1]
            for more in ((), ("--expires", "9000-01-31", "--model", MODEL), ("--model", "no"))
        ]
        expired = '{"tenant":"bob","expires":"2001-01-31"}'  # by now: none is made for a day that is past
        await redis.command("HSET", TABLE, hash_key(made[0]), expired)
        async with served(config) as gate:
            for key, status in zip(made, (401, 200, 404), strict=True):
                await answers(gate, key, status)
        listed = [json.loads(line) for line in (await run("keys", "list", "-c", config))[1].splitlines()]
        told = [(one["from"], one["tenant"], one.get("expires"), one.get("models")) for one in listed]
        assert told[0] == ("config", "alice", None, None)
        assert sorted(told[1:], key=str) == [
            ("redis", "bob", "2001-01-31", None),
            ("redis", "bob", "9000-01-31", [MODEL]),
            ("redis", "bob", None, ["no"]),
        ]
        assert (await run("keys", "revoke", "-c", config, given=made[1].encode() + b"\n"))[0] == 0
        assert (await run("keys", "revoke", hash_key(NAMED), "-c", config))[0] == 0
        code, _, said = await run("keys", "revoke", hash_key("x"), "-c", config)
        assert (code, "is neither in the table of keys nor in" in said) == (2, True)
        text = (await run("keys", "list", "-c", config))[1]
        assert json.loads(text.splitlines()[0])["revoked"]
        assert hash_key(made[1]) not in text, "an issued key that is revoked is not listed"


async def test_a_table_that_is_corrupt_is_listed_as_far_as_it_goes_or_said(tmp_path: Path) -> None:
    async with Upstream(replies(OK)) as upstream, RedisServer() as redis:
        config = shared(tmp_path, redis.url, upstream.url)
        await redis.command("HSET", TABLE, b"\xff", "bob", hash_key("x"), b"\xfe", hash_key("y"), '{"tenant":"eve"}')
        code, out, _ = await run("keys", "list", "-c", config)
        last = json.loads(out.splitlines()[-1])
        assert (code, last["hash"], last["from"], last["tenant"]) == (0, hash_key("y"), "unknown", "eve")
        await redis.command("DEL", TABLE)
        await redis.command("SET", TABLE, "x")
        async with served(config) as gate:
            await says_of_state(gate, "not shared: .*WRONGTYPE")
            assert await gate.status(NAMED) == 200


MAKE = ("create", "--tenant", "bob", "-c", "{config}")


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("create", "--tenant", "bob"), "--tenant NAME and -c FILE belong together"),
        (("create", "--tenant", "eve", "-c", "{config}"), "has no tenant named 'eve'"),
        (
            ("create", "--tenant", "bob", "-c", "{memory}"),
            "has neither `usage:` nor `state: redis://...`: its keys stand in the file",
        ),
        (("create", "--expires", "2099-01-31"), "expires: terms of a key need -c FILE; in the file"),
        ((*MAKE, "--expires", "soon"), "expires: should be a day such as"),
        ((*MAKE, "--model", "b"), "models: no pool serves 'b'; there are: a. Name a new one under `models`"),
        ((*MAKE, "--app", "cat"), "apps: the config has no app 'cat' under `apps`; there are: chat, default."),
        ((*MAKE, "--quota", "{{"), "--quota: should be JSON such as"),
        (("revoke", "fg-key", "-c", "{config}"), "give the key itself on standard input"),
        (("revoke", "-c", "{config}"), "no key or hash on standard input"),
        (("revoke", hash_key("x")), "Missing option '-c'"),
        (("list",), "Missing option '-c'"),
    ],
)
async def test_what_the_commands_for_keys_cannot_do(tmp_path: Path, arguments: tuple[str, ...], said: str) -> None:
    (tmp_path / "memory").mkdir()
    fields = {
        "apps": [{"name": "chat"}],
        "pools": [{"name": "pool", "models": ["a"], "backends": [{"url": NOWHERE}]}],
    }
    files = {
        "config": shared(tmp_path, f"redis://127.0.0.1:{free_port()}", **fields),
        "memory": shared(tmp_path / "memory", "memory"),
    }
    code, out, errors = await run("keys", *(each.format(**files) for each in arguments), given=b"\n")
    assert (code, out) == (2, "")
    assert said in " ".join(errors.replace("│", "").split())
