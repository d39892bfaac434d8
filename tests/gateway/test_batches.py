"""Files and batches, by the official client: what a batch asks comes back once and in order, whatever happens."""

from __future__ import annotations

import asyncio
import json
import signal
import time
from collections import Counter
from pathlib import Path

import openai
import pytest

from gateway.config.sections.keys import hash_key
from gateway.keys.issued import REVOKED
from gateway.proxy.batches.batch_api import NEW_BATCH_BYTES_MAX
from tests.gateway.capture import OK, Peer, Seen, Upstream, answer, replies
from tests.gateway.live import CHAT, MODEL, Starter, simulated, until
from tests.kit.batching import TENANTS, batching, change, client, counts, holding, items_of, jsonl, line, number_of
from tests.kit.keys import note_key
from tests.kit.served import config_file, served
from tests.kit.usage import counted
from tests.waiting import eventually


async def usage_of(url: str) -> dict[tuple[str, ...], tuple[float, ...]]:
    """By tenant and app, once the gateway has ended."""
    return await asyncio.to_thread(counted, url, "tenant", "app")


async def test_a_batch_is_answered_in_order_and_its_usage_counted(start: Starter, usage_url: str) -> None:
    async with simulated(time_scale=0) as sim, start(sim.url, tenants=TENANTS, usage=usage_url) as live:
        async with client(live.url, x_fairgate_app="night") as api:
            batch = await api.made(jsonl(*map(line, range(100))), metadata={"run": "7"})
            assert (batch.status, batch.metadata, counts(batch)) == ("validating", {"run": "7"}, (0, 0, 0))
            assert batch.expires_at - batch.created_at == 86_400
            done = await api.over(batch.id)
            assert (done.status, done.errors, done.error_file_id) == ("completed", None, None)
            assert counts(done) == (100, 100, 0)
            results = await api.lines_of(done.output_file_id)
            assert [each["custom_id"] for each in results] == [f"item-{n}" for n in range(100)]
            assert {(each["response"]["status_code"], each["error"]) for each in results} == {(200, None)}
            used = [each["response"]["body"]["usage"] for each in results]
        log = await live.lines(100)
        assert {(each["tenant"], each["app"]) for each in log if each["path"] == CHAT} == {("alice", "night")}
    [sums] = [sums for by, sums in (await usage_of(usage_url)).items() if by == ("alice", "night")]
    assert sums[0] == 100
    assert sums[2] == sum(each["prompt_tokens"] for each in used)
    assert sums[4] == sum(each["completion_tokens"] for each in used)


async def test_what_an_engine_finds_wrong_stands_in_the_file_of_errors(start: Starter) -> None:
    usage = str(start.directory / "u.db")
    async with (
        simulated(time_scale=0) as sim,
        start(sim.url, tenants=TENANTS, usage=usage) as live,
        client(live.url) as api,
    ):
        lines = [line(0), line(1, max_tokens=-1), line(2, max_tokens=100_000), line(3)]
        done = await api.finished(jsonl(*lines))
        assert (done.status, counts(done)) == ("completed", (4, 2, 2))
        assert [each["custom_id"] for each in await api.lines_of(done.output_file_id)] == ["item-0", "item-3"]
        errors = await api.lines_of(done.error_file_id)
        assert [each["custom_id"] for each in errors] == ["item-1", "item-2"]
        assert all(each["response"]["body"]["error"]["message"] for each in errors)
        for endpoint, body in (("/v1/embeddings", {"input": "a"}), ("/v1/completions", {"prompt": "a"})):
            asked = {"custom_id": "a", "method": "POST", "url": endpoint, "body": {"model": MODEL, **body}}
            done = await api.finished(jsonl(asked), endpoint)
            assert (done.status, counts(done)) == ("completed", (1, 1, 0))

        async def shown() -> bool:
            return (await live.metrics())["fairgate_batches",] == 0 and await items_of(live) == [4, 2]

        await eventually(shown)


async def test_a_batch_with_bad_lines_fails_and_says_which(start: Starter) -> None:
    bad = [
        b"{",
        b"[]",
        b"",
        *jsonl(
            line(0), line(0), line(1, "/v1/embeddings"), line(2, model="other"), line(3, stream=True),
            line(4) | {"method": "GET"}, line(5) | {"custom_id": ""}, {"custom_id": "x"}, line(6),
        ).splitlines(),
        b"\xff",
        jsonl(line(7))[:-1].replace(b"item-7", b"\xff"),
    ]  # fmt: skip
    async with batching(start) as (upstream, _, api):
        done = await api.finished(b"\n".join(bad))
        assert (done.status, done.output_file_id, done.error_file_id) == ("failed", None, None)
        assert [(each.line, each.code, each.param) for each in done.errors.data] == [
            (1, "invalid_json_line", None),
            (2, "invalid_request", None),
            (5, "duplicate_custom_id", "custom_id"),
            (6, "mismatched_url", "url"),
            (7, "model_not_found", "body.model"),
            (8, "invalid_request", "body.stream"),
            (9, "invalid_request", "method"),
            (10, "invalid_request", "custom_id"),
            (11, "invalid_request", "method"),
            (13, "invalid_json_line", None),
            (14, "invalid_json_line", None),
        ]
        empty = await api.finished(b"\n")
        assert [each.code for each in empty.errors.data] == ["empty_file"]
        assert upstream.requests == []


async def test_a_byte_order_mark_and_blank_lines_are_no_faults(start: Starter) -> None:
    content = b"\xef\xbb\xbf" + jsonl(line(0)) + b"     \t\r\n" + jsonl(line(1)) + b"\n   "
    async with batching(start) as (_, _, api):
        done = await api.finished(content)
        assert (done.status, counts(done)) == ("completed", (2, 2, 0))
        assert [each["custom_id"] for each in await api.lines_of(done.output_file_id)] == ["item-0", "item-1"]
        assert (await api.files.content(done.input_file_id)).content == content


async def test_questions_that_are_wrong_are_the_clients_fault(start: Starter, usage_url: str) -> None:
    async with batching(start, usage=usage_url) as (_, live, _):
        for query in ("files?after=%00", "files?purpose=%00", "batches?after=a%00b", f"batches?limit={'9' * 5000}"):
            got = await live.get(f"/v1/{query}")
            assert (got.status, got.error["code"]) == (400, "invalid_request"), query
        named = {"input_file_id": "file\0", "endpoint": CHAT, "completion_window": "24h"}
        large = {"metadata": {"a": "x" * NEW_BATCH_BYTES_MAX}}  # however large a file may be
        for body, status, code in (
            (named, 404, "not_found"),
            (large, 413, "body_too_large"),
            (b'{"input_file_id":"\xff"}', 400, "invalid_request"),
        ):
            got = await live.ask("/v1/batches", body)
            assert (got.status, got.error["code"]) == (status, code)


async def test_files_and_batches_are_their_tenants_own(start: Starter) -> None:
    held = asyncio.Event()
    async with batching(start, holding(held, {0})) as (_, live, api), client(live.url, "b") as other:
        content = jsonl(line(0)).replace(b"\n", b"\r\n\r\n")
        file = await api.files.create(file=("a b.jsonl", content), purpose="batch")
        found = (file.filename, file.bytes, file.purpose, file.status)
        assert found == ("a b.jsonl", len(content), "batch", "processed")
        assert (await api.files.content(file.id)).content == content
        url, key = f"{live.url}/v1/files/{file.id}/content", {"authorization": "Bearer k"}
        async with live.http.head(url, headers=key) as head:
            assert (head.status, head.headers["content-length"]) == (200, str(file.bytes))
        batch = await api.made_of(file.id)
        with pytest.raises(openai.BadRequestError, match=f"{batch.id} is not over and reads this file"):
            await api.files.delete(file.id)
        for ask in (
            other.files.retrieve(file.id), other.files.content(file.id), other.files.delete(file.id),
            other.batches.retrieve(batch.id), other.batches.cancel(batch.id), other.made_of(file.id),
        ):  # fmt: skip
            with pytest.raises(openai.NotFoundError) as error:
                await ask
            assert error.value.code == "not_found"
        assert ([one async for one in other.files.list()], [one async for one in other.batches.list()]) == ([], [])
        held.set()
        await api.over(batch.id)
        assert (await api.files.delete(file.id)).deleted
        with pytest.raises(openai.NotFoundError):
            await api.files.retrieve(file.id)


async def test_files_and_batches_of_a_tenant_are_bounded_and_listed_by_pages(start: Starter) -> None:
    bounds = {"files_max": 7, "stored_bytes_max": 5000, "lines_max": 10, "batches_max": 2}
    async with batching(start, holding(asyncio.Event(), {0}), batches=bounds) as (_, _, api):
        asked = await api.files.create(file=("f", jsonl(line(0))), purpose="batch")
        for content, purpose, why in (
            (b"\n" * 11, "batch", "more than 10 lines"),
            (b"x" * 5000, "batch", "more than 5000 bytes together"),
            (b"x", "fine-tune", "should be 'batch'"),
        ):
            with pytest.raises(openai.BadRequestError, match=why):
                await api.files.create(file=("f", content), purpose=purpose)  # type: ignore[arg-type]
        first, second = [await api.made_of(asked.id) for _ in range(2)]
        for batch in (first, second):  # two files for the results of each are kept from then on
            await api.when(batch.id, lambda one: one.status == "in_progress")
        files = [asked, *[await api.files.create(file=("f", b"\n" * 10), purpose="batch") for _ in range(2)]]
        with pytest.raises(openai.BadRequestError, match="you keep 7 files, results of batches included"):
            await api.files.create(file=("f", b""), purpose="batch")
        newest = [one.id async for one in api.files.list(limit=1, order="desc")]
        assert newest == [file.id for file in reversed(files)]
        for of in (api.batches, api.files):
            with pytest.raises(openai.BadRequestError, match="limit should be a number from 1"):
                await of.list(extra_query={"limit": "9" * 5000})
        page = await api.batches.list(limit=1)
        assert ([one.id for one in page.data], page.has_more) == ([second.id], True)
        assert [one.id async for one in api.batches.list(after=second.id)] == [first.id]
        with pytest.raises(openai.RateLimitError, match="2 of your batches are not over"):
            await api.made_of(asked.id)


async def test_results_that_take_all_the_room_leave_the_rest_unasked(start: Starter) -> None:
    content = jsonl(*map(line, range(5)))
    bounds = {"stored_bytes_max": len(content) + 3500, "running_max": 1}
    async with batching(start, replies(answer(b'{"said":"%s"}' % (b"y" * 1000))), batches=bounds) as (upstream, _, api):
        done = await api.finished(content)
        assert (done.status, counts(done), len(upstream.requests)) == ("completed", (5, 2, 3), 3)
        assert [each["error"]["code"] for each in await api.lines_of(done.error_file_id)] == ["no_room"] * 3
        kept = [one.bytes async for one in api.files.list()]
        assert (len(kept), sum(kept) <= bounds["stored_bytes_max"]) == (3, True)


async def test_an_answer_that_is_no_utf_8_is_a_line_that_is(start: Starter) -> None:
    async with batching(start, replies(answer(b'{"said":"\xff"}'))) as (_, _, api):
        done = await api.finished(jsonl(line(0)))
        content = (await api.files.content(done.output_file_id)).content
        assert json.loads(content)["response"]["body"] == {"said": "\ufffd"}


async def test_a_batch_that_is_cancelled_keeps_what_was_answered(start: Starter) -> None:
    script = holding(asyncio.Event(), {1, 3})
    async with batching(start, script, batches={"running_max": 2}) as (_, live, api):
        batch = await api.made(jsonl(*map(line, range(6))))
        await api.when(batch.id, lambda one: counts(one) == (6, 2, 0))
        assert (await api.batches.cancel(batch.id)).status == "cancelling"
        done = await api.over(batch.id)
        assert (done.status, counts(done)) == ("cancelled", (6, 2, 4))
        assert [each["custom_id"] for each in await api.lines_of(done.output_file_id)] == ["item-0", "item-2"]
        errors = await api.lines_of(done.error_file_id)
        assert [(each["custom_id"], each["error"]["code"]) for each in errors] == [
            (f"item-{n}", "batch_cancelled") for n in (1, 3, 4, 5)
        ]
        await until(live.holds_nothing)
        assert (await api.batches.cancel(batch.id)).status == "cancelled"
    assert (await usage_of(str(start.directory / "u.db")))["alice", "chat"][0] == 2


async def test_a_batch_expires_after_its_window(start: Starter, usage_url: str) -> None:
    script = holding(asyncio.Event(), {1})
    async with batching(start, script, usage=usage_url) as (_, _, api):
        batch = await api.made(jsonl(line(0), line(1)))
        await api.when(batch.id, lambda one: counts(one) == (2, 1, 0))
    # Another gateway goes on with it, and sees that its time is over.
    entry = f'"expires_at": {batch.expires_at}', f'"expires_at": {int(time.time()) - 1}'
    statement = "UPDATE fairgate_batches SET entry = REPLACE(entry, %s, %s)"
    await asyncio.to_thread(change, usage_url, statement, *entry)
    async with batching(start, script, usage=usage_url) as (_, _, api):
        done = await api.over(batch.id)
        assert (done.status, counts(done)) == ("expired", (2, 1, 1))
        assert [each["error"]["code"] for each in await api.lines_of(done.error_file_id)] == ["batch_expired"]


@pytest.mark.slow
async def test_what_is_refused_comes_again_and_what_engines_fail_on_does_not_for_ever(start: Starter) -> None:
    tries: Counter[int] = Counter()

    async def script(seen: Seen, peer: Peer) -> None:
        number = number_of(seen)
        tries[number] += 1
        if number == 1:
            await peer.send(answer(b'{"error":{"message":"broken"}}', status=b"500 Internal Server Error"))
        else:
            await peer.send(OK)

    tenants = [{**TENANTS[0], "quota": {"requests_per_minute": 6000, "concurrent": 1}}]
    async with batching(start, script, tenants=tenants) as (_, live, api):
        done = await api.finished(jsonl(*map(line, range(4))))
        assert (done.status, counts(done)) == ("completed", (4, 3, 1))
        [error] = await api.lines_of(done.error_file_id)
        assert (error["custom_id"], error["response"]["status_code"]) == ("item-1", 502)
        assert tries[1] == 2
        log = await live.lines(7)
        assert "refused" in {each["outcome"] for each in log if each["path"] == CHAT}
    sums = await usage_of(str(start.directory / "u.db"))
    assert (sums["alice", "chat"][0], sums["alice", "chat"][4]) == (4, 6)


@pytest.mark.parametrize(
    ("way", "code", "said"), [("revoked", "invalid_api_key", "was revoked"), ("expired", "expired_api_key", "expired")]
)
async def test_lines_of_a_key_that_is_taken_back_meanwhile_fail(
    start: Starter, way: str, code: str, said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("gateway.keys.issued.POLL_S", 0.01)
    held = asyncio.Event()
    async with (
        batching(start, holding(held, {0}), batches={"running_max": 1}) as (upstream, live, other),
        client(live.url, "new") as api,
    ):
        keys = live.gateway.keys
        assert keys is not None
        key = live.gateway.config.tenants[0].keys[0].model_copy(update={"hash": hash_key("new")})
        await note_key(keys, key, "alice")

        async def is_answered(status: int) -> bool:
            return (await live.get("/v1/models", key="new")).status == status

        await eventually(lambda: is_answered(200))
        batch = await api.made(jsonl(line(0), line(1)))
        await until(lambda: upstream.requests)
        if way == "revoked":
            await keys.note({key.hash: REVOKED})
        else:
            await note_key(keys, key.model_copy(update={"expires": "2020-01-31"}), "alice")
        await eventually(lambda: is_answered(401))
        held.set()
        done = await other.over(batch.id)
        assert (done.status, counts(done)) == ("completed", (2, 1, 1))
        [error] = await other.lines_of(done.error_file_id)
        assert (error["custom_id"], error["response"]["status_code"]) == ("item-1", 401)
        fault = error["response"]["body"]["error"]
        assert (fault["code"], said in fault["message"]) == (code, True)


async def test_without_a_database_it_is_said_what_to_set(start: Starter) -> None:
    async with Upstream(replies(OK)) as upstream, start(upstream.url) as live:
        got = await live.get("/v1/batches")
        assert (got.status, got.error["code"]) == (501, "not_implemented")
        assert "set `usage`" in got.error["message"]


@pytest.mark.slow
async def test_batches_of_one_tenant_wait_for_each_other_and_not_those_of_others(start: Starter) -> None:
    held = asyncio.Event()
    async with batching(start, holding(held, {0})) as (_, live, api), client(live.url, "b") as other:
        batches = [await api.made(jsonl(line(0))) for _ in range(6)]
        for batch in batches[:4]:
            await api.when(batch.id, lambda one: one.status == "in_progress")
        assert (await other.finished(jsonl(line(1)))).status == "completed"
        assert [(await api.batches.retrieve(one.id)).status for one in batches[4:]] == ["validating"] * 2
        await api.batches.cancel(batches[5].id)
        assert (await api.over(batches[5].id)).status == "cancelled"
        held.set()
        for batch in batches[:5]:
            assert (await api.over(batch.id)).status == "completed"


@pytest.mark.slow
async def test_one_gateway_of_several_drives_a_batch(start: Starter, usage_url: str) -> None:
    async with (
        batching(start, usage=usage_url) as (upstream, _, api),
        start(upstream.url, tenants=TENANTS, usage=usage_url) as two,
        client(two.url) as other,
    ):
        asked = [await each.made(jsonl(*map(line, range(20)))) for each in (api, other, api, other)]
        for batch in asked:
            done = await other.over(batch.id)
            assert (done.status, counts(done)) == ("completed", (20, 20, 0))
        assert {one.id async for one in api.batches.list()} == {batch.id for batch in asked}
        assert len(upstream.requests) == 80
    assert (await usage_of(usage_url))["alice", "chat"][0] == 80


@pytest.mark.slow
async def test_after_a_kill_a_batch_goes_on_where_it_stopped(tmp_path: Path) -> None:
    held, lines, url = asyncio.Event(), 200, str(tmp_path / "usage.db")
    async with Upstream(holding(held, set(range(100, lines)))) as upstream:
        config = config_file(tmp_path, upstream.url, tenants=TENANTS, usage=url)
        async with served(config) as gate, client(gate.url) as api:
            batch = await api.made(jsonl(*map(line, range(lines))))
            await api.when(batch.id, lambda one: one.request_counts.completed > 50)
            await gate.ends(signal.SIGKILL)
        before = Counter(number_of(seen) for seen in upstream.requests)
        held.set()
        await asyncio.to_thread(change, url, "UPDATE fairgate_batches SET lease_s = 0")  # as time would have
        async with served(config) as gate, client(gate.url) as api:
            done = await api.over(batch.id)
            assert (done.status, counts(done)) == ("completed", (lines, lines, 0))
            results = await api.lines_of(done.output_file_id)
            assert await gate.ends(signal.SIGTERM) == 0
        assert [each["custom_id"] for each in results] == [f"item-{n}" for n in range(lines)]
        after = Counter(number_of(seen) for seen in upstream.requests) - before
        assert sum(after.values()) <= lines - 50, "what had its result is not asked again"
    sums = (await usage_of(url))["alice", "chat"]
    assert (sums[0], sums[2], sums[4]) == (lines, 7 * lines, 2 * lines)
