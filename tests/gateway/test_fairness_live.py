"""Who goes next: by weight if all want more than there is, at once who wants little, and last what can wait."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from gateway.config.sections.keys import hash_key
from policies.request import of_batch
from tests.gateway.live import CHAT, Live, Starter, chat, simulated, until
from tests.gateway.load import tenants
from tests.kit.floods import ASKED, Flood, ratio_of


@pytest.mark.parametrize("stream", [False, True])
async def test_floods_are_served_by_weight(start: Starter, stream: bool) -> None:
    async with simulated() as sim, start(sim.url, tenants=tenants(one=1, three=3)) as live:
        one, three = (Flood.at(live, name, 20, stream=stream) for name in ("one", "three"))
        assert await ratio_of(three, one, more=480) == pytest.approx(3, rel=0.1)
        await asyncio.gather(one.end(), three.end())
        await until(lambda: live.holds_nothing() and sim.is_idle())


@pytest.mark.parametrize(("policy", "overtakes"), [("vtc", True), ("fcfs", False)])
async def test_a_light_tenant_overtakes_a_flood_unless_the_first_to_come_is_served_first(
    start: Starter, policy: str, overtakes: bool
) -> None:
    """Of the decisions, and with an engine that stands still until all wait: alike on a machine of any speed."""
    async with simulated() as sim, start(sim.url, tenants=tenants(heavy=1, light=1), policy=policy) as live:
        engine = live.engine
        sim.faults.is_still = True  # before the flood: no answer may let one of its requests arrive after the light one
        heavy = Flood.at(live, "heavy", 100)
        await until(lambda: engine.queued + engine.dispatched == 100)
        body = chat(max_tokens=2, ignore_eos=True)
        light = asyncio.ensure_future(live.ask(CHAT, body, key="key-of-light", x_request_id=ASKED))
        await until(lambda: engine.queued + engine.dispatched == 101)
        others, before = engine.queued - 1, len(engine.recent.of_client(ASKED))
        sim.faults.is_still = False
        assert (await light).status == 200
        await heavy.end()
        await until(live.holds_nothing)
        await until(sim.is_idle)
        decided = [engine.recent.last(request) for request in reversed(engine.recent.of_client(ASKED))]
        passed_by = [one.flow.tenant for one in decided if one is not None].index("light") - before
        assert others > 80
        assert passed_by <= 1 if overtakes else passed_by == others, "no more than a tie of counters"


# --- work that can wait ---

APPS = [{"name": "nightly", "class": "batch"}]
TENANTS: list[dict[str, Any]] = [
    {"name": "team", "keys": [
        {"hash": hash_key("key-of-team"), "apps": ["default", "nightly"]},
        {"hash": hash_key("key-of-night"), "class": "batch"},
    ]},
    {"name": "owner", "keys": [hash_key("key-of-owner")]},
]  # fmt: skip
LONG = {"max_tokens": 200, "ignore_eos": True}


def waits(live: Live) -> set[str]:
    """The leaves of what is queued and what runs."""
    requests = live.engine.requests
    running = [lease.request for lease in requests.leases.values()]
    return {request.flow.tenant for request in (*requests.waiting.requests.values(), *running)}


async def test_what_makes_a_request_class_batch(start: Starter) -> None:
    async with simulated() as sim, start(sim.url, tenants=TENANTS, apps=APPS) as live:
        for key, headers, body, leaf in [
            ("key-of-team", {}, {}, "team"),
            ("key-of-team", {"x_fairgate_app": "nightly"}, {}, of_batch("team")),
            ("key-of-night", {}, {}, of_batch("team")),
            ("key-of-night", {"x_fairgate_class": "interactive"}, {"service_tier": "priority"}, of_batch("team")),
            ("key-of-owner", {"x_fairgate_class": "batch"}, {}, of_batch("owner")),
            ("key-of-owner", {}, {"service_tier": "flex"}, of_batch("owner")),
            ("key-of-owner", {}, {"service_tier": "auto"}, "owner"),
        ]:
            sim.faults.is_still = True
            asked = asyncio.ensure_future(live.ask(CHAT, chat(max_tokens=4, **body), key=key, **headers))
            await until(lambda leaf=leaf: waits(live) == {leaf})  # type: ignore[misc]
            sim.faults.is_still = False
            assert (await asked).status == 200, key


async def test_other_work_gets_the_room_and_nothing_is_lost_or_charged_twice(start: Starter) -> None:
    async with simulated() as sim, start(sim.url, tenants=TENANTS, apps=APPS) as live:
        live.watch_charges()
        sim.faults.is_still = True
        night = [asyncio.ensure_future(live.ask(CHAT, chat(f"n{n}", **LONG), key="key-of-night")) for n in range(40)]
        await until(lambda: live.engine.queued > 0 and live.engine.queued + live.engine.dispatched == 40)
        owner = asyncio.ensure_future(live.ask(CHAT, chat("o", max_tokens=3, ignore_eos=True), key="key-of-owner"))
        await until(lambda: "owner" in {each.request.flow.tenant for each in live.engine.requests.leases.values()})
        preemption = live.engine.requests.preemption
        assert preemption.preempted == 1, "one for the dispatch, since no batch request waits inside the engine"
        sim.faults.is_still = False
        assert (await owner).status == 200
        answers = await asyncio.gather(*night)
        assert [answer.status for answer in answers] == [200] * 40
        assert all(answer.json["usage"]["completion_tokens"] == 200 for answer in answers)
        await until(live.holds_nothing)
        charged = [service.output for service in live.charged.values()]
        assert sorted(charged) == [3, *[200] * 40]
        await until(sim.is_idle)
