"""What is counted durably: equal to the access log, once, within bounds, and caught up when the database comes back."""

from __future__ import annotations

import asyncio
import json
import os
import resource
import signal
import sqlite3
import time
from collections import Counter
from collections.abc import Iterable
from contextlib import closing
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

from gateway.config.sections.keys import hash_key
from gateway.storage.store_errors import StoreRefused, StoreUnavailable
from gateway.telemetry.access_log import hidden
from gateway.telemetry.record import Outcome, RequestRecord
from gateway.usage.counts import OTHER_USERS, OTHERS, UsageCounts, UsageTotals
from gateway.usage.written import UsageBatch, add_batch, forget
from policies.request import Flow, Request, ServiceTokens
from tests.gateway.capture import Upstream, replies
from tests.gateway.live import CHAT, MODEL, Live, Starter, chat, simulated, until
from tests.kit import keys
from tests.kit.batching import client, counts, jsonl
from tests.kit.batching import line as asked_line
from tests.kit.served import config_file, served
from tests.kit.usage import OK, TENANTS, counted, database_at, requests_in, written
from tests.postgres_server import PostgresServer, pooled
from tests.records import record_of


def logged(lines: Iterable[dict[str, Any]]) -> dict[tuple[str, ...], tuple[float, ...]]:
    """The same, by everything, as the access log has it."""
    sums: dict[tuple[str, ...], Counter[str]] = {}
    for line in lines:
        is_refused = line["outcome"] == "refused"
        model = "" if is_refused and not line["policy"] else line["model"]
        day = f"{datetime.fromtimestamp(line['ts'], UTC):%Y-%m-%d}"
        own = sums.setdefault((day, line["tenant"], line["app"], line["user"], model), Counter())
        own["requests"] += 1
        own["refused"] += is_refused
        for name in ("in", "cached", "out", "wasted"):
            own[name] += line[f"tokens_{name}"]
        own["queue_us"] += round(line["queue_ms"] * 1000)
    names = ("requests", "refused", "in", "cached", "out", "wasted")
    return {key: (*(own[name] for name in names), own["queue_us"] / 1e6) for key, own in sums.items()}


def lines_of(text: bytes | str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in text.splitlines()]


async def mixed(live: Live, times: int) -> int:
    """Requests of every kind; how many there were."""
    for number in range(times):
        answers = [
            await live.ask(CHAT, chat(user=f"u{number % 3}")),
            await live.ask(CHAT, chat(), x_fairgate_app="batch"),
            await live.ask(CHAT, chat(stream=True), key="b", x_fairgate_user="a"),
            await live.ask(CHAT, chat(model=f"invented-{number}"), key="b"),
            await live.ask(CHAT, b"{"),
            await live.ask(CHAT, chat(), x_fairgate_app="nobody's"),
            await live.ask("/tokenize", chat()),
            await live.get("/v1/models"),
            await live.ask(CHAT, chat(), key=f"unknown-{number}"),
        ]
    return len(answers) * times


# --- equal to the access log ---


async def test_sums_equal_the_access_log(start: Starter, usage_url: str) -> None:
    async with simulated(time_scale=0) as sim, start(sim.url, tenants=TENANTS, usage=usage_url) as live:
        asked = await mixed(live, 5)
        lines = await live.lines(asked)
        assert {line["model"] for line in lines} >= {"", MODEL, "invented-0"}
    found = counted(usage_url)
    assert found == logged(lines)
    assert sum(sums[0] for sums in found.values()) == asked
    assert sum(sums[2] for sums in found.values()) > 0
    assert not any("invented" in name for key in found for name in key)
    assert hidden("u1") in {user for _, _, _, user, _ in found}


async def test_tokens_of_a_cut_interaction_are_wasted(start: Starter, tmp_path: Path) -> None:
    url = str(tmp_path / "usage.db")
    tenants = [{"name": "alice", "keys": [hash_key("k")], "quota": {"tokens_per_day": 40, "tokens_per_minute": 40}}]
    async with Upstream(replies(OK)) as upstream, start(upstream.url, tenants=tenants, usage=url) as live:
        statuses = [(await live.ask(CHAT, chat(), x_fairgate_interaction="i")).status for _ in range(6)]
        lines = await live.lines(6)
        metrics = await live.metrics()
    assert statuses.count(429) >= 1
    assert sum(line["tokens_wasted"] for line in lines) == 9 * statuses.count(200)
    assert metrics["fairgate_wasted_tokens_total", "alice"] == 9 * statuses.count(200)
    assert counted(url) == logged(lines)


async def test_nothing_is_counted_twice_though_the_process_is_killed(tmp_path: Path) -> None:
    url, total_sent = str(tmp_path / "usage.db"), 0
    async with Upstream(replies(OK)) as upstream:
        config = config_file(tmp_path, upstream.url, tenants=TENANTS, usage=url)
        for is_quiet in (False, True):
            before, sent = requests_in(url), 0
            async with served(config) as gate:
                while sent < 50 or requests_in(url) < before + 25:  # what has ended is counted while others come
                    assert await gate.status("kb"[sent % 2], user=str(sent % 5)) == 200
                    sent += 1
                if is_quiet:  # then nothing is lost, and nothing of the life before is counted again
                    await until(lambda: requests_in(url) == before + sent)  # noqa: B023 (called here only)
                await gate.ends(signal.SIGKILL)
                total_sent += sent
    assert requests_in(url) <= total_sent


# --- once ---


def test_a_batch_counts_once_however_often_it_is_sent(usage_url: str) -> None:
    hour = int(time.time()) // 3600
    tally = UsageTotals()
    tally.requests, tally.input_tokens = 2, 10
    sums = {(hour, "t\0\ud800", "", user, "", "nightly\0"): tally for user in ("a", "b", OTHER_USERS)}
    first, second = database_at(usage_url), database_at(usage_url)
    with closing(first), closing(second):
        for database, batch in (
            (first, UsageBatch("one", 1, sums)),
            (first, UsageBatch("one", 1, sums)),
            (second, UsageBatch("one", 1, sums)),
            (second, UsageBatch("two", 1, sums)),
            (first, UsageBatch("one", 2, sums)),
            (second, UsageBatch("one", 1, sums)),
        ):
            add_batch(database, batch, int(time.time()))
        assert {key: value[0] for key, value in counted(usage_url, "tenant", "user").items()} == {
            ("t\N{REPLACEMENT CHARACTER}?", user): 6 for user in (hidden("a"), hidden("b"), OTHERS)
        }
        assert counted(usage_url, "key")["nightly\N{REPLACEMENT CHARACTER}",][0] == 18
        forget(first, int(time.time()) + 3 * 86_400, keep_days=2)
        assert counted(usage_url, "tenant") == counted(usage_url, "key") == {}


# --- a database that is gone ---


async def test_a_server_that_is_gone_is_caught_up(start: Starter, caplog: pytest.LogCaptureFixture) -> None:
    asked, outages = 0, 0

    async def is_gone(live: Live) -> int:
        """Requests while it is; how many."""
        await until(lambda: caplog.text.count("usage is not written, and kept in memory until it can be") == outages)
        during = await mixed(live, 2)
        assert (await live.metrics())["fairgate_usage_written",] == 0
        assert (await live.metrics())["fairgate_usage_waiting_sums",] > 0
        await server.start()
        await written(live)
        return during

    async with PostgresServer() as server, simulated(time_scale=0) as sim:
        await server.crash()  # before the gateway starts
        async with start(sim.url, tenants=TENANTS, usage=server.url) as live:
            outages = 1
            asked += await is_gone(live) + await mixed(live, 2)
            await written(live)
            await server.crash()
            asked += await mixed(live, 2)
            outages = 2
            asked += await is_gone(live) + await mixed(live, 1)
            lines = await live.lines(asked)
        assert await asyncio.to_thread(counted, server.url) == logged(lines)
        assert caplog.text.count("usage is not written") == 2


async def test_a_server_that_does_not_answer_is_waited_for_by_nobody(
    start: Starter, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("gateway.usage.thread.ANSWER_S", 0.2)
    async with PostgresServer() as server, Upstream(replies(OK)) as upstream:
        async with start(upstream.url, tenants=TENANTS, usage=server.url) as live:
            await written(live)
            [(pid,)] = await server.ask(
                "SELECT pid FROM pg_stat_activity WHERE application_name = 'fairgate' ORDER BY backend_start LIMIT 1"
            )
            os.kill(pid, signal.SIGSTOP)
            try:
                for _ in range(5):
                    assert (await live.ask(CHAT, chat())).status == 200
                await until(lambda: "does not answer within 0.2 s" in caplog.text)
            finally:
                os.kill(pid, signal.SIGCONT)
            await written(live)
            lines = await live.lines(5)
        assert await asyncio.to_thread(counted, server.url) == logged(lines)


async def test_a_disk_that_is_full_stops_nobody_and_is_caught_up(tmp_path: Path) -> None:
    url, sent = str(tmp_path / "usage.db"), 0
    async with Upstream(replies(OK)) as upstream:
        async with served(config_file(tmp_path, upstream.url, tenants=TENANTS, usage=url)) as gate:
            for file_bytes in (resource.RLIM_INFINITY, 1, resource.RLIM_INFINITY):
                _, most = resource.prlimit(gate.command.process.pid, resource.RLIMIT_FSIZE)
                resource.prlimit(gate.command.process.pid, resource.RLIMIT_FSIZE, (file_bytes, most))
                for _ in range(10):
                    assert await gate.status("k", user=str(sent)) == 200
                    sent += 1
                if file_bytes == 1:
                    await gate.command.says(f"usage is not written, and kept in memory until it can be: {url}: ")
                else:
                    await until(lambda: requests_in(url) == sent)  # noqa: B023 (called here only)
            await gate.command.says("usage is written again")
            assert await gate.ends(signal.SIGTERM) == 0
    assert counted(url) == logged(lines_of(gate.command.out))


async def test_what_cannot_be_written_at_the_end_is_said(
    start: Starter, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("gateway.usage.database.BUSY_S", 0.01)
    url = str(start.directory / "usage.db")
    async with Upstream(replies(OK)) as upstream:
        async with start(upstream.url, tenants=TENANTS, usage=url) as live:
            await written(live)
            holder = sqlite3.connect(url, isolation_level=None)
            holder.execute("BEGIN IMMEDIATE")
            for _ in range(3):
                assert (await live.ask(CHAT, chat())).status == 200
    holder.close()
    assert "the usage of 3 requests was not written" in caplog.text


async def test_a_file_that_is_no_database_or_of_another_version_is_not_touched(start: Starter) -> None:
    path, content = start.directory / "usage.db", b"no database, but a text that is longer than its head" * 20
    path.write_bytes(content)
    older = start.directory / "older.db"
    with closing(database_at(str(older))) as database, database.transaction() as step:
        step.do("UPDATE fairgate_notes SET value = '1' WHERE name = 'layout'")
    for file, why in (
        (path, "is not a database; move it away"),
        (older, "tables of layout 1, and this version writes layout 2"),
    ):
        with pytest.raises(StoreRefused, match=why):
            async with start("http://127.0.0.1:1", tenants=TENANTS, usage=str(file)):
                pass
    assert path.read_bytes() == content


# --- what is counted has bounds, in users and in sums; the rest is one ---


def request_of(user: str = "", tenant: str = "t") -> RequestRecord:
    record = record_of("r")
    record.tenant, record.app, record.model, record.pool = tenant, "app", "m", "pool"
    record.request = Request("r", Flow(tenant, "app", user), 1.0, 1, 1, 0.0)
    record.ended(Outcome.COMPLETED, "", ServiceTokens(3, 2, 1), 0.25)
    return record


def test_users_are_bounded_and_the_rest_are_one() -> None:
    counts = UsageCounts(users_max=2)
    for user in ("a", "b", "", "c", "d", "other", "a", OTHERS):
        counts.ended(request_of(user))
    sums = {key[3]: tally.requests for key, tally in counts.take().items()}
    assert sums == {"a": 2, "b": 1, "": 1, OTHER_USERS: 4}
    counts.ended(request_of("d"))
    assert [key[3] for key in counts.take()] == [OTHER_USERS], "also after they were taken"


def test_what_finds_no_room_is_counted() -> None:
    counts = UsageCounts(users_max=100, sums_max=2)
    for user in "abcde":
        counts.ended(request_of(user))
    assert [key[3] for key in counts.take()] == ["a", "b", OTHER_USERS]
    assert counts.requests_dropped == 0
    for tenant in "abcdef":
        counts.ended(request_of("u", tenant))
    assert counts.requests_dropped == 2
    assert len(counts) == 4


def test_names_of_an_hour_are_bounded() -> None:
    counts = UsageCounts(users_max=1, names_max=20)
    for tenant in range(15):
        counts.ended(request_of("u", str(tenant)))
    sums = counts.take()
    assert len(sums) == 11
    assert sum(tally.requests for key, tally in sums.items() if key[1] == OTHERS) == 5
    counts.ended(request_of("another", "0"))
    assert [key[3] for key in counts.take()] == [OTHER_USERS], "also among the users of a tenant that is told apart"


# --- PostgreSQL behind a pooler: its connections are anybody's between two transactions ---


async def test_usage_keys_and_batches_of_two_gateways_behind_a_pooler(start: Starter) -> None:
    async with PostgresServer() as server, pooled(server) as url, Upstream(replies(OK)) as upstream:
        fields: dict[str, Any] = {"tenants": TENANTS, "usage": url}
        async with start(upstream.url, **fields) as one, start(upstream.url, **fields) as two:
            key = await keys.made(one)
            for live in (one, two):
                await keys.answers(live, key, 200)
                for _ in range(50):
                    assert (await live.ask(CHAT, chat())).status == 200
            async with client(one.url) as api:
                done = await api.finished(jsonl(*map(asked_line, range(20))))
                assert (done.status, counts(done)) == ("completed", (20, 20, 0))
            for live in (one, two):
                await written(live)
                await until(lambda: not live.gateway.faults())  # noqa: B023 (called here only)
        assert (await asyncio.to_thread(counted, server.url, "tenant"))["alice",][2] == 7 * 120, "prompt tokens"


async def test_a_statement_is_bounded_behind_a_pooler(monkeypatch: pytest.MonkeyPatch) -> None:
    def sleeps(url: str) -> None:
        database = database_at(url)
        with pytest.raises(StoreUnavailable, match="statement timeout"), database.transaction() as step:
            step.ask("SELECT set_config('statement_timeout', '10', true)")
            step.ask("SELECT pg_sleep(60)")
        with database.transaction() as step:
            assert step.ask("SHOW statement_timeout") == step.ask("SHOW lock_timeout") == [("5s",)]
        database.close()

    async with PostgresServer() as server, pooled(server) as url:
        await asyncio.to_thread(sleeps, url)
        await asyncio.to_thread(sleeps, server.url)
