"""Two gateways with one Redis find a prompt where the other one sent it, and go on alone without harm."""

from __future__ import annotations

import asyncio
import itertools

import msgspec
import pytest

from gateway.storage.redis.redis_connection import PUBLISHED_BYTES_MAX
from gateway.storage.redis.redis_store import pool_key
from policies.replicas.messages import PrefixReport
from policies.replicas.prefixes import VERSION
from tests.gateway.live import WAIT_S, Starter, simulated, until
from tests.kit.pairs import pair
from tests.kit.turns import ask, cached_in_turns, index_of, text
from tests.redis_server import RedisServer
from tests.waiting import eventually

CHANNEL = pool_key("pool", "news:0")


async def listening(redis: RedisServer, gateways: int) -> None:
    """Until so many gateways would hear of a prompt."""
    async with asyncio.timeout(WAIT_S), redis.client() as client:
        while (await client.execute_command("PUBSUB", "NUMSUB", CHANNEL))[1] != gateways:  # noqa: ASYNC110
            await asyncio.sleep(0.01)


async def test_turns_that_come_to_different_gateways_find_what_one_gateway_finds(start: Starter) -> None:
    async with simulated() as a, simulated() as b, simulated() as c, start(a.url, b.url, c.url) as one:
        expected = await cached_in_turns(one)
    async with pair(start, 3) as (redis, _, first, second):
        await listening(redis, 2)
        assert await cached_in_turns(first, second) == pytest.approx(expected, rel=0.01)
    assert expected > 0


async def test_what_others_publish_is_ignored_and_said_once(start: Starter, caplog: pytest.LogCaptureFixture) -> None:
    def said() -> int:
        return sum("gateway's report of prompts" in record.message for record in caplog.records)

    async with pair(start, 2) as (redis, _, first, second):
        await listening(redis, 2)
        of_tomorrow = PrefixReport(VERSION + 1, "other", {"backend": [(1, 2)]}, {})
        for content in (b"", b"garbage", msgspec.msgpack.encode(of_tomorrow), msgspec.msgpack.encode([1, "other"])):
            await redis.command("PUBLISH", CHANNEL, content)
        await until(lambda: said() == 2)
        await redis.command("PUBLISH", CHANNEL, b"x" * (PUBLISHED_BYTES_MAX + 100_000))
        await listening(redis, 0)  # too much at once: both have given up their connections
        await listening(redis, 2)
        await ask(first, text(1, 100))
        await until(lambda: len(index_of(second)) > 0)
        assert said() == 2, "each gateway once"


async def test_without_redis_each_goes_on_and_they_hear_each_other_again(start: Starter) -> None:
    async with pair(start, 2) as (redis, _, first, second):
        await listening(redis, 2)
        await ask(first, text(0, 100))
        await until(lambda: len(index_of(second)) > 0)
        heard = len(index_of(second))
        await redis.kill()
        await ask(first, text(1, 100))
        assert len(index_of(second)) == heard
        assert await redis.start()
        await listening(redis, 2)
        numbers = itertools.count(2)

        async def is_heard() -> bool:  # what is said while it is not known yet that Redis is back is lost
            await ask(first, text(next(numbers), 100))
            return len(index_of(second)) > heard

        await eventually(is_heard)


async def test_without_rights_to_the_channel_the_rest_is_shared(
    start: Starter, caplog: pytest.LogCaptureFixture
) -> None:
    async with RedisServer() as redis, simulated() as a, simulated() as b:
        rights = "~fairgate:* resetchannels +info +eval +evalsha +@read +@write +time"
        await redis.command("ACL", "SETUSER", "gate", "on", ">pw", *rights.split())
        async with start(a.url, b.url, state=f"redis://gate:pw@127.0.0.1:{redis.port}/0") as live:
            await ask(live, text(1, 100))
            await until(lambda: any("&fairgate:*" in record.message for record in caplog.records))
            await ask(live, text(2, 100))
            assert live.gateway.state() == "shared"
        assert sum("&fairgate:*" in record.message for record in caplog.records) == 1
