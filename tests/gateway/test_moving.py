"""What waits in a pool whose last engine is gone goes to the pool that stands in."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any

import pytest

from gateway.config.sections.keys import hash_key
from gateway.pool.dispatcher import AdmissionClient
from gateway.pool.pool import Pool
from tests.gateway.capture import Upstream, replies
from tests.gateway.live import CHAT, Answer, Live, Starter, chat, events, simulated, until
from tests.kit.held import OK, Held

AUDIO = "/v1/audio/transcriptions"
SOUND = b'--x\r\ncontent-disposition: form-data; name="file"; filename="a.wav"\r\n\r\nRIFF\r\n'
TENANTS = [{"name": name, "keys": [hash_key(name)]} for name in ("first", "alice", "bob")]
QUOTA = {"requests_per_minute": 100, "tokens_per_minute": 10_000}
ANSWERS = replies(OK)


def pools(large: str, small: str, **of_small: Any) -> list[dict[str, Any]]:
    """Two, of one engine that takes one request at a time; the second stands in for the first."""
    alike = {"capacity": {"waiting_target": 0}}
    return [
        {"name": "large", "models": ["big", "bigger"], "fallback": "small", "backends": [engine("l", large)], **alike},
        {"name": "small", "models": ["small"], "backends": [engine("s", small)], **alike, **of_small},
    ]


def engine(name: str, url: str) -> dict[str, Any]:
    return {"name": name, "url": url, "max_num_seqs": 1}


def both(live: Live) -> tuple[Pool, Pool]:
    large, small = live.gateway.pools
    return large, small


def drain(pool: Pool, drained: bool = True) -> None:
    [backend] = pool.backends.values()
    pool.drain(backend, drained)


def queued(pool: Pool) -> int:
    return pool.dispatcher.engine.queued


async def asks(live: Live, key: str, body: dict[str, Any] | None = None, **headers: str) -> asyncio.Task[Answer]:
    """A request that waits in the first pool, or runs there."""
    engine = both(live)[0].dispatcher.engine
    there = engine.queued + engine.dispatched
    fields = chat(max_tokens=3) | {"model": "big"} if body is None else body
    asked = asyncio.create_task(live.ask(CHAT, fields, key=key, **headers))
    await until(lambda: engine.queued + engine.dispatched > there)
    return asked


@asynccontextmanager
async def waiting(start: Starter, small: str, held: Held, **fields: Any) -> AsyncIterator[tuple[Live, Any]]:
    """A gateway whose first pool has one engine, which is busy: what is asked there waits."""
    async with Upstream(held) as upstream:
        fields = {"pools": pools(upstream.url, small), "tenants": TENANTS, "quota": QUOTA, **fields}
        async with start(**fields) as live:
            first = await asks(live, "first")
            yield live, first
            held.may.set()
            assert (await first).status == 200
            await until(live.holds_nothing)
            quotas = live.gateway.shared.quotas
            assert quotas is not None
            assert quotas.under_way == {}


async def test_a_drained_pool_s_waiting_requests_are_answered_by_the_other_in_fair_order(start: Starter) -> None:
    async with simulated(models=("small",), time_scale=0) as small, waiting(start, small.url, Held()) as (live, first):
        asked = [await asks(live, "alice") for _ in range(40)] + [await asks(live, "bob") for _ in range(4)]
        drain(both(live)[0])
        got = await asyncio.gather(*asked)
        assert {(each.status, each.json["model"]) for each in got} == {(200, "big")}
        assert not first.done()  # what ran goes on where it is
        lines = await live.lines(44)
        assert {(line["backend"], line["model"], line["tries"]) for line in lines} == {("s", "small", 1)}
        assert [line["tenant"] for line in lines[:9]].count("bob") == 4
        assert all("closed" in line["waited_ms"] for line in lines)
        metrics, quotas = await live.metrics(), live.gateway.shared.quotas
        assert quotas is not None
        for tenant, requests in (("alice", 40), ("bob", 4)):
            assert metrics["fairgate_tokens_total", "output", "small", "small", tenant] == 3 * requests
            standing = quotas.standing(tenant, both(live)[0].dispatcher.clock())
            left = {limit.name: limit.remaining for limit in standing}
            assert left["requests"] == QUOTA["requests_per_minute"] - requests


@pytest.mark.parametrize("stream", [False, True])
async def test_what_waits_when_the_engine_dies_is_answered(start: Starter, stream: bool) -> None:
    async with AsyncExitStack() as dying, simulated(models=("small",), time_scale=0) as small:
        dies = await dying.enter_async_context(Upstream(Held()))
        async with start(pools=pools(dies.url, small.url), tenants=TENANTS) as live:
            first = await asks(live, "first")
            asked = [await asks(live, "alice", chat(max_tokens=3, stream=stream) | {"model": "big"}) for _ in range(12)]
            await dying.aclose()
            assert (await first).status == 200  # sent to one more engine
            for got in await asyncio.gather(*asked):
                assert got.status == 200
                found = [got.json] if not stream else [event for event in events(got.body) if event != "[DONE]"]
                assert {each["model"] for each in found} == {"big"}
            lines = [line for line in await live.lines(13) if line["tenant"] == "alice"]
            assert [(line["backend"], line["outcome"], line["tokens_out"]) for line in lines] == [
                ("s", "completed", 3)
            ] * 12


@pytest.mark.parametrize("size", [1, 400_000])
async def test_the_engine_is_asked_as_by_an_arrival(start: Starter, size: int) -> None:
    async with Upstream(ANSWERS) as small, waiting(start, small.url, Held()) as (live, _):
        body = chat("Hello", stream_options=None, padding="x" * size) | {"model": "big"}
        asked = await asks(live, "alice", body)
        drain(both(live)[0])
        assert (await asked).json["model"] == "big"
        straight = await live.ask(CHAT, body, key="alice")
        assert straight.json["model"] == "big"
        moved, arrived = small.requests
        assert moved.json == arrived.json == body | {"model": "small"}
        assert set(moved.head.split(b"\r\n")) >= {b"content-length: %d" % len(moved.body)}


async def test_json_and_a_form_go_there_and_back_again(start: Starter) -> None:
    held = Held()
    async with Upstream(Held()) as small, Upstream(held) as large:
        async with start(pools=pools(large.url, small.url, fallback="bigger"), tenants=TENANTS) as live:
            one, other = both(live)
            first = await asks(live, "first")
            stays = asyncio.create_task(live.ask(CHAT, chat() | {"model": "small"}, key="first"))
            await until(lambda: other.dispatcher.engine.dispatched)
            form = b'--x\r\ncontent-disposition: form-data; name="model"\r\n\r\n%b\r\n' + SOUND + b"--x--\r\n"
            asked = asyncio.create_task(
                live.ask(AUDIO, form % b"big", key="alice", content_type="multipart/form-data; boundary=x")
            )
            await until(lambda: queued(one))
            json = await asks(live, "alice")
            drain(one)
            await until(lambda: queued(other) == 2)
            drain(one, False)
            drain(other)
            await until(lambda: queued(one) == 2)
            held.may.set()
            assert [(await each).status for each in (first, asked, json)] == [200] * 3
            moved = {seen.line.split()[1].decode(): seen for seen in large.requests}
            assert moved[AUDIO].body == form % b"bigger"
            assert moved[CHAT].json["model"] == "bigger"
            assert len(small.requests) == 1
            stays.cancel()


async def test_a_salt_is_there_where_the_other_pool_wants_one(start: Starter) -> None:
    for shared, salts in ((True, 0), (False, 1)):
        async with Upstream(ANSWERS) as small, Upstream(Held()) as large:
            both_pools = pools(large.url, small.url, isolate_caches="never" if shared else "where_possible")
            both_pools[0]["isolate_caches"] = "where_possible" if shared else "never"
            async with start(pools=both_pools, tenants=TENANTS) as live:
                running, asked = await asks(live, "first"), await asks(live, "alice")
                drain(both(live)[0])
                assert (await asked).status == 200
                [moved] = small.requests
                assert moved.body.count(b"cache_salt") == salts
                running.cancel()


async def test_an_interaction_goes_on_uncut(start: Starter) -> None:
    async with Upstream(ANSWERS) as small, waiting(start, small.url, Held()) as (live, _):
        interactions = live.gateway.shared.interactions
        assert interactions is not None
        drain(both(live)[0])
        for _ in (1, 2):
            got = await live.ask(CHAT, chat() | {"model": "big"}, key="alice", x_fairgate_interaction="i")
            assert got.status == 200
        drain(both(live)[0], False)
        asked = await asks(live, "alice", x_fairgate_interaction="i")
        drain(both(live)[0])
        assert (await asked).status == 200
        lines = await live.lines(3)
        assert [(line["stage"], line["tokens_wasted"]) for line in lines] == [(1, 0), (2, 0), (3, 0)]
        assert interactions.wasted_tokens == 0


async def test_a_request_that_moves_after_a_reload_has_its_tenant_s_new_weight(start: Starter) -> None:
    held = Held()
    async with Upstream(held) as small, waiting(start, small.url, Held()) as (live, _):
        asked = await asks(live, "alice")
        config = live.gateway.config
        tenants = tuple([one.model_copy(update={"weight": 5.0}) for one in config.tenants])
        await live.gateway.take_over(config.model_copy(update={"tenants": tenants}))
        drain(both(live)[0])
        moved = both(live)[1].dispatcher.engine.requests.leases
        await until(lambda: moved)
        assert [lease.request.weight for lease in moved.values()] == [5.0]
        held.may.set()
        assert (await asked).status == 200


async def test_two_that_name_each_other_do_not_pass_requests_to_and_fro(start: Starter) -> None:
    async with Upstream(ANSWERS) as small, Upstream(Held()) as large:
        # Else what waits without any engine is refused, as soon as the gateway looks for another pool.
        named = [pool | {"start_s_max": 600} for pool in pools(large.url, small.url, fallback="big")]
        async with start(pools=named, tenants=TENANTS) as live:
            one, other = both(live)
            running = await asks(live, "first")
            asked = [await asks(live, "alice") for _ in range(5)]
            strand, places = one.dispatcher.on_stranded, list[tuple[int, int]]()
            assert strand is not None

            def looked(waiting: Sequence[AdmissionClient]) -> None:
                strand(waiting)
                places.append((queued(one), queued(other)))

            one.dispatcher.on_stranded = looked
            drain(other)
            drain(one)
            await until(lambda: len(places) >= 3 or queued(one) < 5)
            assert set(places) == {(5, 0)}
            drain(other, False)
            assert {(await each).status for each in asked} == {200}
            assert len(small.requests) == 5
            running.cancel()


async def test_a_client_that_leaves_on_the_way_leaves_no_trace(start: Starter) -> None:
    held = Held()
    async with Upstream(held) as small, waiting(start, small.url, Held()) as (live, _):
        one, other = both(live)
        stands = asyncio.create_task(live.ask(CHAT, chat() | {"model": "small"}, key="bob"))
        await until(lambda: other.dispatcher.engine.dispatched)
        asked = [await asks(live, "alice", x_fairgate_interaction=f"i{number}") for number in range(40)]
        drain(one)
        await until(lambda: queued(other))
        for each in asked[::2]:
            each.cancel()
        await until(lambda: queued(one) + queued(other) == 20)
        held.may.set()
        assert [(await each).status for each in asked[1::2]] == [200] * 20
        assert (await stands).status == 200
        lines = await live.lines(41)
        outcomes = [line["outcome"] for line in lines if line["tenant"] == "alice"]
        assert (outcomes.count("completed"), outcomes.count("abandoned")) == (20, 20)
        assert len(small.requests) == 21


async def test_what_the_other_s_context_has_no_room_for_is_refused_and_the_rest_goes_on(start: Starter) -> None:
    async with simulated(models=("small",), time_scale=0) as small, waiting(start, small.url, Held()) as (live, _):
        asked = [await asks(live, "alice", chat(max_tokens=most) | {"model": "big"}) for most in (3, 5000, 3)]
        drain(both(live)[0])
        got = await asyncio.gather(*asked)
        assert [each.status for each in got] == [200, 400, 200]
        assert got[1].error["code"] == "context_length_exceeded"
