"""Keys that are made while the gateway runs have quotas as those of the config, and a rotation gives nobody more."""

from __future__ import annotations

import asyncio
import json
import signal
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from gateway.config.sections.keys import hash_key
from tests.commands import run, running
from tests.gateway.capture import Upstream, replies
from tests.gateway.live import MODEL, Live, Starter, chat
from tests.kit.keys import OK, answers, issuing, listed, made, revoked, rotated
from tests.kit.served import config_file
from tests.kit.usage import CHAT
from tests.redis_server import RedisServer
from tests.waiting import eventually

pytestmark = pytest.mark.usefixtures("quick_keys")
QUOTA = {"requests_per_day": 4, "per_model": {MODEL: {"requests_per_month": 3}}}
AT_LIMIT = f"key, model {MODEL} is at its limit of 3 requests in 30 days"
TENANTS: list[dict[str, Any]] = [
    {"name": "alice", "keys": [{"hash": hash_key("named"), "quota": {"requests_per_day": 2}}, hash_key("free")]},
    {"name": "bob"},
]


async def refusal(live: Live, key: str) -> str:
    """Empty: it was answered."""
    got = await live.ask(CHAT, chat(), key=key)
    assert got.status in (200, 429), got.body
    return "" if got.status == 200 else str(got.error["message"]).partition(";")[0]


async def left(live: Live, key: str) -> dict[str, int]:
    limits = (await live.get("/fairgate/me", key=key)).json["limits"]
    return {limit["name"]: limit["remaining"] for limit in limits}


async def until_left(live: Live, key: str, expected: dict[str, int]) -> None:
    """As soon as the gateway takes the key."""

    async def is_taken() -> bool:
        return (await live.get("/fairgate/me", key=key)).status == 200

    await eventually(is_taken, 0.05)
    assert await left(live, key) == expected


async def test_an_issued_key_is_held_to_its_quota_and_so_is_what_takes_its_place(start: Starter) -> None:
    async with issuing(start) as (_, live):
        key, free = await made(live, quota=QUOTA), await made(live)
        at_model = f"requests_per_month (key, model {MODEL})"
        await until_left(live, key, {"requests_per_day (key)": 4, at_model: 3})
        assert [await refusal(live, key) for _ in range(2)] == ["", ""]
        new = await rotated(live, key, grace="1h")
        await until_left(live, new, {"requests_per_day (key)": 2, at_model: 1})
        assert await refusal(live, key) == "", "the old key is taken for a while, and both have one quota"
        assert [await refusal(live, each) for each in (key, new)] == [AT_LIMIT, AT_LIMIT]
        newest = await rotated(live, new)
        await until_left(live, newest, {"requests_per_day (key)": 1, at_model: 0})
        assert await refusal(live, newest) == AT_LIMIT
        await answers(live, free, 200)
        assert await left(live, free) == {}
        known = {each["hash"]: each for each in await listed(live)}
        assert [known[hash_key(each)]["quota"] for each in (key, newest)] == [QUOTA, QUOTA]
        assert known[hash_key(newest)]["counted_as"] == hash_key(key)
        await revoked(live, hash_key(newest))
        await answers(live, newest, 401)


async def test_a_key_of_the_config_is_rotated_with_its_quota(start: Starter) -> None:
    async with issuing(start, tenants=TENANTS) as (_, live):
        assert await refusal(live, "named") == ""
        new = await rotated(live, "named")
        await until_left(live, new, {"requests_per_day (key)": 1})
        assert await refusal(live, new) == ""
        await live.gateway.take_over(live.gateway.config)
        assert await refusal(live, new) == "key is at its limit of 2 requests a day", "a reload takes nothing away"
        await answers(live, "named", 401)
        assert await refusal(live, "free") == ""


async def test_gateways_of_one_redis_count_an_issued_key_together_over_a_restart(start: Starter) -> None:
    async with RedisServer() as redis, Upstream(replies(OK)) as upstream:
        fields: dict[str, Any] = {"tenants": TENANTS, "state": redis.url, "policy": "vtc"}
        async with start(upstream.url, **fields) as one:
            key = await made(one, quota={"requests_per_month": 4})
            await answers(one, key, 200)
            async with start(upstream.url, **fields) as two:
                await answers(two, key, 200)
                assert [await refusal(each, key) for each in (two, one)] == ["", ""]
                at_limit = "key is at its limit of 4 requests in 30 days"
                assert [await refusal(each, key) for each in (two, one)] == [at_limit, at_limit]
        async with start(upstream.url, **fields) as three:
            await until_left(three, key, {"requests_per_month (key)": 4})
            assert await refusal(three, key) == at_limit


@pytest.mark.parametrize("place", ["usage", "state"])
async def test_workers_count_an_issued_key_together_also_over_kills_where_redis_counts(
    tmp_path: Path, place: str
) -> None:
    async with RedisServer() as redis, Upstream(replies(OK)) as upstream, aiohttp.ClientSession() as http:
        url = redis.url if place == "state" else str(tmp_path / "u.db")
        config = config_file(tmp_path, upstream.url, tenants=TENANTS, workers=2, **{place: url})
        quota = ("--tenant", "bob", "--quota", '{"requests_per_day": 20}')
        key = (await run("keys", "create", "-c", config, *quota))[1].split()[1]

        async def asked(address: str) -> int:
            headers = {"authorization": f"Bearer {key}", "connection": "close"}
            async with http.post(address + CHAT, json=chat(), headers=headers) as response:
                return response.status

        served, lives = 0, 3 if place == "state" else 1
        for _ in range(lives):
            async with running("serve", "-c", config) as command:
                address = (await command.says(r"serving on (http://\S+) with 2 workers"))[1]
                served += (await asyncio.gather(*[asked(address) for _ in range(60)])).count(200)
                command.signal(signal.SIGKILL)
                await command.ended()
        assert served == 20, "what nobody has counted for it yet is not used in advance"


async def test_the_command_makes_and_lists_keys_with_quotas(tmp_path: Path) -> None:
    config = config_file(tmp_path, "http://127.0.0.1:1", tenants=TENANTS, usage=str(tmp_path / "u.db"))
    quota = '{"tokens_per_day":9,"per_model":{"m":{"concurrent":1}}}'
    code, out, _ = await run("keys", "create", "-c", config, "--tenant", "bob", "--quota", quota)
    assert code == 0
    listed = [json.loads(line) for line in (await run("keys", "list", "-c", config))[1].splitlines()]
    [one] = [one for one in listed if one["hash"] == out.split()[3]]
    assert {name: value for name, value in one["quota"].items() if value} == json.loads(quota)
