"""The working set meets class batch, large starts and single questions."""

from __future__ import annotations

import pytest

from policies.queue.bounds import QueueLimits
from policies.request import NO_CLAIM, Claim, is_batch
from tests.policies.meetings.world import World, quantile


def finished(batch: str) -> tuple[int, float]:
    """Calls of agents that fill the set, and the part of the set that batch beside them holds."""
    world = World("fairserve", {"e": (64, 120_000)}, prefill_per_s=6000.0)
    world.agents("ia", 24, context=8_000, grow=400, calls=12, output=60)
    if batch == "agents":
        world.agents("ib", 24, context=8_000, grow=400, calls=12, output=60, batch=True, start_s=1.0)
    elif batch == "single":
        world.closed("ib", 40, 8_000, 400, batch=True, start_s=1.0)
    held = [0, 0]
    for look in range(20, 200, 2):
        world.run(look)
        tenants = world.engine.working_set.tenants()
        held[0] += sum(tokens for name, tokens in tenants.items() if is_batch(name))
        held[1] += sum(tenants.values())
    return len([one for one in world.of("ia", 20.0) if one.outcome]), held[0] / held[1]


def test_batch_has_its_part_of_the_set_beside_agents_that_fill_it() -> None:
    alone, _ = finished("")
    for batch in ("agents", "single"):
        beside, part = finished(batch)
        assert beside > 0.9 * alone
        assert part < 0.08


@pytest.mark.parametrize("tokens", [45_000, 60_000])
def test_a_start_beyond_the_part_of_its_tenant_enters_in_time_and_stops_no_question(tokens: int) -> None:
    world = World("fairserve", {"e": (64, 120_000)}, prefill_per_s=6000.0, limits=QueueLimits())
    world.agents("agents", 12, context=9_000, calls=150, output=40)
    world.closed("chat", 4, 500, 100, think_s=0.5)
    for number in range(2):
        world.send("big", tokens, 50, 60.0 + 130.0 * number, claim=Claim(f"big{number}", explicit=True))
    world.run(260)
    assert quantile(world.waits("chat", 60.0), 0.95) < 1.0
    assert set(world.outcomes("chat")) == {"completed", ""}
    assert max(world.waits("big")) < 25.0, "K / R is 20 s"
    assert world.outcomes("big") == {"completed": 2}


@pytest.mark.parametrize(("app", "is_claimed"), [("", True), ("chat", True), ("", False)])
def test_questions_of_the_tenant_whose_agents_fill_the_set_do_not_wait_for_it(app: str, is_claimed: bool) -> None:
    """Most deployments have one key and name no apps, so agents and questions are one app."""
    world = World("fairserve", {"e": (64, 120_000)}, prefill_per_s=6000.0, limits=QueueLimits())
    world.agents("team", 24, context=8_000, grow=400, calls=12, output=60)
    for number in range(60):
        claim = Claim(f"q{number}", begins=True) if is_claimed else NO_CLAIM
        world.send("team", 300, 80, 20.0 + 5 * number, app=app, claim=claim)
    world.run(350)
    asked = [one for one in world.of("team") if one.request.prompt_tokens == 300]
    assert {one.outcome for one in asked} == {"completed"}
    assert quantile([one.waited_s(world.now) for one in asked], 0.95) < 3.0


def test_questions_beside_agents_of_another_tenant_do_not_wait_behind_the_agents_of_their_own() -> None:
    """They go one after the other while their tenant is ahead, and all of them when it no longer is."""
    world = World("fairserve", {"e": (64, 120_000)}, prefill_per_s=6000.0, limits=QueueLimits())
    for tenant in ("team", "others"):
        world.agents(tenant, 24, context=8_000, grow=400, calls=12, output=60)
    for number in range(60):
        world.send("team", 300, 80, 20.0 + 5 * number, app="chat", claim=Claim(f"q{number}", begins=True))
    world.run(450)
    asked = [one for one in world.of("team") if one.request.prompt_tokens == 300]
    assert {one.outcome for one in asked} == {"completed"}
    assert quantile([one.waited_s(world.now) for one in asked], 0.95) < 60.0, "K / R is 20 s"


def test_a_fresh_pool_refuses_no_start_for_a_wait_that_it_can_only_guess() -> None:
    """All interactions begin at once, so the first turn takes as long as an interaction, and the others a fraction."""
    world = World("fairserve", {"e": (128, 64_000)}, prefill_per_s=100_000.0, limits=QueueLimits())
    world.agents("agents", 60, context=2_000, grow=150, calls=7, output=30, pause_s=0.3)
    world.run(120)
    assert world.outcomes("agents").keys() == {"completed", ""}
