"""A fault of the gateway, or in what it reads beside the requests: it is said, and all else goes on."""

from __future__ import annotations

import asyncio
import logging
import sqlite3
import time
from pathlib import Path
from typing import Any

import pytest

from gateway.config.sections.keys import hash_key
from policies.request import Request
from tests.certificates import Authority
from tests.gateway.capture import OK, Upstream, replies
from tests.gateway.live import CHAT, WAIT_S, Live, Starter, chat, simulated, until
from tests.kit.keys import TENANTS, TOKEN, admin, answers, listed, made, revoked
from tests.kit.names import Names
from tests.kit.usage import FAILURES
from tests.redis_server import RedisServer


@pytest.fixture(autouse=True)
def _often(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in (
        "keys.issued.POLL_S",
        "http.tls.certificates.LOOK_S",
        "pool.learned.INTERVAL_S",
        "telemetry.background.RETRY_S",
        "proxy.batches.batch_lane.TURN_S",
        "proxy.batches.batch_lane.FORGET_S",
        "storage.store.RETRY_S",
        "usage.recorder.FLUSH_S",
        "storage.redis.redis_store.RENEW_S",
        "pool.pool.PROBE_INTERVAL_S",
    ):
        monkeypatch.setattr(f"gateway.{name}", 0.01)
    monkeypatch.setattr("backends.step_feed.RETRY_S_MAX", 0.01)


BAD_ROWS = (
    "(x'00ff', 'x')",
    "(NULL, 'x')",
    "(CAST(x'ff61' AS TEXT), 'x')",
    f"(CAST('{hash_key('bytes')}' AS BLOB), '{{\"tenant\":\"bob\"}}')",
    f"('{hash_key('no text')}', x'00ff')",
    f"('{hash_key('no UTF-8')}', CAST(x'7b22ff' AS TEXT))",
    "('sha256:' || CAST(x'ff' AS TEXT), 'x'), ('sha256:' || CAST(x'fe' AS TEXT), 'x'), ('sha256:b', 'x')",
)


async def test_bad_rows_in_the_table_of_keys_are_passed_over(
    start: Starter, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("gateway.keys.in_database.PAGE", 1)
    path = start.directory / "usage.db"
    fields: dict[str, Any] = {"tenants": TENANTS, "usage": str(path), "admin_token": TOKEN}
    async with Upstream(replies(OK)) as upstream, start(upstream.url, **fields) as live:
        before = await made(live)
        await answers(live, before, 200)
        with sqlite3.connect(path) as other:
            other.execute(f"INSERT INTO fairgate_keys VALUES {', '.join(BAD_ROWS)}")
        after = await made(live)
        await answers(live, after, 200)
        for key in ("bytes", "no text", "no UTF-8"):
            assert (await live.ask(CHAT, chat(), key=key)).status == 401
        await revoked(live, hash_key(before))
        await answers(live, before, 401)
        assert hash_key(after) in {each["hash"] for each in await listed(live)}
        assert "faults" not in (await admin(live, "GET", "/ready")).json
        assert "8 entries of the table of keys (database) are ignored" in caplog.text, "a row without a hash is none"


async def test_a_bad_row_of_usage_keeps_no_other_from_being_counted(start: Starter) -> None:
    path = start.directory / "usage.db"
    tenants = [*TENANTS, {"name": "limited", "quota": {"tokens_per_day": 1000}}]
    fields: dict[str, Any] = {"tenants": tenants, "usage": str(path)}
    async with Upstream(replies(OK)) as upstream:
        async with start(upstream.url, **fields):
            pass
        with sqlite3.connect(path) as other:
            for tenant, tokens in (("x'ff'", "9e999"), ("CAST(x'ff' AS TEXT)", "7")):
                row = f"CAST(strftime('%s') AS INTEGER) / 3600 * 3600, {tenant}"
                other.execute(
                    f"INSERT INTO fairgate_usage VALUES ({row}, '', '', '', '', 1, 0, {tokens}, 0, 0, 0, 0, 0)"
                )
        async with start(upstream.url, **fields, admin_token=TOKEN) as live:
            key = await made(live)
            await answers(live, key, 200)
            usage = live.gateway.usage
            assert usage is not None
            await usage.flush()
            assert (usage.fault, len(usage.counts)) == (None, 0)


BREAKS = {
    "batches": "gateway.proxy.batches.batch_tables.claim", "files": "gateway.proxy.batches.batch_tables.forget",
    "addresses": "gateway.pool.engine_addresses.Addresses._look_up",
    "certificates": "gateway.http.tls.certificates.Certificates._file_versions",
    "engines": "gateway.pool.pools.Pools.prepare",
    "exchange": "gateway.pool.replication.ticker.SyncRounds._exchange",
    "fleet": "gateway.storage.redis.redis_store.RedisStore.subscribe", "health": "gateway.pool.backend.Backend.check",
    "keys": "gateway.keys.in_redis.RedisKeys.change_mark",
    "lessons": "gateway.pool.learned.LearnedSync._adopt", "metrics": "backends.scraper.Scraper._scrape",
    "news received": "gateway.storage.redis.redis_store.RedisStore.subscribe",
    "news sent": "gateway.storage.redis.redis_store.RedisStore.publish",
    "responses received": "gateway.storage.redis.redis_store.RedisStore.subscribe",
    "responses sent": "gateway.storage.redis.redis_store.RedisStore.publish",
    "state_file": "gateway.pool.learned.LearnedFile.save", "steps": "backends.step_feed.StepFeed._listen",
    "store": "gateway.storage.redis.redis_store.RedisStore._join_all",
    "usage": "gateway.usage.recorder.UsageRecorder.flush",
}  # fmt: skip
"""By kind of task, what is made to fail."""


SURPRISE = ": TypeError: see the log"


@pytest.mark.interpreted_only("breaks what runs in the background")
async def test_every_task_goes_on_after_a_surprise(
    start: Starter, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    authority, names = Authority(tmp_path), Names("127.0.0.1")
    certificate, key = authority.sign("listener")
    async with simulated() as sim, RedisServer() as redis:
        backend = {"url": f"http://engines.test:{sim.port}", "each_address": True, "engine": "vllm"}
        fields: dict[str, Any] = {
            "pools": [{"name": "pool", "backends": [backend]}],
            "limits": {"upstream_addresses_s": 0.1},
            "tls": {"cert_file": certificate, "key_file": key},
            "usage": str(tmp_path / "usage.db"),
            "state_file": str(tmp_path / "learned"),
            "state": redis.url,
        }

        sim.server.steps.missing = "none"  # it is asked again and again

        async def until_fault(live: Live, kind: str, *, is_there: bool) -> None:
            """Not all tasks have something to do all the time."""
            async with asyncio.timeout(6 * WAIT_S):
                while _is_at_fault(live, kind) != is_there:
                    if kind == "engines":
                        names.answer = ("127.0.0.1", "127.0.0.2")
                    elif kind == "news sent":
                        assert (await live.ask(CHAT, chat(str(live.gateway.recent.count) * 500))).status == 200
                    elif kind == "responses sent":
                        live.gateway.responses.note(("alice", "resp_1", "m", "m", sim.url), time.monotonic())
                    elif kind in ("fleet", "news received", "responses received"):
                        await redis.command("CLIENT", "KILL", "TYPE", "pubsub")
                    await asyncio.sleep(0.01)

        async with start(resolver=names, trusting=authority.client(), **fields) as live:
            assert BREAKS.keys() == {name[1] for name in await live.metrics() if name[0] == FAILURES}
            for kind, place in BREAKS.items():
                with pytest.MonkeyPatch.context() as patch:
                    patch.setattr(place, _not_foreseen)
                    await until_fault(live, kind, is_there=True)
                    ready = await live.get("/ready", admin=True)
                    assert any(one.startswith(kind) and one.endswith(SURPRISE) for one in ready.json["faults"])
                    assert (await live.metrics())[FAILURES, kind] >= 1
                await until_fault(live, kind, is_there=False)


def _not_foreseen(*_: Any, **__: Any) -> Any:
    raise TypeError("nobody thought of it")


def _is_at_fault(live: Live, kind: str) -> bool:
    return any(one.startswith(kind) and one.endswith(SURPRISE) for one in live.gateway.faults())


@pytest.mark.interpreted_only("breaks methods of compiled classes")
@pytest.mark.parametrize("broken", ["admitted", "dispatched", "finished"])
async def test_a_decision_that_fails_concerns_its_own_request_only(
    start: Starter, broken: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async with Upstream(replies(OK)) as upstream, start(upstream.url) as live:
        requests, once = live.engine.requests, [True]
        whole = getattr(requests, broken)

        def fails(request: Request, *args: object) -> object:
            found = whole(request, *args)
            if once and once.pop():
                raise ZeroDivisionError("a fault")
            return found

        monkeypatch.setattr(requests, broken, fails)
        with caplog.at_level(logging.ERROR, "fairgate"):
            first = await live.ask(CHAT, chat(max_tokens=5))
            others = await asyncio.gather(*[live.ask(CHAT, chat(max_tokens=5)) for _ in range(20)])
        assert (first.status, first.status != 200 and first.error["code"]) in ((500, "internal_error"), (200, False))
        assert (first.status == 200) is (broken == "finished"), "its client has the whole answer"
        assert [one.status for one in others] == [200] * 20
        await until(lambda: not live.engine.dispatched)
        assert "an admission decision failed" in caplog.text
        assert (await live.metrics())["fairgate_faults_total", "pool"] == 1
        assert live.engine.queued == 0
