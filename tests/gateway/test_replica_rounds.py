"""Tenants that flood at different gateways, drain, pause and flood again are served by weight in every round."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from tests.gateway.live import Starter, simulated, until
from tests.gateway.load import tenants
from tests.kit.floods import ENGINE, Flood, answered
from tests.redis_server import RedisServer

WARM_ANSWERS = 80
MEASURED_ANSWERS = 300
ALONE_ANSWERS = 80
"""How many one tenant is served alone, when the other one has gone."""


@pytest.mark.parametrize(
    ("policy", "stays", "kills"),
    [("fairserve", "light", False), ("vtc", "light", True)],
    ids=["fairserve", "vtc-redis-lost-all"],
)
async def test_no_round_pays_for_the_one_before(start: Starter, policy: str, stays: str, kills: bool) -> None:
    fields = {"tenants": tenants(light=1, heavy=4), "policy": policy}
    async with (
        RedisServer() as redis,
        simulated(ENGINE) as sim,
        start(sim.url, state=redis.url, **fields) as first,
        start(sim.url, state=redis.url, **fields) as second,
    ):
        lives = {"light": first, "heavy": second}
        ratios = []
        for round_number in range(2):
            floods = {name: Flood(live, name, 24) for name, live in lives.items()}
            ratios.append(await measured(floods["heavy"], floods["light"]))
            goes = "heavy" if stays == "light" else "light"
            await floods[goes].end()
            await answered(floods[stays], more=ALONE_ANSWERS)
            await floods[stays].end()
            await until(lambda: first.holds_nothing() and second.holds_nothing() and sim.is_idle())
            if kills and round_number == 0:
                await redis.command("FLUSHALL")
        assert ratios == pytest.approx([4.0] * 2, rel=0.3), "57 where idling banks credit"


async def measured(heavy: Flood, light: Flood) -> float:
    """What one receives over what the other does, once both are under way."""
    await answered(heavy, light, more=WARM_ANSWERS)
    before: Sequence[int] = heavy.service, light.service
    await answered(heavy, light, more=MEASURED_ANSWERS)
    return (heavy.service - before[0]) / max(1, light.service - before[1])
