"""Mechanisms that meet: each of them holds where another one is at work."""

from __future__ import annotations

import asyncio
from typing import Any

from gateway.config.sections.keys import hash_key
from tests.gateway.capture import Peer, answer
from tests.gateway.live import MODEL, Starter, until
from tests.kit.keeper import ASKED, RESPONSES, Keeper, pools, respond


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


async def test_a_response_whose_engine_wants_it_later_holds_up_nobody(start: Starter) -> None:
    class Busy(Keeper):
        async def _create(self, asked: dict[str, Any], peer: Peer) -> None:
            if asked.get("previous_response_id"):
                await peer.send(answer(b'{"error":{"message":"later"}}', b"Retry-After: 30", status=b"429 Too Many"))
            else:
                await super()._create(asked, peer)

    async with Busy() as a, Keeper() as b, start(pools=pools(a, b), policy="vtc") as live:
        id = await respond(live, "a")
        waits = asyncio.create_task(live.ask(RESPONSES, ASKED | {"previous_response_id": id}))
        await until(lambda: len(a.requests) == 2 and live.engine.queued == 1)
        pool = live.gateway.pools[0]
        pool.drain(pool.backends["b"], True)
        assert (await live.ask(RESPONSES, ASKED)).status == 200
        assert (len(a.requests), live.engine.queued) == (3, 1), "its engine answers others"
        waits.cancel()
