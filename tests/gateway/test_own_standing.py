"""Each team sees its own: what /fairgate/me shows a tenant's key, and that it shows nothing of others."""

from __future__ import annotations

import asyncio
from typing import Any

from gateway.config.sections.keys import hash_key
from tests.gateway.live import Starter, chat, simulated, until

GROUPS = [{"name": "research", "guaranteed_share": 0.3, "max_running": 40}, {"name": "nlp", "group": "research"}]
TENANTS: list[dict[str, Any]] = [
    {"name": "alice", "group": "nlp", "keys": [hash_key("key-of-alice")], "quota": {"requests_per_minute": 100}},
    {"name": "mallory", "weight": 2, "keys": [hash_key("key-of-mallory")]},
]


async def test_a_tenant_sees_its_place_its_limits_and_its_requests_and_nothing_of_others(start: Starter) -> None:
    async with simulated() as sim, start(sim.url, tenants=TENANTS, groups=GROUPS) as live:
        sim.faults.is_still = True
        asked = [
            asyncio.ensure_future(live.ask("/v1/chat/completions", chat(f"{key}{n}", max_tokens=4), key=key))
            for n in range(8)
            for key in ("key-of-alice", "key-of-mallory", "key-of-mallory")
        ]
        asked.append(
            asyncio.ensure_future(
                live.ask("/v1/chat/completions", chat("b", max_tokens=4, service_tier="flex"), key="key-of-alice")
            )
        )
        await until(lambda: live.engine.queued + live.engine.dispatched == 25)
        got = await live.get("/fairgate/me", key="key-of-alice")
        assert got.status == 200
        assert b"mallory" not in got.body
        me = got.json
        assert [place["name"] for place in me["place"]] == ["research", "nlp", "alice"]
        assert me["place"][0]["guaranteed_share"] == 0.3
        assert me["limits"][0]["limit"] == 100
        assert me["limits"][0]["remaining"] == 91
        [pool] = me["pools"]
        own, batch = pool["interactive"], pool["batch"]
        assert own["queued_requests"] + own["running_requests"] == 8
        assert batch["queued_requests"] + batch["running_requests"] == 1
        assert own["share"] == 0.3333
        assert len(pool["requests"]) == 9
        assert {request["state"] for request in pool["requests"]} <= {"queued", "dispatched"}
        other = (await live.get("/fairgate/me", key="key-of-mallory")).json
        assert (other["place"], other["limits"]) == ([{"name": "mallory", "weight": 2.0}], [])
        sim.faults.is_still = False
        assert {answer.status for answer in await asyncio.gather(*asked)} == {200}


async def test_only_a_key_that_is_known_sees_anything(start: Starter) -> None:
    async with simulated() as sim, start(sim.url, tenants=TENANTS, groups=GROUPS) as live:
        assert (await live.get("/fairgate/me", key="key-of-nobody")).status == 401
        assert (await live.get("/fairgate/me", key=None)).status == 401
        assert (await live.ask("/fairgate/me", {}, key="key-of-alice")).status == 405
        assert (await live.get("/fairgate/you", key="key-of-alice")).status == 404
