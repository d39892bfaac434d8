"""What files and batches hold, in memory and in the database, stays within its bounds, whoever stops in the middle."""

from __future__ import annotations

import asyncio
import gc
import sqlite3
import threading
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

import openai
import pytest

from gateway.config.memory_bounds import MEMORY_MAX_LEAST, bounds_of
from gateway.config.sections.keys import hash_key
from gateway.config.sections.usage import UsageConfig
from gateway.keys.identity import Keyring, Principal, expired
from gateway.proxy.batches import batch_tables as tables
from gateway.proxy.batches.batch_lane import BatchDriver, BatchLane
from gateway.proxy.batches.batch_objects import Result, read_caller, write_caller
from gateway.proxy.batches.stored_request import BytesRoom, StoredRequest
from gateway.usage.database import Database
from gateway.usage.thread import DatabaseThread
from tests.gateway.capture import Peer, Seen, Upstream, answer, replies
from tests.gateway.live import Live, Starter, until
from tests.kit.batching import (
    CHAT,
    OK,
    TENANTS,
    change,
    client,
    counts,
    holding,
    is_over,
    jsonl,
    line,
    lines_of,
    made,
    when,
)
from tests.kit.usage import database_at
from tests.waiting import eventually

Object = TypeVar("Object")
NOWHERE = "http://127.0.0.1:9"


def found(url: str, statement: str) -> list[tuple[Any, ...]]:
    database = database_at(url)
    with database.transaction(writes=False) as step:
        rows = step.ask(statement)
    database.close()
    return rows


def alive(kind: type[Object]) -> list[Object]:
    """All objects of this kind that are in memory."""
    return [each for each in gc.get_objects() if isinstance(each, kind)]


async def stored(url: str) -> tuple[int, int, int]:
    """Files, their bytes as they count, and the bytes of all lines."""
    [(files, counted)] = await asyncio.to_thread(
        found, url, "SELECT COUNT(*), COALESCE(SUM(bytes), 0) FROM fairgate_files"
    )
    [(size,)] = await asyncio.to_thread(found, url, "SELECT COALESCE(SUM(length(line)), 0) FROM fairgate_lines")
    return files, int(counted), int(size)


async def test_cancelled_batches_keep_no_more_than_their_tenant_may(start: Starter, usage_url: str) -> None:
    bounds = {"files_max": 10, "stored_bytes_max": 20_000}
    async with (
        Upstream(holding(asyncio.Event(), set(range(20)))) as upstream,
        start(upstream.url, tenants=TENANTS, usage=usage_url, batches=bounds) as live,
        client(live.url) as api,
    ):
        file = await api.files.create(file=("ask.jsonl", jsonl(*map(line, range(20)))), purpose="batch")
        ended = []
        for _ in range(12):
            batch = await api.batches.create(input_file_id=file.id, endpoint=CHAT, completion_window="24h")
            await when(api, batch.id, lambda one: one.status in ("in_progress", "failed"))
            await api.batches.cancel(batch.id)
            ended.append(await when(api, batch.id, is_over))
            files, counted, size = await stored(usage_url)
            assert files <= bounds["files_max"]
            assert size <= counted <= bounds["stored_bytes_max"]
        statuses = [batch.status for batch in ended]
        assert (statuses[0], statuses[-1]) == ("cancelled", "failed")
        [fault] = ended[-1].errors.data
        assert (fault.code, "delete some" in fault.message) == ("no_room", True)
        await api.files.delete(ended[0].error_file_id)
        batch = await api.batches.create(input_file_id=file.id, endpoint=CHAT, completion_window="24h")
        await when(api, batch.id, lambda one: one.status == "in_progress")


async def test_several_batches_at_once_share_what_their_tenant_may_keep(start: Starter, usage_url: str) -> None:
    content = jsonl(*map(line, range(20)))
    bounds = {"stored_bytes_max": len(content) + 40_000}
    async with (
        Upstream(replies(answer(b'{"said":"%s"}' % (b"y" * 1000)))) as upstream,
        start(upstream.url, tenants=TENANTS, usage=usage_url, batches=bounds) as live,
        client(live.url) as api,
    ):
        file = await api.files.create(file=("ask.jsonl", content), purpose="batch")
        batches = [
            await api.batches.create(input_file_id=file.id, endpoint=CHAT, completion_window="24h") for _ in range(4)
        ]
        done = [await when(api, batch.id, is_over) for batch in batches]
        _, counted, size = await stored(usage_url)
        assert size == counted <= bounds["stored_bytes_max"]
        assert 0 < sum(counts(batch)[1] for batch in done) < 80
        errors = [each for batch in done if batch.error_file_id for each in await lines_of(api, batch.error_file_id)]
        assert {each["error"]["code"] for each in errors} == {"no_room"}
        written = await live.metrics()
        items = [int(written["fairgate_batch_items_total", each]) for each in ("completed", "failed")]
        assert items == [sum(counts(batch)[1] for batch in done), len(errors)]


async def test_an_upload_that_is_cut_leaves_nothing(
    start: Starter, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    url, add, begun, go_on = str(tmp_path / "u.db"), tables.add_lines, threading.Event(), threading.Event()

    def slow(*given: Any, **named: Any) -> None:
        add(*given, **named)
        begun.set()
        go_on.wait()

    async with start(NOWHERE, tenants=TENANTS, usage=url, batches={"files_max": 1}) as live, client(live.url) as api:
        monkeypatch.setattr(tables, "add_lines", slow)
        upload = asyncio.ensure_future(api.files.create(file=("f", b"{}\n" * 10_000), purpose="batch"))
        await asyncio.to_thread(begun.wait)
        assert (await stored(url))[0] == 1
        upload.cancel()
        await live.lines(1)
        go_on.set()

        async def is_gone() -> bool:
            return await stored(url) == (0, 0, 0)

        await eventually(is_gone)
        assert (await api.files.create(file=("f", b"{}"), purpose="batch")).bytes == 2


async def test_a_line_that_is_too_long_is_said_at_its_upload(start: Starter, tmp_path: Path) -> None:
    most = bounds_of(MEMORY_MAX_LEAST, 1).line_bytes
    url = str(tmp_path / "u.db")
    async with start(NOWHERE, tenants=TENANTS, usage=url, memory_max=MEMORY_MAX_LEAST) as live, client(live.url) as api:
        with pytest.raises(openai.BadRequestError, match=f"line 2 has more than {most} bytes"):
            await api.files.create(file=("f", b"{}\n" + b"x" * (most + 1)), purpose="batch")

        async def is_gone() -> bool:
            return await stored(url) == (0, 0, 0)

        await eventually(is_gone)


@pytest.mark.slow
@pytest.mark.parametrize("part", [1000, 500_000])
async def test_answers_that_cannot_be_written_stay_within_memory_and_are_asked_again(
    start: Starter, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, part: int
) -> None:
    monkeypatch.setattr("gateway.usage.database.BUSY_S", 0.01)
    monkeypatch.setattr("gateway.proxy.batches.batch_lane.AGAIN_S", 0.01)
    number, locked, most = 16, asyncio.Event(), [0]
    url, bound = str(tmp_path / "u.db"), bounds_of(MEMORY_MAX_LEAST, 1).results_bytes

    async def script(seen: Seen, peer: Peer) -> None:
        await locked.wait()
        lines = sum(len(one.line) for one in alive(Result))
        most.append(lines + sum(len(piece) for each in alive(StoredRequest) for piece in each.pieces))
        await peer.send(answer(b'{"said":"%s"}' % (b"y" * part)))

    async with (
        Upstream(script) as upstream,
        start(upstream.url, tenants=TENANTS, usage=url, memory_max=MEMORY_MAX_LEAST) as live,
        client(live.url) as api,
    ):
        batch = await made(api, jsonl(*[line(n, max_tokens=1) for n in range(number)]))
        await until(lambda: upstream.requests)
        with closing(sqlite3.connect(url, isolation_level=None)) as other:
            other.execute("BEGIN EXCLUSIVE")
            locked.set()
            await until(lambda: len(upstream.requests) >= (number if part == 1000 else 6))
        again = api.with_options(max_retries=20)  # the file is busy while the gateway writes to it
        done = await when(again, batch.id, is_over)
        assert (done.status, counts(done)) == ("completed", (number, number, 0))
        await until(live.holds_nothing)
        assert max(most) <= bound
        assert {room.taken.total() for lane in alive(BatchLane) for room in (lane.lines, lane.answers)} == {0}
        asked_twice = len(upstream.requests) - number
        assert asked_twice <= 10 if part > 1000 else not asked_twice


async def test_an_answer_that_is_longer_than_any_may_be_is_an_error(start: Starter, tmp_path: Path) -> None:
    most = bounds_of(MEMORY_MAX_LEAST, 1).results_bytes
    async with (
        Upstream(replies(answer(b'{"said":"%s"}' % (b"y" * most)))) as upstream,
        start(upstream.url, tenants=TENANTS, usage=str(tmp_path / "u"), memory_max=MEMORY_MAX_LEAST) as live,
        client(live.url) as api,
    ):
        done = await when(api, (await made(api, jsonl(line(0)))).id, is_over)
        assert (counts(done), len(upstream.requests)) == ((1, 0, 1), 2)
        [error] = await lines_of(api, done.error_file_id)
        assert error["response"]["status_code"] == 502


async def test_each_tenant_may_take_as_much_room_as_it_leaves() -> None:
    room = BytesRoom(90)
    for _ in range(5):
        await room.take("a", 10)
    waiting = asyncio.ensure_future(room.take("a", 10))
    await asyncio.sleep(0.0)
    await asyncio.sleep(0.0)
    assert not waiting.done(), "50 of 90"
    for _ in range(2):
        await room.take("b", 10)
    room.change("a", -10)
    await asyncio.sleep(0.0)
    await asyncio.sleep(0.0)
    assert not waiting.done(), "30 are free, and a has 40"
    room.change("b", -20)
    await waiting


async def test_room_goes_first_to_who_waits_for_it() -> None:
    room, order = BytesRoom(40), []

    async def ask(tenant: str) -> None:
        for _ in range(3):
            await room.take(tenant, 20)
            order.append(tenant)
            room.change(tenant, -20)

    async with asyncio.TaskGroup() as group:
        for tenant in "abc":
            group.create_task(ask(tenant))
    assert set(order[:3]) == {"a", "b", "c"}


def test_those_who_want_something_of_the_database_take_turns(tmp_path: Path) -> None:
    begun, go_on, order = threading.Event(), threading.Event(), []

    def work(database: Database, name: str) -> None:
        begun.set()
        go_on.wait()
        order.append(name)

    async def ask() -> None:
        thread = DatabaseThread(UsageConfig.model_validate({"url": str(tmp_path / "u.db")}))
        asked = [asyncio.ensure_future(thread.do_for("many", work, f"many-{n}")) for n in range(10)]
        await asyncio.to_thread(begun.wait)
        asked += [asyncio.ensure_future(thread.do_for("few", work, f"few-{n}")) for n in range(2)]
        await asyncio.sleep(0)
        go_on.set()
        await asyncio.gather(*asked)
        await thread.close(10)

    asyncio.run(ask())
    assert order[:5] == ["many-0", "many-1", "few-0", "many-2", "few-1"]


async def test_a_head_request_reads_nothing(start: Starter, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async with start(NOWHERE, tenants=TENANTS, usage=str(tmp_path / "u.db")) as live, client(live.url) as api:
        file = await api.files.create(file=("f", b"x" * 600_000 + b"\n{}"), purpose="batch")
        assert (await api.files.content(file.id)).content == b"x" * 600_000 + b"\n{}"
        for name in ("ahead", "piece"):
            monkeypatch.setattr(tables, name, None)
        async with live.http.head(
            f"{live.url}/v1/files/{file.id}/content", headers={"authorization": "Bearer k"}
        ) as got:
            assert (got.status, got.headers["content-length"]) == (200, str(file.bytes))


async def test_files_are_forgotten_when_their_client_says(start: Starter, usage_url: str) -> None:
    async with (
        Upstream(replies(OK)) as upstream,
        start(upstream.url, tenants=TENANTS, usage=usage_url) as live,
        client(live.url) as api,
    ):
        soon: Any = {"anchor": "created_at", "seconds": 3600}
        file = await api.files.create(file=("f", jsonl(line(0))), purpose="batch", expires_after=soon)
        assert file.expires_at == file.created_at + 3600
        batch = await api.batches.create(
            input_file_id=file.id, endpoint=CHAT, completion_window="24h", output_expires_after=soon
        )
        done = await when(api, batch.id, is_over)
        output = await api.files.retrieve(done.output_file_id)
        assert output.expires_at == output.created_at + 3600
        for wrong in ({"anchor": "created_at", "seconds": 60}, {"anchor": "now", "seconds": 3600}):
            with pytest.raises(openai.BadRequestError, match="expires_after"):
                await api.files.create(file=("f", b"{}"), purpose="batch", expires_after=wrong)  # type: ignore[arg-type]
            with pytest.raises(openai.BadRequestError):
                await api.batches.create(
                    input_file_id=file.id,
                    endpoint=CHAT,
                    completion_window="24h",
                    output_expires_after=wrong,  # type: ignore[arg-type]
                )
        await asyncio.to_thread(change, usage_url, "UPDATE fairgate_files SET expires_s = expires_s - 3601")
        assert [one async for one in api.files.list()] == []
        with pytest.raises(openai.NotFoundError):
            await api.files.content(file.id)
    async with start(NOWHERE, tenants=TENANTS, usage=usage_url):

        async def is_gone() -> bool:
            return await stored(usage_url) == (0, 0, 0)

        await eventually(is_gone)


async def test_a_byte_order_mark_and_blank_lines_are_no_faults(start: Starter, tmp_path: Path) -> None:
    content = b"\xef\xbb\xbf" + jsonl(line(0)) + b"     \t\r\n" + jsonl(line(1)) + b"\n   "
    async with (
        Upstream(replies(OK)) as upstream,
        start(upstream.url, tenants=TENANTS, usage=str(tmp_path / "u.db")) as live,
        client(live.url) as api,
    ):
        batch = await made(api, content)
        done = await when(api, batch.id, is_over)
        assert (done.status, counts(done)) == ("completed", (2, 2, 0))
        assert [each["custom_id"] for each in await lines_of(api, done.output_file_id)] == ["item-0", "item-1"]
        assert (await api.files.content(done.input_file_id)).content == content


async def test_what_no_id_can_hold_is_the_clients_fault(start: Starter, usage_url: str) -> None:
    async with start(NOWHERE, tenants=TENANTS, usage=usage_url) as live:
        for query in ("files?after=%00", "files?purpose=%00", "batches?after=a%00b", f"batches?limit={'9' * 5000}"):
            got = await live.get(f"/v1/{query}")
            assert (got.status, got.error["code"]) == (400, "invalid_request"), query
        body = {"input_file_id": "file\0", "endpoint": CHAT, "completion_window": "24h"}
        got = await live.ask("/v1/batches", body)
        assert (got.status, got.error["param"]) == (404, "input_file_id")


async def items(live: Live) -> list[float]:
    metrics = await live.metrics()
    return [metrics["fairgate_batch_items_total", each] for each in ("completed", "failed")]


async def test_results_are_counted_though_nobody_knew_that_they_were_written(
    start: Starter, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    url, held = str(tmp_path / "u.db"), asyncio.Event()
    monkeypatch.setattr("gateway.proxy.batches.batch_lane.AGAIN_S", 0.01)
    async with (
        Upstream(holding(held, set(range(5)))) as upstream,
        start(upstream.url, tenants=TENANTS, usage=url) as live,
        client(live.url) as api,
    ):
        batch = await made(api, jsonl(*map(line, range(5))))
        await until(lambda: len(upstream.requests) == 5)
        times_out, write = iter([0.01]), tables.write

        def late(*given: Any) -> Any:
            """Done, and nobody waits for it any longer."""
            done = write(*given)
            if next(times_out, None):
                raise tables.StoreUnavailable("committed, and then the connection was lost")
            return done

        monkeypatch.setattr(tables, "write", late)
        held.set()
        done = await when(api, batch.id, is_over)
        assert counts(done) == (5, 5, 0)
        assert await items(live) == [5, 0]


async def test_a_batch_that_is_cancelled_while_results_are_written_counts_and_keeps_them(
    start: Starter, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    url, write, begun, go_on = str(tmp_path / "u.db"), tables.write, threading.Event(), threading.Event()
    gc.collect()

    def slow(*given: Any) -> Any:
        begun.set()
        go_on.wait()
        return write(*given)

    async with (
        Upstream(holding(asyncio.Event(), {1})) as upstream,
        start(upstream.url, tenants=TENANTS, usage=url, batches={"running_max": 2}) as live,
        client(live.url) as api,
    ):
        monkeypatch.setattr(tables, "write", slow)
        batch = await made(api, jsonl(*map(line, range(2))))
        await asyncio.to_thread(begun.wait)
        [driver] = alive(BatchDriver)
        driver.cut()
        await asyncio.sleep(0)
        go_on.set()
        done = await when(api, batch.id, is_over)
        assert (done.status, counts(done)) == ("cancelled", (2, 1, 1))
        assert await items(live) == [1, 1]


async def test_lines_of_a_key_that_expired_meanwhile_fail(start: Starter, tmp_path: Path) -> None:
    held = asyncio.Event()
    async with (
        Upstream(holding(held, {0})) as upstream,
        start(upstream.url, tenants=TENANTS, usage=str(tmp_path / "u.db"), batches={"running_max": 1}) as live,
        client(live.url, "new") as api,
        client(live.url) as other,
    ):
        keys = live.gateway.keys
        assert keys is not None
        key = live.gateway.config.tenants[0].keys[0].model_copy(update={"hash": hash_key("new")})
        await keys.issue(key, "alice")

        async def answers(status: int) -> None:
            async def now() -> bool:
                return (await live.get("/v1/models", key="new")).status == status

            await eventually(now)

        await answers(200)
        batch = await made(api, jsonl(line(0), line(1)))
        await until(lambda: upstream.requests)
        await keys.issue(key.model_copy(update={"expires": "2020-01-31"}), "alice")
        await answers(401)
        held.set()
        done = await when(other, batch.id, is_over)
        assert (done.status, counts(done)) == ("completed", (2, 1, 1))
        [error] = await lines_of(other, done.error_file_id)
        assert (error["custom_id"], error["response"]["status_code"]) == ("item-1", 401)
        assert error["response"]["body"]["error"]["code"] == "expired_api_key"


class OneIssuer:
    """Stands for the issuers of a config."""

    def knows(self, issuer: str) -> bool:
        return issuer == "https://login"

    def principal(self, *_: object) -> Principal:
        raise NotImplementedError


def test_a_batch_outlives_the_token_that_made_it_but_not_its_tenant_its_issuer_or_its_revocation() -> None:
    tenants = Starter(Path()).config("http://x", tenants=TENANTS).tenants
    keyring = Keyring(tenants, open_access=False)
    keyring.tokens = OneIssuer()

    def goes_on(**fields: Any) -> bool:
        made_by = Principal("alice", 1.0, ("chat",), expires_s=1.0, digest=b"t", issuer="https://login")
        of, _ = read_caller(write_caller(made_by, []))
        principal = keyring.present(replace(of, **fields))
        return expired(principal, 1e9) is None and keyring.takes(principal)

    assert goes_on()
    assert not goes_on(tenant="nobody")
    assert not goes_on(issuer="https://other")
    keyring.learn({}, {b"t"})
    assert not goes_on()
