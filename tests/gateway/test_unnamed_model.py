"""A request that names no model is one for the model that answers it: in limits, usage, prices, the log and metrics."""

from __future__ import annotations

from typing import Any

import pytest

from gateway.config.sections.keys import hash_key
from tests.gateway.capture import Upstream, replies
from tests.gateway.live import MODEL, Starter, chat, simulated
from tests.kit.usage import CHAT, OK

BODIES: dict[str, dict[str, Any]] = {
    CHAT: chat(max_tokens=2),
    "/v1/responses": {"input": "x"},
    "/v1/messages": chat(max_tokens=2),
    "/v1/embeddings": {"input": "x"},
    "/rerank": {"query": "x", "documents": ["y"]},
}
UNNAMED: dict[str, dict[str, Any]] = {"left out": {}, "null": {"model": None}, "empty": {"model": ""}}


def without(body: dict[str, Any], how: str, size: int = 1) -> dict[str, Any]:
    return {name: value for name, value in body.items() if name != "model"} | UNNAMED[how] | {"padding": "x" * size}


@pytest.mark.parametrize("path", BODIES)
async def test_the_model_that_answers_is_written_in(start: Starter, path: str) -> None:
    bodies = [without(BODIES[path], how, size) for how in UNNAMED for size in (1, 400_000)]
    async with Upstream(replies(OK)) as upstream, start(upstream.url) as live:
        for body in bodies:
            assert (await live.ask(path, body)).status == 200
        assert [seen.json for seen in upstream.requests] == [body | {"model": MODEL} for body in bodies]
        assert {line["model"] for line in await live.lines(len(bodies))} == {MODEL}


async def test_limits_of_a_model_and_its_price_hold_for_what_names_none(start: Starter) -> None:
    usage = {"url": str(start.directory / "usage.db"), "prices": {MODEL: {"input": 1e6, "output": 0}}}
    quota = {"per_model": {MODEL: {"requests_per_minute": len(UNNAMED)}}}
    tenants = [{"name": "t", "keys": [hash_key("k")], "quota": quota}]
    async with Upstream(replies(OK)) as upstream, start(upstream.url, tenants=tenants, usage=usage) as live:
        for how in UNNAMED:
            assert (await live.ask(CHAT, without(chat(), how))).status == 200
        for body in (*[without(chat(), how) for how in UNNAMED], chat()):
            assert (await live.ask(CHAT, body)).error["code"] == "rate_limited"
        counted = [row for row in await live.metrics() if row[0] == "fairgate_requests_total"]
        assert counted
        assert all(MODEL in row for row in counted)
        assert live.gateway.usage is not None
        await live.gateway.usage.flush()
        [row] = (await live.get("/usage?since=1h&by=model", admin=True)).json["rows"]
        assert (row["model"], row["cost"], row["unpriced_tokens"]) == (MODEL, 7.0 * len(UNNAMED), 0)


async def test_the_model_is_the_engines_own_and_no_adapter(start: Starter) -> None:
    async with simulated(models=("lora", "base"), adapters=("lora",)) as sim, start(sim.url) as live:
        assert (await live.ask(CHAT, without(chat(max_tokens=2), "left out"))).json["model"] == "base"
        pools = [{"name": "p", "models": ["base"], "backends": [{"url": sim.url}]}]
        async with start(pools=pools) as other:
            assert (await other.ask(CHAT, without(chat(max_tokens=2), "null"))).json["model"] == "base"
            pool = other.gateway.pools[0]
            pool.backends[next(iter(pool.backends))].models.clear()
            assert (await other.ask(CHAT, without(chat(max_tokens=2), "empty"))).json["model"] == "base"
        pool = live.gateway.pools[0]
        pool.backends[next(iter(pool.backends))].models.clear()
        got = await live.ask(CHAT, without(chat(), "left out"))
        assert (got.status, got.error["code"]) == (503, "no_backend"), "nobody knows yet whose request it is"
