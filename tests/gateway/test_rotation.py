"""Keys that are made while the gateway runs have terms and quotas, which go over to the key that replaces them."""

from __future__ import annotations

import asyncio
import json
import re
import signal
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from gateway.config.sections.keys import KeyConfig, hash_key
from gateway.keys.in_database import DatabaseKeys
from gateway.keys.issuance import KeyRefused, moment, rotate, seconds_of
from gateway.keys.issued import entry, read_entry
from tests.commands import run, running
from tests.gateway.capture import OK, Upstream, replies
from tests.gateway.live import CHAT, MODEL, Live, Starter, chat
from tests.kit.keys import MOMENT, NAMED, TENANTS, answers, database_at, issuing, listed, made, revoked, rotated
from tests.kit.served import config_file
from tests.redis_server import RedisServer
from tests.waiting import eventually

pytestmark = pytest.mark.usefixtures("quick_keys")
NOW = 1_800_000_000.0


@pytest.mark.parametrize("grace", ["0s", "1h"])
async def test_a_rotated_key_keeps_its_terms_and_the_old_one_ends(start: Starter, grace: str) -> None:
    terms = {"tenant": "bob", "apps": ["chat"], "models": [MODEL], "expires": "9000-01-31", "weight": 4, "label": "x"}
    async with issuing(start) as (upstream, live):
        old = await made(live, **terms)
        await answers(live, old, 200)
        new = await rotated(live, old, grace=grace)
        await answers(live, new, 200)
        await answers(live, old, 200 if grace == "1h" else 401)
        known = {each["hash"]: each for each in await listed(live)}
        assert {name: known[hash_key(new)][name] for name in terms} == terms
        assert (hash_key(old) in known) == (grace == "1h")
        if grace == "1h":
            assert re.fullmatch(MOMENT, known[hash_key(old)]["expires"])
            assert known[hash_key(old)]["weight"] == 4

        config = config_file(start.directory, upstream.url, tenants=TENANTS, usage=str(start.directory / "usage.db"))
        code, out, said = await run("keys", "rotate", "-c", config, given=new.encode() + b"\n")
        assert (code, said) == (0, "the old key is revoked\n")
        await answers(live, out.split()[1], 200)
        await answers(live, new, 401)
        code, out, _ = await run("keys", "rotate", hash_key(NAMED), "-c", config)
        assert code == 0
        await answers(live, NAMED, 401)
        await answers(live, out.split()[1], 200)
        code, out, said = await run("keys", "rotate", hash_key(out.split()[1]), "--grace", "7d", "-c", config)
        assert (code, said) == (0, "the old key is taken for 7d more\n")


@pytest.mark.parametrize(
    ("noted", "options", "said"),
    [
        (None, {}, "no such key"),
        ("", {}, "this key is revoked"),
        ("{", {}, "its entry cannot be read"),
        (entry("bob", KeyConfig(hash=hash_key("k"), expires="2001-01-31")), {}, "expires: 2001-01-31 is past"),
        (entry("bob", KeyConfig(hash=hash_key("k"))), {"expires": "soon"}, "expires: should be a day such as"),
        (entry("bob", KeyConfig(hash=hash_key("k"), models=("gone",))), {}, "models: no pool serves 'gone'"),
    ],
)
async def test_what_cannot_be_rotated_stays_as_it_is(
    start: Starter, noted: str | None, options: dict[str, Any], said: str
) -> None:
    pools = [{"name": "pool", "models": [MODEL], "backends": [{"url": "http://127.0.0.1:1"}]}]
    config = start.config(tenants=TENANTS, pools=pools)
    async with database_at(str(start.directory / "usage.db")) as database:
        table = DatabaseKeys(database)
        await table.note({hash_key("k"): noted})
        with pytest.raises(KeyRefused, match=re.escape(said)):
            await rotate(
                table, config, hash_key("k"), hash_key("n"), unix_s=NOW, grace_s=0, **{"expires": None, **options}
            )
        assert await table.entry(hash_key("n")) is None
        assert await table.entry(hash_key("k")) == (None if noted is None else noted.encode())
        with pytest.raises(KeyRefused, match="the config names this key"):
            await rotate(table, config, hash_key(NAMED), hash_key("n"), unix_s=NOW, grace_s=1, expires=None)


@pytest.mark.parametrize(("expires", "ends"), [(None, NOW + 60), ("2027-01-15T08:00:10Z", NOW + 10)])
async def test_an_old_key_ends_after_its_grace_or_when_it_would_have(
    start: Starter, expires: str | None, ends: float
) -> None:
    config = start.config("http://127.0.0.1:1", tenants=TENANTS)
    async with database_at(str(start.directory / "usage.db")) as database:
        table = DatabaseKeys(database)
        await table.note({hash_key("k"): entry("bob", KeyConfig(hash=hash_key("k"), expires=expires, label="x"))})
        tenant, new = await rotate(
            table, config, hash_key("k"), hash_key("n"), unix_s=NOW, grace_s=60, expires="9000-01-31"
        )
        assert (tenant, new.expires, new.label, new.created) == ("bob", "9000-01-31", "x", moment(NOW))
        assert read_entry(new.hash.encode(), await table.entry(new.hash) or b"") == ("bob", new)
        _, old = read_entry(hash_key("k").encode(), await table.entry(hash_key("k")) or b"")
        assert old.expires_s == ends


def test_a_grace_is_a_number_and_a_unit() -> None:
    assert [seconds_of(text) for text in ("0s", "30m", "24h", "7d")] == [0, 1800, 86_400, 604_800]
    for text in ("", "1", "h", "-1h", "1.5h", "999999d"):
        with pytest.raises(KeyRefused, match="is no time to go on"):
            seconds_of(text)


# --- quotas ---


QUOTA = {"requests_per_day": 4, "per_model": {MODEL: {"requests_per_month": 3}}}
AT_LIMIT = f"key, model {MODEL} is at its limit of 3 requests in 30 days"
WITH_QUOTAS: list[dict[str, Any]] = [
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


async def test_a_key_is_held_to_its_quota_and_so_is_what_takes_its_place(start: Starter) -> None:
    async with issuing(start, tenants=WITH_QUOTAS) as (_, live):
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

        assert await refusal(live, "named") == "", "one of the config"
        new = await rotated(live, "named")
        await until_left(live, new, {"requests_per_day (key)": 1})
        assert await refusal(live, new) == ""
        await live.gateway.take_over(live.gateway.config)
        assert await refusal(live, new) == "key is at its limit of 2 requests a day", "a reload takes nothing away"
        await answers(live, "named", 401)
        assert await refusal(live, "free") == ""


@pytest.mark.parametrize("place", ["usage", "state"])
async def test_workers_count_an_issued_key_together_also_over_kills_where_redis_counts(
    tmp_path: Path, place: str
) -> None:
    async with RedisServer() as redis, Upstream(replies(OK)) as upstream, aiohttp.ClientSession() as http:
        url = redis.url if place == "state" else str(tmp_path / "u.db")
        config = config_file(tmp_path, upstream.url, tenants=WITH_QUOTAS, workers=2, **{place: url})
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
    config = config_file(tmp_path, "http://127.0.0.1:1", tenants=WITH_QUOTAS, usage=str(tmp_path / "u.db"))
    quota = '{"tokens_per_day":9,"per_model":{"m":{"concurrent":1}}}'
    code, out, _ = await run("keys", "create", "-c", config, "--tenant", "bob", "--quota", quota)
    assert code == 0
    entries = [json.loads(line) for line in (await run("keys", "list", "-c", config))[1].splitlines()]
    [one] = [one for one in entries if one["hash"] == out.split()[3]]
    assert {name: value for name, value in one["quota"].items() if value} == json.loads(quota)
