"""Two who want more than there is get it by weight, and one who wants little gets it at once."""

from __future__ import annotations

import asyncio

import pytest

from tests.gateway.live import Starter, chat, simulated, until
from tests.gateway.load import tenants
from tests.kit.floods import ASKED, Flood, ratio_of


@pytest.mark.parametrize("stream", [False, True])
async def test_floods_are_served_by_weight(start: Starter, stream: bool) -> None:
    async with simulated() as sim, start(sim.url, tenants=tenants(one=1, three=3)) as live:
        one, three = (Flood.at(live, name, 20, stream=stream) for name in ("one", "three"))
        assert await ratio_of(three, one, warm=50, more=480) == pytest.approx(3, rel=0.1)
        await asyncio.gather(one.end(), three.end())
        await until(lambda: live.holds_nothing() and sim.is_idle())


async def test_fifty_users_of_one_tenant_have_one_tenant_s_share(start: Starter) -> None:
    async with simulated() as sim, start(sim.url, tenants=tenants(many=1, single=1)) as live:
        many, single = Flood.at(live, "many", 50, users=50), Flood.at(live, "single", 20)
        assert await ratio_of(many, single, warm=50, more=400) == pytest.approx(1, rel=0.1)
        await asyncio.gather(many.end(), single.end())


async def _dispatched_before_the_light_one(start: Starter, policy: str) -> tuple[int, int]:
    """(flood requests that wait beside a light one, how many of them are dispatched before the light one).

    Of the decisions, and with an engine that stands still until all wait: the same on a machine of any speed.
    """
    async with simulated() as sim, start(sim.url, tenants=tenants(heavy=1, light=1), policy=policy) as live:
        engine = live.engine
        sim.faults.is_still = True  # before the flood: no answer may let one of its requests arrive after the light one
        heavy = Flood.at(live, "heavy", 100)
        await until(lambda: engine.queued + engine.dispatched == 100)
        body = chat(max_tokens=2, ignore_eos=True)
        light = asyncio.ensure_future(live.ask("/v1/chat/completions", body, key="key-of-light", x_request_id=ASKED))
        await until(lambda: engine.queued + engine.dispatched == 101)
        others, before = engine.queued - 1, len(engine.recent.of_client(ASKED))
        sim.faults.is_still = False
        assert (await light).status == 200
        await heavy.end()
        await until(live.holds_nothing)
        await until(sim.is_idle)
        decided = [engine.recent.last(request) for request in reversed(engine.recent.of_client(ASKED))]
        tenants_in_order = [one.flow.tenant for one in decided if one is not None]
        return others, tenants_in_order.index("light") - before


async def test_a_light_tenant_overtakes_a_flood_unless_the_first_to_come_is_served_first(start: Starter) -> None:
    queued, passed_by = await _dispatched_before_the_light_one(start, "vtc")
    assert queued > 80
    assert passed_by <= 1, "no more than a tie of counters"
    queued, passed_by = await _dispatched_before_the_light_one(start, "fcfs")
    assert passed_by == queued > 80
