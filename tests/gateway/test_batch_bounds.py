"""What files and batches hold, in memory and in the database, stays within its bounds, whoever stops in the middle."""

from __future__ import annotations

import asyncio
import gc
import sqlite3
import threading
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

import openai
import pytest

from gateway.config.memory_bounds import MEMORY_MAX_LEAST, MemoryBounds
from gateway.config.sections.services import UsageConfig
from gateway.keys.identity import Keyring, Principal, expired
from gateway.proxy.batches import batch_tables as tables
from gateway.proxy.batches.batch_lane import BatchDriver, BatchLane
from gateway.proxy.batches.batch_objects import LineResult, read_caller, write_caller
from gateway.proxy.batches.stored_request import BytesRoom, StoredRequest
from gateway.usage.database import Database
from gateway.usage.thread import DatabaseThread
from tests.gateway.capture import Peer, Seen, answer, replies
from tests.gateway.live import Starter, until
from tests.kit.batching import TENANTS, batching, change, counts, holding, items_of, jsonl, line
from tests.kit.usage import database_at
from tests.waiting import eventually

Object = TypeVar("Object")


def alive(kind: type[Object]) -> list[Object]:
    """All objects of this kind that are in memory."""
    return [each for each in gc.get_objects() if isinstance(each, kind)]


@contextmanager
def only_young_objects() -> Iterator[None]:
    """Let `alive` look at those only that are made from now on: a million others are there already."""
    gc.collect()
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()


async def stored(url: str) -> tuple[int, int, int]:
    """Files, their bytes as they count, and the bytes of all lines."""

    def read() -> tuple[int, int, int]:
        with closing(database_at(url)) as database, database.transaction(writes=False) as step:
            [(files, counted)] = step.ask("SELECT COUNT(*), COALESCE(SUM(bytes), 0) FROM fairgate_files")
            [(size,)] = step.ask("SELECT COALESCE(SUM(length(line)), 0) FROM fairgate_lines")
        return files, int(counted), int(size)

    return await asyncio.to_thread(read)


async def is_gone(url: str) -> bool:
    return await stored(url) == (0, 0, 0)


async def test_cancelled_batches_keep_no_more_than_their_tenant_may(start: Starter, usage_url: str) -> None:
    bounds = {"files_max": 6, "stored_bytes_max": 20_000}
    script = holding(asyncio.Event(), set(range(20)))
    async with batching(start, script, usage=usage_url, batches=bounds) as (_, _, api):
        file = await api.files.create(file=("ask.jsonl", jsonl(*map(line, range(20)))), purpose="batch")
        ended = []
        for _ in range(7):
            batch = await api.made_of(file.id)
            await api.when(batch.id, lambda one: one.status in ("in_progress", "failed"))
            await api.batches.cancel(batch.id)
            ended.append(await api.over(batch.id))
            files, counted, size = await stored(usage_url)
            assert files <= bounds["files_max"]
            assert size <= counted <= bounds["stored_bytes_max"]
        statuses = [batch.status for batch in ended]
        assert (statuses[0], statuses[-1]) == ("cancelled", "failed")
        [fault] = ended[-1].errors.data
        assert (fault.code, "delete some" in fault.message) == ("no_room", True)
        await api.files.delete(ended[0].error_file_id)
        batch = await api.made_of(file.id)
        await api.when(batch.id, lambda one: one.status == "in_progress")


async def test_several_batches_at_once_share_what_their_tenant_may_keep(start: Starter, usage_url: str) -> None:
    content, script = jsonl(*map(line, range(20))), replies(answer(b'{"said":"%s"}' % (b"y" * 1000)))
    bounds = {"stored_bytes_max": len(content) + 40_000}
    async with batching(start, script, usage=usage_url, batches=bounds) as (_, live, api):
        file = await api.files.create(file=("ask.jsonl", content), purpose="batch")
        batches = [await api.made_of(file.id) for _ in range(4)]
        done = [await api.over(batch.id) for batch in batches]
        _, counted, size = await stored(usage_url)
        assert size == counted <= bounds["stored_bytes_max"]
        assert 0 < sum(counts(batch)[1] for batch in done) < 80
        errors = [each for batch in done if batch.error_file_id for each in await api.lines_of(batch.error_file_id)]
        assert {each["error"]["code"] for each in errors} == {"no_room"}
        assert await items_of(live) == [sum(counts(batch)[1] for batch in done), len(errors)]


async def test_an_upload_that_is_cut_leaves_nothing(start: Starter, monkeypatch: pytest.MonkeyPatch) -> None:
    add, begun, go_on = tables.add_lines, threading.Event(), threading.Event()
    url = str(start.directory / "u.db")

    def slow(*given: Any, **named: Any) -> None:
        add(*given, **named)
        begun.set()
        go_on.wait()

    async with batching(start, batches={"files_max": 1}) as (_, live, api):
        monkeypatch.setattr(tables, "add_lines", slow)
        upload = asyncio.ensure_future(api.files.create(file=("f", b"{}\n" * 10_000), purpose="batch"))
        await asyncio.to_thread(begun.wait)
        assert (await stored(url))[0] == 1
        upload.cancel()
        await live.lines(1)
        go_on.set()
        await eventually(lambda: is_gone(url))
        assert (await api.files.create(file=("f", b"{}"), purpose="batch")).bytes == 2


async def test_a_line_that_is_too_long_is_said_at_its_upload(start: Starter) -> None:
    most = MemoryBounds(MEMORY_MAX_LEAST, 1).line_bytes
    async with batching(start, memory_max=MEMORY_MAX_LEAST) as (_, _, api):
        with pytest.raises(openai.BadRequestError, match=f"line 2 has more than {most} bytes"):
            await api.files.create(file=("f", b"{}\n" + b"x" * (most + 1)), purpose="batch")
        await eventually(lambda: is_gone(str(start.directory / "u.db")))


@pytest.mark.slow
@pytest.mark.parametrize("part", [1000, 500_000])
async def test_answers_that_cannot_be_written_stay_within_memory_and_are_asked_again(
    start: Starter, monkeypatch: pytest.MonkeyPatch, part: int
) -> None:
    monkeypatch.setattr("gateway.usage.database.BUSY_S", 0.01)
    monkeypatch.setattr("gateway.proxy.batches.batch_lane.AGAIN_S", 0.01)
    number, locked, most = 16, asyncio.Event(), [0]
    bound = MemoryBounds(MEMORY_MAX_LEAST, 1).results_bytes

    async def script(seen: Seen, peer: Peer) -> None:
        await locked.wait()
        lines = sum(len(one.line) for one in alive(LineResult))
        most.append(lines + sum(len(piece) for each in alive(StoredRequest) for piece in each.pieces))
        await peer.send(answer(b'{"said":"%s"}' % (b"y" * part)))

    with only_young_objects():
        async with batching(start, script, memory_max=MEMORY_MAX_LEAST) as (upstream, live, api):
            batch = await api.made(jsonl(*[line(n, max_tokens=1) for n in range(number)]))
            await until(lambda: upstream.requests)
            with closing(sqlite3.connect(start.directory / "u.db", isolation_level=None)) as other:
                other.execute("BEGIN EXCLUSIVE")
                locked.set()
                await until(lambda: len(upstream.requests) >= (number if part == 1000 else 6))
            again = api.with_options(max_retries=20)  # the file is busy while the gateway writes to it
            done = await again.over(batch.id)
            assert (done.status, counts(done)) == ("completed", (number, number, 0))
            await until(live.holds_nothing)
            assert max(most) <= bound
            assert {room.taken.total() for lane in alive(BatchLane) for room in (lane.lines, lane.answers)} == {0}
            asked_twice = len(upstream.requests) - number
            assert asked_twice <= 10 if part > 1000 else not asked_twice


async def test_an_answer_that_is_longer_than_any_may_be_is_an_error(start: Starter) -> None:
    script = replies(answer(b'{"said":"%s"}' % (b"y" * MemoryBounds(MEMORY_MAX_LEAST, 1).results_bytes)))
    async with batching(start, script, memory_max=MEMORY_MAX_LEAST) as (upstream, _, api):
        done = await api.finished(jsonl(line(0)))
        assert (counts(done), len(upstream.requests)) == ((1, 0, 1), 2)
        [error] = await api.lines_of(done.error_file_id)
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


async def test_files_are_forgotten_when_their_client_says(start: Starter, usage_url: str) -> None:
    soon: Any = {"anchor": "created_at", "seconds": 3600}
    async with batching(start, usage=usage_url) as (_, _, api):
        file = await api.files.create(file=("f", jsonl(line(0))), purpose="batch", expires_after=soon)
        assert file.expires_at == file.created_at + 3600
        batch = await api.made_of(file.id, output_expires_after=soon)
        output = await api.files.retrieve((await api.over(batch.id)).output_file_id)
        assert output.expires_at == output.created_at + 3600
        for wrong in ({"anchor": "created_at", "seconds": 60}, {"anchor": "now", "seconds": 3600}):
            with pytest.raises(openai.BadRequestError, match="expires_after"):
                await api.files.create(file=("f", b"{}"), purpose="batch", expires_after=wrong)  # type: ignore[arg-type]
            with pytest.raises(openai.BadRequestError):
                await api.made_of(file.id, output_expires_after=wrong)
        await asyncio.to_thread(change, usage_url, "UPDATE fairgate_files SET expires_s = expires_s - 3601")
        assert [one async for one in api.files.list()] == []
        with pytest.raises(openai.NotFoundError):
            await api.files.content(file.id)
    async with batching(start, usage=usage_url):
        await eventually(lambda: is_gone(usage_url))


async def test_results_are_counted_though_nobody_knew_that_they_were_written(
    start: Starter, monkeypatch: pytest.MonkeyPatch
) -> None:
    held, is_lost, write = asyncio.Event(), iter([True]), tables.write
    monkeypatch.setattr("gateway.proxy.batches.batch_lane.AGAIN_S", 0.01)

    def late(*given: Any) -> Any:
        """Done, and nobody waits for it any longer."""
        done = write(*given)
        if next(is_lost, False):
            raise tables.StoreUnavailable("committed, and then the connection was lost")
        return done

    async with batching(start, holding(held, set(range(5)))) as (upstream, live, api):
        batch = await api.made(jsonl(*map(line, range(5))))
        await until(lambda: len(upstream.requests) == 5)
        monkeypatch.setattr(tables, "write", late)
        held.set()
        done = await api.over(batch.id)
        assert counts(done) == (5, 5, 0)
        assert await items_of(live) == [5, 0]


async def test_a_batch_that_is_cancelled_while_results_are_written_counts_and_keeps_them(
    start: Starter, monkeypatch: pytest.MonkeyPatch
) -> None:
    write, begun, go_on = tables.write, threading.Event(), threading.Event()

    def slow(*given: Any) -> Any:
        begun.set()
        go_on.wait()
        return write(*given)

    with only_young_objects():
        async with batching(start, holding(asyncio.Event(), {1}), batches={"running_max": 2}) as (_, live, api):
            monkeypatch.setattr(tables, "write", slow)
            batch = await api.made(jsonl(*map(line, range(2))))
            await asyncio.to_thread(begun.wait)
            [driver] = alive(BatchDriver)
            driver.cut()
            await asyncio.sleep(0)
            go_on.set()
            done = await api.over(batch.id)
            assert (done.status, counts(done)) == ("cancelled", (2, 1, 1))
            assert await items_of(live) == [1, 1]


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
