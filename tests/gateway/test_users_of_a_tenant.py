"""Users of a tenant: blocked, limited, and found by their names; keys told apart by their labels."""

from __future__ import annotations

import json
from typing import Any

import pytest

from gateway.config.model import TenantConfig
from gateway.config.sections.keys import hash_key
from gateway.http.errors import ApiError
from gateway.keys.identity import Keyring
from tests.commands import run
from tests.gateway.capture import Upstream, replies
from tests.gateway.live import Live, Starter, chat, until
from tests.kit.served import config_file
from tests.kit.usage import CHAT, OK
from tests.redis_server import RedisServer

USERS: list[dict[str, Any]] = [
    {"name": "eve@x.org", "blocked": True},
    {"name": "ann", "quota": {"requests_per_day": 2}},
    {"name": "*", "quota": {"requests_per_day": 1}},
    {"name": "free"},
]
TENANTS: list[dict[str, Any]] = [
    {"name": "a", "keys": [{"hash": hash_key(f"a{n}"), "label": f"key {n}"} for n in range(2)], "users": USERS},
    {"name": "b", "keys": [hash_key("b")]},
]


async def codes(live: Live, user: str, times: int, key: str = "a0") -> list[str]:
    found = [await live.ask(CHAT, chat(user=user), key=key) for _ in range(times)]
    return ["" if one.status == 200 else f"{one.status} {one.error['code']}" for one in found]


async def test_users_are_blocked_and_limited_by_name_each_alike_or_not_at_all(start: Starter) -> None:
    async with Upstream(replies(OK)) as upstream, start(upstream.url, tenants=TENANTS) as live:
        assert await codes(live, "eve@x.org", 1) == ["403 user_blocked"]
        assert await codes(live, "eve@x.org", 1, "b") == [""], "of another tenant"
        assert await codes(live, "ann", 3) == ["", "", "429 rate_limited"]
        for other in ("tom", "name with spaces", "x m"):
            assert await codes(live, other, 2) == ["", "429 rate_limited"]
        assert await codes(live, "free", 4) == await codes(live, "", 4) == [""] * 4
        refused = await live.ask(CHAT, chat(user="tom"), key="a1")
        assert refused.error["message"].startswith("user is at its limit of 1 requests a day; come back")
        metrics = await live.metrics()
        of_keys = {labels[1:]: n for labels, n in metrics.items() if labels[0] == "fairgate_key_not_completed_total"}
        assert of_keys == {
            ("key 0", "refused", "user_blocked", "a"): 1, ("key 0", "refused", "rate_limited", "a"): 4,
            ("key 1", "refused", "rate_limited", "a"): 1,
        }  # fmt: skip


async def test_two_gateways_count_a_user_together(start: Starter) -> None:
    async with (
        RedisServer() as redis,
        Upstream(replies(OK)) as upstream,
        start(upstream.url, tenants=TENANTS, state=redis.url) as one,
        start(upstream.url, tenants=TENANTS, state=redis.url) as two,
    ):
        served = [await codes(live, "ann", 1) for _ in range(3) for live in (one, two)]
        assert served.count([""]) == 2
        assert await codes(two, "tom", 2) == ["", "429 rate_limited"]


def test_a_user_is_freed_by_other_tenants_of_a_reload() -> None:
    blocked = TenantConfig.model_validate({"name": "a", "users": USERS})
    keyring = Keyring([blocked], open_access=False)
    with pytest.raises(ApiError, match="this user is blocked"):
        keyring.check_user("a", "eve@x.org")
    keyring.take_over(keyring.read([blocked.model_copy(update={"users": ()})]), open_access=False)
    keyring.check_user("a", "eve@x.org")


async def test_a_user_is_found_by_its_name_and_use_by_the_label_of_the_key(start: Starter) -> None:
    path = start.directory / "u.db"
    fields: dict[str, Any] = {"tenants": TENANTS, "usage": str(path)}
    async with Upstream(replies(OK)) as upstream, start(upstream.url, **fields) as live:
        assert await codes(live, "free", 2) == ["", ""]
        assert await codes(live, "free", 1, "a1") == [""]
        assert await codes(live, "tom", 1, "b") == [""]
        await until(live.holds_nothing)
    config = config_file(start.directory, "http://127.0.0.1:1", access_log=str(live.log), **fields)
    by = ("usage", "-c", config, "--json", "--by")
    rows = json.loads((await run(*by, "tenant,key"))[1])["rows"]
    found = [(row["tenant"], row["key"], row["requests"]) for row in rows]
    assert found == [("a", "key 0", 2), ("a", "key 1", 1), ("b", "", 1)]
    [row] = json.loads((await run(*by, "tenant", "--user", "free"))[1])["rows"]
    assert (row["tenant"], row["requests"]) == ("a", 3)
    said = (await run("explain", "-c", config, "--tenant", "a", "--user", "free"))[1]
    assert said.startswith("3 requests of a: 3 completed.")
    code, _, why = await run("explain", "-c", config, "--tenant", "a", "--user", "nobody")
    assert (code, "no request of nobody of a came" in why) == (1, True)
