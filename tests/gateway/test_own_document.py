"""Each team sees its own: what /fairgate/me shows a tenant's key, and that it shows nothing of others."""

from __future__ import annotations

import asyncio
import json
import re
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest

from gateway.config.sections.keys import hash_key
from gateway.operator.self_service.self_service import PAGE
from tests.gateway.capture import Upstream, replies
from tests.gateway.live import CHAT, Answer, Live, Simulated, Starter, chat, simulated, until
from tests.kit.browser import CHROMIUM, expect, window
from tests.kit.usage import OK, written

GROUPS = [{"name": "research", "guaranteed_share": 0.3, "max_running": 40}, {"name": "nlp", "group": "research"}]
TENANTS: list[dict[str, Any]] = [
    {"name": "alice", "group": "nlp", "keys": [hash_key("key-of-alice")], "quota": {"requests_per_minute": 100}},
    {"name": "mallory", "weight": 2, "keys": [hash_key("key-of-mallory")]},
]


@pytest.fixture(autouse=True)
def _fresh(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gateway.operator.self_service.self_service.AGAIN_S", 0.0)


@asynccontextmanager
async def live_before_engine(
    start: Starter, capacity: dict[str, int] | None = None, **fields: Any
) -> AsyncIterator[tuple[Simulated, Live]]:
    async with simulated() as sim:
        pools = [{"name": "pool", "backends": [{"url": sim.url}], "capacity": capacity or {}}]
        async with start(pools=pools, tenants=TENANTS, groups=GROUPS, **fields) as live:
            yield sim, live


def ask(live: Live, count: int, key: str, **fields: Any) -> list[asyncio.Future[Answer]]:
    """So many requests at once."""
    bodies = [chat(f"{key}{n}", max_tokens=4, **fields) for n in range(count)]
    return [asyncio.ensure_future(live.ask(CHAT, body, key=key)) for body in bodies]


async def come(live: Live, count: int) -> None:
    """Until so many wait or run."""
    await until(lambda: live.engine.queued + live.engine.dispatched == count)


async def test_a_tenant_sees_its_place_its_limits_and_its_requests_and_nothing_of_others(start: Starter) -> None:
    async with live_before_engine(start) as (sim, live):
        sim.faults.is_still = True
        asked = [
            each for _ in range(8) for key in ("alice", "mallory", "mallory") for each in ask(live, 1, f"key-of-{key}")
        ]
        asked += ask(live, 1, "key-of-alice", service_tier="flex")
        await come(live, 25)
        got = await live.get("/fairgate/me", key="key-of-alice")
        assert got.status == 200
        assert b"mallory" not in got.body
        me = got.json
        assert [place["name"] for place in me["place"]] == ["research", "nlp", "alice"]
        assert me["place"][0]["guaranteed_share"] == 0.3
        assert (me["limits"][0]["limit"], me["limits"][0]["remaining"]) == (100, 91)
        [pool] = me["pools"]
        own, batch = pool["interactive"], pool["batch"]
        assert own["queued_requests"] + own["running_requests"] == 8
        assert batch["queued_requests"] + batch["running_requests"] == 1
        assert own["share"] == 0.3333
        assert len(pool["requests"]) == own["queued_requests"] + batch["queued_requests"] > 0
        assert len(pool["requests"]) + pool["requests_left_out"] == 9
        assert {request["app"] for request in pool["requests"]} == {"default"}
        other = (await live.get("/fairgate/me", key="key-of-mallory")).json
        assert (other["place"], other["limits"]) == ([{"name": "mallory", "weight": 2.0}], [])
        sim.faults.is_still = False
        assert {answer.status for answer in await asyncio.gather(*asked)} == {200}


async def test_only_a_key_that_is_known_sees_anything_but_the_files_of_the_page(start: Starter) -> None:
    async with live_before_engine(start) as (_, live):
        assert [(await live.get("/fairgate/me", key=key)).status for key in ("key-of-nobody", None)] == [401, 401]
        for path in (PAGE, f"{PAGE}/me.js", f"{PAGE}/page.css"):
            got = await live.get(path, key=None)
            assert got.status == 200
            assert "script-src 'self'" in got.headers["content-security-policy"]
            assert b"alice" not in got.body
        for path in ("/fairgate/you", f"{PAGE}/index.html"):
            assert (await live.get(path, key="key-of-alice")).status == 404
        for path in ("/fairgate/me", PAGE):
            assert (await live.ask(path, {}, key="key-of-alice")).status == 405


async def test_a_fault_is_answered_logged_and_leaves_the_place_free(
    start: Starter, monkeypatch: pytest.MonkeyPatch
) -> None:
    def unforeseen(*_: Any) -> None:
        raise TypeError("nobody thought of it")

    async with live_before_engine(start, limits={"unqueued_max": 1}) as (_, live):
        with monkeypatch.context() as patch:
            patch.setattr("gateway.operator.self_service.self_service.own_document", unforeseen)
            got = await live.get("/fairgate/me", key="key-of-alice")
        assert (got.status, got.error["code"]) == (500, "internal_error")
        assert (await live.get("/fairgate/me", key="key-of-alice")).status == 200
        ends = [(line["outcome"], line["reason"]) for line in await live.lines(2)]
        assert ends == [("failed", "internal_error"), ("completed", "")]


async def me(live: Any, key: str) -> Any:
    got = await live.get("/fairgate/me", key=key)
    assert (got.status, got.headers["cache-control"]) == (200, "no-store")
    return got.json


async def test_it_says_what_was_received_and_used_and_costs(
    start: Starter, usage_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    usage = {"url": usage_url, "prices": {"simulated": {"input": 1e6, "output": 0}}}
    async with (
        Upstream(replies(OK)) as upstream,
        start(upstream.url, tenants=TENANTS, groups=GROUPS, usage=usage) as live,
    ):
        for key, requests in (("key-of-alice", 2), ("key-of-mallory", 5)):
            for _ in range(requests):
                assert (await live.ask(CHAT, chat(), key=key)).status == 200
        await written(live)
        for key, requests in (("key-of-alice", 2), ("key-of-mallory", 5)):
            found = await me(live, key)
            [pool] = found["pools"]
            tokens = requests * 9
            received = pool["recently"]
            assert received["service_received"] == received["service_due"] > 0, "nobody waited"
            for used in (found["usage"]["day"], found["usage"]["month"]):
                assert (used["requests"], used["input_tokens"] + used["output_tokens"]) == (requests, tokens)
                assert used["cost"] == used["input_tokens"]
            assert sum(one["requests"] for one in found["hours"]) == requests
        assert found["recently_s"] == 300.0


async def test_the_wait_that_is_told_is_behind_what_waits_of_its_own_once_it_is_learned(start: Starter) -> None:
    async with live_before_engine(start) as (sim, live):

        async def told(key: str) -> tuple[float | None, str]:
            [pool] = (await me(live, key))["pools"]
            return pool["interactive"]["expected_wait_s"], pool["waits_for"]

        sim.faults.is_still = True
        unlearned = ask(live, 60, "key-of-alice")
        await come(live, 60)
        wait_s, waits_for = await told("key-of-alice")
        assert (wait_s, waits_for != "") == (None, True)
        sim.faults.is_still = False
        await asyncio.gather(*unlearned)
        assert await told("key-of-alice") == (0.0, "")

        asked = ask(live, 150, "key-of-mallory", user="u")
        requests, clock = live.engine.requests, live.gateway.pools[0].dispatcher.clock
        waiting = requests.waiting
        await until(
            lambda: any(requests.expected(one, clock(), comes=False).is_learned for one in waiting.of_tenant("mallory"))
        )
        sim.faults.is_still = True
        await until(lambda: live.engine.queued > 30)
        wait_s, _ = await told("key-of-mallory")
        newest = waiting.of_tenant("mallory")[-1]
        behind_all_s = requests.expected(newest, clock(), comes=True).wait_s
        assert wait_s is not None
        assert wait_s > behind_all_s / 2, "the line has moved on since it was told"
        sim.faults.is_still = False
        assert {answer.status for answer in await asyncio.gather(*asked)} == {200}


async def test_why_a_team_was_slow_is_remembered_by_the_minute_and_names_nobody(start: Starter) -> None:
    async with live_before_engine(start, capacity={"waiting_target": 0}) as (sim, live):
        sim.faults.is_still = True
        flood = ask(live, 60, "key-of-mallory")
        await come(live, 60)
        [own] = ask(live, 1, "key-of-alice")
        await come(live, 61)
        sim.faults.is_still = False
        got = await own
        await asyncio.gather(*flood)
        assert (await live.ask(CHAT, chat(max_tokens=9, model="another"), key="key-of-alice")).status == 404
        found = await me(live, "key-of-alice")
        [minute] = found["minutes"]
        slowest = minute["slowest"]
        assert (minute["requests"], minute["not_served"]) == (1, 0)
        assert slowest["request_id"] == got.headers["x-request-id"]
        assert minute["at_s"] <= slowest["arrived_at_s"] < minute["at_s"] + 60
        assert abs(slowest["arrived_at_s"] - time.time()) < 60
        assert re.fullmatch(r"waited [\d.]+ s: .*", slowest["waited"])
        assert slowest["wait_s"] == minute["wait_s_mean"] > 0
        assert "mallory" not in json.dumps(found)
        assert "backend" not in slowest


async def test_who_waits_is_due_its_part_of_what_is_served(start: Starter) -> None:
    async with live_before_engine(start) as (sim, live):
        await asyncio.gather(*ask(live, 40, "key-of-mallory"))
        sim.faults.is_still = True
        asked = ask(live, 60, "key-of-mallory") + ask(live, 60, "key-of-alice")
        await come(live, 120)
        [pool] = (await me(live, "key-of-alice"))["pools"]
        received, due = (pool["recently"][name] for name in ("service_received", "service_due"))
        assert received < due, "it has waited for a third of what mallory received"
        sim.faults.is_still = False
        await asyncio.gather(*asked)


@pytest.mark.skipif(CHROMIUM is None, reason="no Chromium is installed (Debian: apt-get install chromium)")
async def test_the_page_asks_for_a_key_and_shows_what_is_its_own(start: Starter) -> None:
    async with live_before_engine(start) as (_, live), window(quiet=False) as seen:
        for key in ("key-of-alice", "key-of-mallory"):
            assert (await live.ask(CHAT, chat(max_tokens=4), key=key)).status == 200
        await seen.page.goto(live.url + PAGE)
        await seen.shows("#link", "needs your key")
        await seen.is_accessible()
        for key, says in (("a-wrong-key", "This gateway does not accept the key."), ("key-of-alice", "")):
            await seen.page.locator("#token").fill(key)
            await seen.page.locator("#token-form button").click()
            if says:
                await expect(seen.page.locator("#token-wrong")).to_be_visible()
        await seen.shows("#link", "live")
        await seen.shows(
            "#received-body", "research (weight 1, guaranteed share 30 %, max running 40) › nlp (weight 1) › alice"
        )
        await seen.shows("#limits-body", "99 of 100 left")
        await seen.shows("#now-body", "None of your requests waits; 0 run; a new request starts at once.")
        await seen.shows("#received-body", "Last 5 min 100 % of what was due")
        await seen.shows("#requests-body", re.compile(r"1 request, waited \d+ ms on average\. The slowest: .*4 out"))
        await seen.page.locator("#request-filter").fill("no such minute")
        await seen.shows("#requests-body", "No minute matches.")
        assert "mallory" not in await seen.page.content()
        await seen.is_accessible()
        assert [fault for fault in seen.faults if "401" not in fault] == []
