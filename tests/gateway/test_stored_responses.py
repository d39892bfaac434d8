"""Responses that an engine keeps are their tenant's alone, and asked for where they are; and work after the answer."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from contextlib import AsyncExitStack
from typing import Any

import pytest

from gateway.config.sections.keys import hash_key
from gateway.http.errors import ApiError
from gateway.keys.identity import Principal
from gateway.keys.stored_responses import ID_LENGTH_MAX, KEPT_S, StoredResponses
from gateway.storage.hub.run_directory import WorkerSlot
from tests.gateway.live import MODEL, Answer, Live, Starter, chat, until
from tests.kit.keeper import ASKED, CHAT, RESPONSES, Keeper, pools, respond
from tests.kit.run_directory import run_directory
from tests.redis_server import RedisServer
from tests.waiting import eventually


async def at(live: Live, method: str, path: str, key: str = "k") -> Answer:
    async with live.http.request(method, live.url + path, headers={"authorization": f"Bearer {key}"}) as response:
        return await Answer.of(response)


WAYS = [("GET", ""), ("GET", "/input_items"), ("POST", "/cancel"), ("DELETE", "")]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("policy", ["fairserve", "d2lpm"])
async def test_a_response_is_asked_for_where_it_is(start: Starter, stream: bool, policy: str) -> None:
    async with Keeper() as a, Keeper() as b, start(pools=pools(a, b), policy=policy) as live:
        for name, engine in (("a", a), ("b", b), ("a", a)):
            id = await respond(live, name, stream=stream)
            assert id in engine.kept
            for method, rest in WAYS:
                got = await at(live, method, f"{RESPONSES}/{id}{rest}")
                assert (got.status, got.json) == (200, {"id": id, "method": method})
            for _ in range(3):
                id = await respond(live, previous_response_id=id, stream=stream)
                assert id in engine.kept
        assert live.holds_nothing()
        assert {line["model"] for line in await live.lines(24)} == {MODEL}


async def test_a_response_is_asked_for_while_it_is_made(start: Starter) -> None:
    async with Keeper() as a, start(pools=pools(a)) as live:
        a.goes_on.clear()
        async with live.post(RESPONSES, ASKED | {"stream": True}) as response:
            await response.content.readline()
            [id] = a.kept
            assert (await at(live, "POST", f"{RESPONSES}/{id}/cancel")).status == 200
            a.goes_on.set()
            assert b"response.completed" in await response.content.read()


async def test_a_response_exists_for_nobody_but_its_tenant_and_keys_that_may_ask_for_its_model(start: Starter) -> None:
    keys = [{"hash": hash_key("k")}, {"hash": hash_key("other-model"), "models": ["other"]}]
    tenants = [{"name": "alice", "keys": keys}, {"name": "bob", "keys": [hash_key("bob")]}]
    async with Keeper() as a, start(pools=pools(a), tenants=tenants) as live:
        id = await respond(live)
        asked = len(a.requests)
        for key in ("bob", "other-model"):
            for method, rest in WAYS:
                got, nowhere = [await at(live, method, f"{RESPONSES}/{one}{rest}", key) for one in (id, "resp_none")]
                assert (got.status, got.error["code"]) == (404, "not_found")
                assert got.body.replace(id.encode(), b"resp_none") == nowhere.body
        body = ASKED | {"previous_response_id": id}
        got, nowhere = [await live.ask(RESPONSES, body | {"previous_response_id": one}, key="bob") for one in (id, "n")]
        assert (got.status, got.body.replace(id.encode(), b"n")) == (404, nowhere.body)
        assert (await live.ask(RESPONSES, body, key="other-model")).status == 404
        assert len(a.requests) == asked
        assert (await live.ask(RESPONSES, body)).status == 200
        assert (await live.ask(RESPONSES, body | {"previous_response_id": None})).status == 200
        assert (await live.ask(CHAT, chat(previous_response_id=id), key="bob")).status == 200, "no field of chat"


async def test_what_asks_by_an_id_is_not_opened_by_a_route_for_others(start: Starter) -> None:
    routes = [
        {"path": "/v1/responses/*/more", "treatment": "pass"},
        {"path": "/v1/*/*/remix", "treatment": "compute"},
        {"path": "/v1/responses/compact", "treatment": "pass"},
    ]
    async with Keeper() as a, start(pools=pools(a), routes=routes) as live:
        id = await respond(live)
        for rest in ("more", "remix"):
            path = f"{RESPONSES}/{id}/{rest}"
            assert [(await live.ask(path, {}, key=key)).status for key in "kx"] == [200, 404]
        a.kept.add("compact")
        assert (await live.ask("/v1/responses/compact", {}, key="x")).status == 200


async def test_a_pool_that_stood_in_goes_on_with_what_it_answered(start: Starter) -> None:
    async with Keeper() as big, Keeper() as small:
        both = [
            {"name": "large", "models": ["big"], "fallback": "small", "backends": [{"name": "a", "url": big.url}]},
            {"name": "small", "models": ["small"], "backends": [{"name": "b", "url": small.url}]},
        ]
        async with start(pools=both) as live:
            large = live.gateway.pools[0]
            large.drain(large.backends["a"], True)
            id = (await live.ask(RESPONSES, ASKED | {"model": "big"})).json["id"]
            large.drain(large.backends["a"], False)
            assert (await at(live, "GET", f"{RESPONSES}/{id}")).status == 200
            assert (await live.ask(RESPONSES, ASKED | {"model": "big", "previous_response_id": id})).status == 200
            assert [len(engine.requests) for engine in (big, small)] == [0, 3]


async def waiting_for(live: Live, id: str) -> list[asyncio.Future[Answer]]:
    """What goes on from this response, once its engine has no place for the last of them."""
    asked: list[asyncio.Future[Answer]] = []
    while not live.engine.queued:
        asked.append(asyncio.ensure_future(live.ask(RESPONSES, ASKED | {"previous_response_id": id})))
        await until(lambda: live.engine.dispatched + live.engine.queued == len(asked))
    return asked


@pytest.mark.parametrize("policy", ["fairserve", "vtc", "dlpm", "d2lpm", "fcfs"])
async def test_who_waits_for_the_engine_that_has_a_response_holds_nobody_up_and_hears_at_once_that_it_is_gone(
    start: Starter, policy: str
) -> None:
    async with Keeper() as a, Keeper() as b, start(pools=pools(a, b, max_num_seqs=1), policy=policy) as live:
        id = await respond(live, "a")
        [pool] = live.gateway.pools
        a.goes_on.clear()
        busy = await waiting_for(live, id)
        asked = len(b.requests)
        if policy != "fcfs":  # which stops if the first does not fit
            for _ in range(2):
                assert (await live.ask(CHAT, chat(), key="other")).status == 200
            assert len(b.requests) == asked + 2, "the other engine is idle, and starts what it can"
        pool.drain(pool.backends["a"], True)
        assert live.engine.queued == 0
        for refused in (await busy.pop(), await live.ask(RESPONSES, ASKED | {"previous_response_id": id})):
            assert (refused.status, refused.error["code"]) == (503, "no_backend")
        assert (await live.ask(CHAT, chat())).status == 200
        a.goes_on.set()
        assert [(await each).status for each in busy] == [200] * len(busy)
        assert (await at(live, "GET", f"{RESPONSES}/{id}")).status == 200, "what is drained still has it"
        pool.drain(pool.backends["a"], False)
        before = len(b.requests)
        assert (await live.ask(RESPONSES, ASKED | {"previous_response_id": id})).status == 200
        assert len(b.requests) == before
        assert live.holds_nothing()


def found(responses: StoredResponses, tenant: str, id: str, now: float) -> bool:
    principal = Principal(tenant, 1.0, ("default",))
    try:
        return bool(responses.find(principal, id, now).engine)
    except ApiError:
        return False


def noting(most: int) -> tuple[StoredResponses, Callable[..., None]]:
    responses = StoredResponses(most)
    return responses, lambda tenant, id, now=0.0: responses.note((tenant, id, "m", "m", "e"), now)


def test_who_floods_the_table_loses_nobody_s_responses_but_its_own() -> None:
    responses, note = noting(200)
    for number in range(5):
        note("light", f"r{number}")
    for number in range(10_000):
        note("heavy", f"r{number}")
        assert len(responses) <= 200
    assert all(found(responses, "light", f"r{number}", 1.0) for number in range(5))
    assert found(responses, "heavy", "r9999", 1.0)
    assert not found(responses, "heavy", "r5", 1.0)
    note("light", "x" * (ID_LENGTH_MAX + 1))
    assert not found(responses, "light", "x" * (ID_LENGTH_MAX + 1), 1.0)


def test_a_response_is_known_for_thirty_days_after_it_was_asked_for() -> None:
    responses, note = noting(10)
    day = 86_400.0
    assert 30 * day == KEPT_S
    note("t", "r")
    assert found(responses, "t", "r", 29 * day)
    assert found(responses, "t", "r", 58 * day)
    assert not found(responses, "t", "r", 88 * day + 1)


@pytest.mark.parametrize("store", ["redis", "hub"])
async def test_gateways_tell_each_other_where_responses_are(start: Starter, store: str) -> None:
    async with AsyncExitStack() as stack:
        a, b = [await stack.enter_async_context(Keeper()) for _ in "ab"]
        if store == "redis":
            each = {"state": (await stack.enter_async_context(RedisServer())).url, "pools": pools(a, b)}
            first, second = [await stack.enter_async_context(start(**each)) for _ in "12"]
        else:
            found, _ = await stack.enter_async_context(run_directory())
            slots = [WorkerSlot(index, found) for index in range(2)]
            started = [start(worker_slot=slot, workers=2, pools=pools(a, b)) for slot in slots]
            first, second = [await stack.enter_async_context(each) for each in started]
        ids: list[str] = []

        async def is_heard() -> bool:  # what is told while nobody listens yet is lost
            ids.append(await respond(first, "b", key="mine"))
            return (await at(second, "GET", f"{RESPONSES}/{ids[-2:][0]}", "mine")).status == 200

        await eventually(is_heard)
        id = ids[-2:][0]
        assert (await at(second, "GET", f"{RESPONSES}/{id}", "other")).status == 404
        got = await second.ask(RESPONSES, ASKED | {"previous_response_id": id}, key="mine")
        assert (got.status, got.json["id"] in b.kept) == (200, True)


def test_what_others_tell_and_makes_no_sense_is_ignored() -> None:
    responses, _ = noting(10)
    for content in (b"", b"\xc1", b"\x91\x95\x01\x02\x03\x04\x05", b"\x80"):
        responses.heard(content)
    assert not len(responses)


BACKGROUND: list[Any] = [True, 1, "true", "false", {}]


@pytest.mark.parametrize("size", [1, 400_000])
@pytest.mark.parametrize("stream", [False, True])
async def test_work_after_the_answer_is_refused_unless_it_is_allowed(start: Starter, stream: bool, size: int) -> None:
    async with Keeper() as a, start(pools=pools(a)) as live:
        bodies = [ASKED | {"background": value, "stream": stream, "padding": "x" * size} for value in BACKGROUND]
        written = json.dumps({"padding": ""} | bodies[0]).encode().replace(b'"background"', b'"b\\u0061ckground"')
        for body in (*bodies, written):
            got = await live.ask(RESPONSES, body)
            assert (got.status, got.error["param"]) == (400, "background")
            assert "limits.background" in got.error["message"]
        assert a.requests == []
        for value in (False, None):
            assert (await live.ask(RESPONSES, ASKED | {"background": value, "stream": stream})).status == 200
        assert (await live.ask(CHAT, chat(background=True))).status == 200, "no field of chat"


@pytest.mark.parametrize(
    ("fields", "most"), [({"max_output_tokens": 50}, 50), ({"max_output_tokens": None}, 4000), ({"stream": True}, 3)]
)
async def test_work_after_the_answer_is_charged_the_most_that_it_may_take(
    start: Starter, fields: dict[str, Any], most: int
) -> None:
    quota = {"tokens_per_day": most + 100}
    async with Keeper() as a, start(pools=pools(a), limits={"background": True}, quota=quota) as live:
        await respond(live, background=True, **fields)
        [line] = await live.lines(1)
        assert line["outcome"] == "completed"
        assert most <= line["tokens_out"] <= most + 100
        arrivals = live.engine.requests.lengths._everybody.arrivals
        assert len(arrivals) == (1 if fields.get("stream") else 0), "nothing is learned from what is not seen"
        assert live.holds_nothing()


@pytest.mark.parametrize("stream", [False, True])
async def test_who_leaves_work_that_goes_on_is_charged_the_most_that_it_may_take(start: Starter, stream: bool) -> None:
    async with Keeper() as a, start(pools=pools(a), limits={"background": True}) as live:
        a.goes_on.clear()
        body = ASKED | {"background": True, "stream": stream}
        if stream:
            async with live.post(RESPONSES, body) as response:
                await response.content.readline()
                response.close()
        else:
            asking = asyncio.ensure_future(live.ask(RESPONSES, body))
            await until(lambda: bool(a.kept))
            asking.cancel()
        [line] = await live.lines(1)
        assert (line["outcome"], line["tokens_out"]) == ("abandoned", 50)
        await until(live.holds_nothing)
        a.goes_on.set()


async def test_a_response_goes_on_without_a_model_beside_other_pools(start: Starter) -> None:
    async with Keeper() as a, Keeper() as b:
        two = [
            {"name": "p", "models": [MODEL], "backends": [{"name": "a", "url": a.url}]},
            {"name": "q", "models": ["other"], "backends": [{"name": "b", "url": b.url}]},
        ]
        tenants = [{"name": "t", "keys": [{"hash": hash_key("k"), "models": [MODEL]}]}]
        async with start(pools=two, tenants=tenants) as live:
            got = await live.ask(RESPONSES, ASKED)
            assert got.status == 200, got.body
            id = got.json["id"]
            for model in ({}, {"model": None}, {"model": ""}):
                body = {"input": "x", "previous_response_id": id} | model
                got = await live.ask(RESPONSES, body)
                assert got.status == 200, got.body
                assert a.requests[-1].json["model"] == MODEL
