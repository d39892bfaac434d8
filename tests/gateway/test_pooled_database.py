"""PostgreSQL behind a pooler: its connections are anybody's between two transactions."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from gateway.storage.store_errors import StoreUnavailable
from tests.gateway.capture import Upstream, replies
from tests.gateway.live import Starter, chat, until
from tests.kit.batching import OK, TENANTS, client, counts, is_over, jsonl, line, made, when
from tests.kit.keys import answers
from tests.kit.keys import made as made_key
from tests.kit.usage import CHAT, counted, database_at, written
from tests.postgres_server import PostgresServer, pooled


async def test_usage_keys_and_batches_of_two_gateways_behind_a_pooler(start: Starter) -> None:
    async with PostgresServer() as server, pooled(server) as url, Upstream(replies(OK)) as upstream:
        fields: dict[str, Any] = {"tenants": TENANTS, "usage": url}
        async with start(upstream.url, **fields) as one, start(upstream.url, **fields) as two:
            key = await made_key(one)
            for live in (one, two):
                await answers(live, key, 200)
                for _ in range(50):
                    assert (await live.ask(CHAT, chat())).status == 200
            async with client(one.url) as api:
                done = await when(api, (await made(api, jsonl(*map(line, range(20))))).id, is_over)
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
