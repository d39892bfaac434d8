"""Limits of a day go on from the usage that is counted durably; keys, models and users have their own."""

from __future__ import annotations

import asyncio
import json
import re
import time
from contextlib import closing
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

from gateway.config.model import TenantConfig
from gateway.config.sections.keys import hash_key
from gateway.config.sections.limits import ModelQuotasConfig
from gateway.config.sections.services import UsageConfig
from gateway.http.errors import ApiError
from gateway.keys.identity import Keyring
from gateway.process.gateway import Gateway
from gateway.proxy.refusals import in_words, rate_limit_headers, refusal_error
from gateway.usage.counts import UsageTotals
from gateway.usage.database import Database
from gateway.usage.thread import DatabaseThread
from gateway.usage.usage_report import UsageQuery, read
from gateway.usage.written import UsageBatch, add_batch, used_before
from policies.admission.decisions import Reject
from policies.limits.quotas import DAY_S, Quota, Quotas, UsageBucket
from policies.request import Limit, RejectReason, ServiceTokens
from tests.commands import run
from tests.gateway.capture import Peer, Seen, Upstream, replies
from tests.gateway.live import CHAT, MODEL, Live, Starter, chat, until
from tests.kit.held import Held
from tests.kit.pairs import pair
from tests.kit.served import config_file
from tests.kit.usage import OK, TENANTS, database_at, written
from tests.postgres_server import PostgresServer


def remaining(live: Live, tenant: str) -> list[int]:
    quotas = live.gateway.shared.quotas
    assert quotas is not None
    return [limit.remaining for limit in quotas.standing(tenant, time.monotonic())]


async def test_a_limit_of_a_day_goes_on_after_a_restart(start: Starter, usage_url: str) -> None:
    fields: dict[str, Any] = {"tenants": TENANTS, "usage": usage_url, "quota": {"tokens_per_day": 60}}
    async with Upstream(replies(OK)) as upstream:
        for asked, left in ((5, 60 - 5 * 9), (1, 60 - 6 * 9)):
            async with start(upstream.url, **fields) as live:
                for _ in range(asked):
                    assert (await live.ask(CHAT, chat())).status == 200
                assert remaining(live, "alice") == [left]
        async with start(upstream.url, **fields) as live:
            got = await live.ask(CHAT, chat())
            assert (got.status, got.error["code"]) == (429, "rate_limited")
            assert (await live.ask(CHAT, chat(), key="b")).status == 200
        async with start(upstream.url, **{**fields, "usage": str(start.directory / "other.db")}) as live:
            assert (await live.ask(CHAT, chat())).status == 200


async def takes_over(gateway: Gateway, quota: dict[str, int]) -> Quotas:
    await gateway.take_over(gateway.config.model_copy(update={"quota": ModelQuotasConfig.model_validate(quota)}))
    assert gateway.shared.quotas is not None
    return gateway.shared.quotas


@pytest.mark.parametrize("flush_s", [0.0, 3600.0])
async def test_a_limit_that_a_reload_brings_goes_on_from_what_was_used(
    start: Starter, usage_url: str, flush_s: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("gateway.usage.recorder.FLUSH_S", flush_s)
    may_end = asyncio.Event()

    async def script(seen: Seen, peer: Peer) -> None:
        if b"held" in seen.body:
            await may_end.wait()
        await peer.send(OK)

    async with Upstream(script) as upstream, start(upstream.url, tenants=TENANTS, usage=usage_url) as live:
        gateway = live.gateway
        assert gateway.usage is not None
        for _ in range(3):
            assert (await live.ask(CHAT, chat())).status == 200
        await gateway.usage.flush()
        assert (await live.ask(CHAT, chat())).status == 200
        held = asyncio.create_task(live.ask(CHAT, chat("held")))
        await until(lambda: len(upstream.requests) == 5)
        quotas = await takes_over(gateway, {"requests_per_minute": 1000})
        assert await takes_over(gateway, {"tokens_per_day": 100}) is quotas
        may_end.set()
        assert (await held).status == 200
        await until(live.holds_nothing)
        for flushed in (False, True):
            if flushed:
                await gateway.usage.flush()
            assert (remaining(live, "alice"), remaining(live, "bob")) == ([100 - 5 * 9], [100])
        await takes_over(gateway, {"tokens_per_day": 45})
        assert (await live.ask(CHAT, chat())).status == 429
        assert (await live.ask(CHAT, chat(), key="b")).status == 200


async def test_such_a_limit_counts_once_what_waits_for_a_database_that_is_gone(start: Starter) -> None:
    async with PostgresServer() as server, Upstream(replies(OK)) as upstream:
        async with start(upstream.url, tenants=TENANTS, usage=server.url) as live:
            usage = live.gateway.usage
            assert usage is not None
            for gone in (False, True):
                assert (await live.ask(CHAT, chat())).status == 200
                if not gone:
                    await written(live)
                    await server.crash()
            await usage.flush()
            assert usage.fault is not None  # the batch is kept
            assert (await live.ask(CHAT, chat())).status == 200
            await takes_over(live.gateway, {"tokens_per_day": 100})
            assert (await live.ask(CHAT, chat())).status == 200
            await server.start()
            await written(live)
            assert remaining(live, "alice") == [100 - 4 * 9]


def test_a_day_goes_on_from_what_is_left_of_the_one_before() -> None:
    quotas = Quotas(Quota(tokens_per_day=1000))
    quotas.day.epoch_s = 13 * 3600  # at 0
    hours = {-13: 1000, -12: 400, -1: 200, 0: 100, 1: 50}  # since midnight
    used = [UsageBucket(hour * 3600 + 3600, "t", "", 1, ServiceTokens(tokens, 0), 0) for hour, tokens in hours.items()]
    quotas.go_on(used, 0.0)
    assert quotas.standing("t", 0.0)[0].remaining == 1000 - 750
    assert quotas.standing("t", 11.5 * 3600)[0].remaining == 1000 - 150


async def test_a_limit_of_a_day_tells_one_time_and_in_words(start: Starter) -> None:
    fields: dict[str, Any] = {"tenants": TENANTS, "quota": {"tokens_per_day": 10}}
    async with Upstream(replies(OK)) as upstream, start(upstream.url, **fields) as live:
        assert (await live.ask(CHAT, chat())).status == 200
        for _ in range(20):  # each is spread by its own id
            got = await live.ask(CHAT, chat())
            assert got.status == 429
            told_s = int(got.headers["retry-after"])
            assert told_s <= DAY_S * 61 / 60
            assert got.headers["x-should-retry"] == "false", "a spent budget is not worth another try"
            assert 0 <= 1000 * told_s - int(got.headers["retry-after-ms"]) < 1000
            assert got.error["message"] == f"you are at your limit of 10 tokens a day; come back in {in_words(told_s)}"
            hours, minutes, seconds = map(int, re.findall(r"\d+", got.headers["x-ratelimit-reset-tokens"]))
            assert hours * 3600 + minutes * 60 + seconds == told_s, "one time, wherever it is told"


@pytest.mark.parametrize("reset_s", [0.5, 100_000.0])
def test_no_wait_that_is_said_is_longer_than_its_window(reset_s: float) -> None:
    limit = Limit("tokens_per_day", 10, 0, reset_s, DAY_S)
    for number in range(100):
        error = refusal_error(Reject(str(number), RejectReason.RATE_LIMITED, reset_s, limit), 200_000.0)
        assert error.retry_after_s == DAY_S, "nor is it longer for an engine's sake"
        error = refusal_error(Reject(str(number), RejectReason.RATE_LIMITED, reset_s, limit), 0.0)
        assert error.retry_after_s is not None
        assert error.retry_after_s == min(reset_s, DAY_S), "to the moment: nobody retries by itself"
    [told] = [value for name, value in rate_limit_headers([limit]) if name == b"x-ratelimit-reset-tokens"]
    assert told == (b"500ms" if reset_s < 1 else b"24h0m0s")


@pytest.mark.parametrize(
    ("seconds", "words"),
    [
        (0.0, "1 second"),
        (0.2, "1 second"),
        (1.5, "2 seconds"),
        (59.5, "1 minute"),
        (61.0, "1 minute 1 second"),
        (3599.5, "1 hour"),
        (3600.5, "1 hour 1 minute"),
        (12_000.0, "3 hours 20 minutes"),
        (86_399.0, "24 hours"),
        (86_400.0, "24 hours"),
        (86_400.5, "1 day 1 hour"),
        (30 * 86_400.0, "30 days"),
    ],
)
def test_a_wait_in_words(seconds: float, words: str) -> None:
    assert in_words(seconds) == words


@pytest.mark.parametrize("now_day", [59.5, 60.0, 61.2, 75.0, 89.9])
async def test_what_was_used_in_a_month_goes_on(start: Starter, now_day: float) -> None:
    config = UsageConfig.model_validate({"url": str(start.directory / "old.db")})
    sums = {}
    for day in range(100):
        for tenant in ("alice", "bob"):
            totals = sums[day * 24 + 7, tenant, "", "", "", ""] = UsageTotals()
            totals.requests, totals.refused, totals.input_tokens, totals.output_tokens = 3, 1, day, 1000
    with closing(Database(config, makes=True)) as database:
        add_batch(database, UsageBatch("before", 1, sums), 0)
    quotas = Quotas(Quota(tokens_per_month=10**6), {" team": Quota(requests_per_month=10**6)}, {"bob": (" team",)})
    quotas.day.epoch_s = quotas.month.epoch_s = now_s = now_day * DAY_S
    thread = DatabaseThread(config)
    found = await used_before(thread, quotas, now_s)
    quotas.go_on(found, 0.0)
    await thread.close(1.0)
    by_hours = (int(quotas.month.window.since_s(now_s) // DAY_S), int(now_day) - 1, int(now_day))
    ends = {day: day + 8 / 24 if day in by_hours else day + 1 for day in range(int(now_day) + 1)}
    for counts in (quotas.day, quotas.month):
        for member in ("alice", "bob", " team"):
            of_it = [day for day, end in ends.items() if end > counts.window.since_s(now_s) / DAY_S]
            assert counts.sums(member)[1:3] == (2 * len(of_it), sum(1000 + day for day in of_it))


async def test_seconds_at_engines_are_a_limit_and_go_on_after_a_restart(start: Starter, usage_url: str) -> None:
    ahead_s, engine = [0.0], Held(OK)
    groups = [{"name": "team", "quota": {"engine_seconds_per_day": 10}}]
    fields: dict[str, Any] = {
        "tenants": [TENANTS[0] | {"group": "team"}, *TENANTS[1:]], "groups": groups, "usage": usage_url,
    }  # fmt: skip
    async with Upstream(engine) as upstream:
        async with start(upstream.url, **fields) as live:
            live.gateway.pools[0].dispatcher.clock = lambda: time.monotonic() + ahead_s[0]
            asked = asyncio.ensure_future(live.ask(CHAT, chat()))
            await until(lambda: len(upstream.requests) == 1)
            ahead_s[0] = 20.0
            engine.may.set()
            got = await asked
            assert got.status == 200
            assert "x-ratelimit-limit-requests" not in got.headers
            got = await live.ask(CHAT, chat())
            assert got.status == 429
            assert got.error["message"].startswith(
                "group team is at its limit of 10 seconds at engines a day; come back"
            )
            assert (await live.ask(CHAT, chat(), key="b")).status == 200
        totals = UsageTotals()
        totals.engine_ms = 9500
        sums = {(int(time.time()) // 3600, "alice", "", "", "", ""): totals}
        with closing(database_at(usage_url)) as database:
            total = read(database, UsageQuery("1h", None, (), datetime.now(UTC)), {}, "alice").total
            assert 0 < total.sums["engine_ms"] < 900_000, "the time itself, not that of the clock above"
            add_batch(database, UsageBatch("before", 1, sums), int(time.time()))
        async with start(upstream.url, **fields) as live:
            assert remaining(live, "alice") == [0]


async def test_keys_and_models_have_limits_beside_those_of_their_tenant(start: Starter, usage_url: str) -> None:
    quota = {"per_model": {MODEL: {"requests_per_day": 5}}}
    keys = [{"hash": hash_key("limited"), "quota": {"requests_per_day": 2}}, {"hash": hash_key("free")}]
    tenants = [{"name": "alice", "keys": keys, "group": "team"}, {"name": "bob", "keys": [hash_key("of-bob")]}]
    fields: dict[str, Any] = {
        "tenants": tenants, "groups": [{"name": "team", "quota": quota}], "usage": usage_url,
        "aliases": {"other-name": MODEL},
    }  # fmt: skip

    async def asks(live: Live, key: str) -> str:
        got = await live.ask(CHAT, chat() | {"model": "other-name"}, key=key)
        assert got.status in (200, 429)
        return "" if got.status == 200 else str(got.error["message"]).partition(";")[0]

    async with Upstream(replies(OK)) as upstream:
        async with start(upstream.url, **fields) as live:
            at_limit = "key is at its limit of 2 requests a day"
            assert [await asks(live, "limited") for _ in range(3)] == ["", "", at_limit]
            assert [await asks(live, "free") for _ in range(3)] == ["", "", ""]
            at_limit = "group team, model simulated is at its limit of 5 requests a day"
            assert await asks(live, "free") == at_limit
            assert await asks(live, "of-bob") == ""
            found = (await live.get("/fairgate/me", key="limited")).json["limits"]
            assert {limit["name"]: limit["remaining"] for limit in found} == {
                "requests_per_day (key)": 0, "requests_per_day (group team, model simulated)": 0,
            }  # fmt: skip
            assert (await live.get("/fairgate/me", key="of-bob")).json["limits"] == []
        async with start(upstream.url, **fields) as live:
            assert await asks(live, "free") == at_limit, "a model's goes on after a restart"


async def test_what_is_common_limits_models_of_tenants_that_have_nothing_of_their_own(start: Starter) -> None:
    quota = {"requests_per_day": 9, "per_model": {MODEL: {"requests_per_day": 2}, "other": {"requests_per_day": 1}}}
    tenants = [*TENANTS, {"name": "carol", "keys": [hash_key("c")], "quota": {"requests_per_day": 3}}]

    async with Upstream(replies(OK)) as upstream, start(upstream.url, tenants=tenants, quota=quota) as live:

        async def statuses(key: str, asked: int) -> list[int]:
            return [(await live.ask(CHAT, chat(), key=key)).status for _ in range(asked)]

        assert await statuses("k", 2) == [200, 200]
        got = await live.ask(CHAT, chat())
        assert got.error["message"].startswith(f"model {MODEL} is at its limit of 2 requests a day")
        assert await statuses("b", 1) == [200], "each tenant has it for itself"
        assert await statuses("c", 4) == [200, 200, 200, 429]
        found = (await live.get("/fairgate/me", key="b")).json["limits"]
        assert {limit["name"]: limit["remaining"] for limit in found} == {
            "requests_per_day": 8, f"requests_per_day (model {MODEL})": 1,
        }  # fmt: skip


@pytest.mark.parametrize(
    ("days", "model", "common", "warned"),
    [
        pytest.param(30, "small", "large", ["keep 31 days", "'small', which a quota of a "], id="a tenant's"),
        pytest.param(31, "large", "large", [], id="none"),
        pytest.param(31, "large", "small", ["'small', which a quota of every tenant "], id="what is common"),
    ],
)
async def test_a_check_names_days_that_are_not_kept_and_models_that_are_not_served(
    tmp_path: Path, days: int, model: str, common: str, warned: list[str]
) -> None:
    quota = {"tokens_per_month": 9, "per_model": {model: {"concurrent": 1}}}
    config = config_file(
        tmp_path, "", pools=[{"name": "p", "models": ["large"], "backends": [{"url": "http://127.0.0.1:1"}]}],
        tenants=[{"name": "a", "quota": quota}], usage={"url": str(tmp_path / "u.db"), "keep_days": days},
        quota={"per_model": {common: {"concurrent": 1}}},
    )  # fmt: skip
    code, out, said = await run("check", config)
    known = ("keep 31 days", "'small', which a quota of a ", "'small', which a quota of every tenant ")
    assert (code, [each for each in known if each in out + said]) == (0, warned)


# --- users of a tenant: blocked, limited, and found by their names ---


USERS: list[dict[str, Any]] = [
    {"name": "eve@x.org", "blocked": True},
    {"name": "ann", "quota": {"requests_per_day": 2}},
    {"name": "*", "quota": {"requests_per_day": 1}},
    {"name": "free"},
]
WITH_USERS: list[dict[str, Any]] = [
    {"name": "a", "keys": [{"hash": hash_key(f"a{n}"), "label": f"key {n}"} for n in range(2)], "users": USERS},
    {"name": "b", "keys": [hash_key("b")]},
]


async def codes(live: Live, user: str, times: int, key: str = "a0") -> list[str]:
    found = [await live.ask(CHAT, chat(user=user), key=key) for _ in range(times)]
    return ["" if one.status == 200 else f"{one.status} {one.error['code']}" for one in found]


async def test_users_are_blocked_and_limited_by_name_each_alike_or_not_at_all(start: Starter) -> None:
    async with Upstream(replies(OK)) as upstream, start(upstream.url, tenants=WITH_USERS) as live:
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
    async with pair(start, tenants=WITH_USERS) as (_, _, one, two):
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
    fields: dict[str, Any] = {"tenants": WITH_USERS, "usage": str(path)}
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
