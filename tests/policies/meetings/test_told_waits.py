"""The wait that is told meets ceilings, several queues, users of one tenant, class batch, and starts that sleep."""

from __future__ import annotations

import pytest

from policies.admission.decisions import Failure
from policies.queue.bounds import QueueLimits
from policies.request import WAIT_S_MAX
from policies.tree.terms import ROOT
from tests.policies.making import make_request, pool_of, told_wait
from tests.policies.meetings.world import World, part_right, told_and_true, tree


def right(world: World, tenant: str, since_s: float) -> float:
    return part_right(told_and_true(world, tenant, since_s))


@pytest.mark.parametrize("terms", [{"max_running": 2}, {"max_share": 0.125}], ids=str)
def test_at_the_ceiling_of_a_group_waits_are_told_by_the_pace_of_the_group(terms: dict[str, float]) -> None:
    world = World(tree=tree({"g": (ROOT, terms)}, {"a": ("g", {}), "b": ("g", {}), "x": (ROOT, {})}))
    for tenant, clients, output in (("a", 5, 100), ("b", 5, 100), ("x", 20, 200)):
        world.closed(tenant, clients, 300, output)
    world.run(120)
    assert min(right(world, tenant, 40.0) for tenant in ("a", "b")) >= 0.9
    assert right(world, "x", 40.0) >= 0.9


def test_at_the_ceiling_of_a_group_batch_is_told_that_other_work_goes_first() -> None:
    world = World("vtc", tree=tree({"g": (ROOT, {"max_running": 2})}, {"a": ("g", {})}))
    world.closed("a", 10, 300, 100)
    world.run(60)
    for at_s in (60.0, 60.1):
        world.send("a", 300, 100, at_s, batch=at_s == 60.0)
    world.run(60.2)
    [batch], [*others] = world.of("a", 60.0, batch=True), world.of("a", 60.0)
    assert told_wait(batch.request).wait_s > 0.75 * told_wait(others[-1].request).wait_s, "ten of them wait"


def test_with_a_queue_for_each_engine_waits_are_those_of_one_queue() -> None:
    world = World("vtc", {f"e{number}": (6, 120_000) for number in range(4)}, placement="deficits")
    for number in range(8):
        world.closed(f"t{number}", 10, 300, 100)
    world.run(70)
    assert min(right(world, f"t{number}", 30.0) for number in range(8)) >= 0.8


def test_the_other_users_of_a_tenant_go_before() -> None:
    world = World()
    for number in range(20):
        world.closed("a", 4, 300, 100, user=f"u{number}")
    world.run(70)
    assert right(world, "a", 30.0) >= 0.95


def test_no_time_to_come_back_is_beyond_an_hour_whatever_an_engine_says() -> None:
    engine = pool_of("e", slots=1, limits=QueueLimits(attempts_max=1))
    engine.arrived(request := make_request("a"), 0.0)
    rejected = engine.failed(request.id, Failure.REFUSED, 1.0, again_s=1e6)[0]
    assert rejected.retry_after_s == WAIT_S_MAX == 3600.0


def told(*, asks: bool) -> list[float]:
    world = World("vtc")

    def ask() -> None:
        for id in [*world.asked]:
            world.engine.explain(id, world.now)
        world.at(world.now + 0.3, ask)

    if asks:
        world.at(1.0, ask)
    for number in range(36):
        world.closed("ab"[number % 2], 2, 100 + 37 * number, 20 + 13 * number, user=f"u{number}")
    world.run(15)
    return [one.request.progress.wait.expected.wait_s for one in world.asked.values() if one.request.progress.wait]


def test_a_question_changes_no_wait_that_is_told_later() -> None:
    assert told(asks=True) == told(asks=False)
