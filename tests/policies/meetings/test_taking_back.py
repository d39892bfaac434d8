"""Work that can wait makes room for other work: at ceilings, at queues of engines, and for large requests."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from policies.admission.decisions import Decision, Dispatch, Failure, Preempt
from policies.admission.engine import AdmissionEngine
from policies.admission.named import named_policy
from policies.request import ServiceTokens, of_batch
from policies.tree.terms import ROOT
from tests.policies.making import dispatched, make_request, pool_of
from tests.policies.meetings.world import LONG, World, quantile, tree

KEPT = (ROOT, {"guaranteed_share": 0.75, "lending_limit": 0.0})


@pytest.mark.parametrize(
    ("slots", "terms"),
    [
        (4, {"a": (ROOT, {})}),
        (16, {"a": (ROOT, {"max_running": 4})}),
        (16, {"a": (ROOT, {"max_share": 0.25})}),
        (16, {"a": (ROOT, {}), "keeps": KEPT}),
    ],
    ids=["the pool", "max_running", "max_share", "what others do not lend"],
)
def test_a_ceiling_full_of_its_own_batch_lets_other_work_go(
    slots: int, terms: dict[str, tuple[str, dict[str, float]]]
) -> None:
    world = World("fairserve", {"e": (slots, 120_000)}, tree=tree({}, terms))
    for _ in range(60):
        world.send("a", 300, 3000, 0.5, batch=True)
    for visit in range(40):
        world.send("a", 100, 20, 2.0 + 5 * visit)
    world.run(205)
    assert max(world.waits("a")) < 0.1, "the fortieth visit no more than the first"
    preemption = world.engine.requests.preemption
    assert preemption.wasted_tokens < 0.05 * preemption.received_tokens + preemption.at_once_tokens
    done = len([one for one in world.of("a", batch=True) if one.outcome])
    assert done >= 9, "of 12 that four slots have time for: three go on"


@pytest.mark.parametrize(("engines", "done"), [(1, 6), (2, 12)])
def test_what_is_kept_free_of_batch_is_no_more_than_what_was_preempted(engines: int, done: int) -> None:
    """Four prompts as large as these are all that may be wasted. Three go on, and at each engine."""
    world = World("vtc", {f"e{number}": (4, 120_000) for number in range(engines)})
    for _ in range(60):
        world.send("b", 6000, 3000, 0.5, batch=True)
    for visit in range(30 * engines):
        world.send("a", 100, 50, 2.0 + 4 * visit / engines)
    world.run(125)
    assert len([one for one in world.of("b", batch=True) if one.outcome]) >= done
    assert max(world.waits("a")) < 0.1


def test_a_ceiling_full_of_batch_lets_other_work_go_beside_a_flood_of_others() -> None:
    world = World("fairserve", {"e": (16, 120_000)}, tree=tree({"g": (ROOT, {"max_running": 4})}, {"a": ("g", {})}))
    for _ in range(20):
        world.send("a", 300, 3000, 0.5, batch=True)
    world.closed("x", 40, 300, 100, start_s=1.0)
    world.send("a", 100, 20, 5.0)
    world.run(20)
    assert max(world.waits("a")) < 3.0, "its turn comes, and the flood has no request that can wait"


@pytest.mark.parametrize("placement", ["least_loaded", "deficits"])
def test_batch_makes_room_at_each_engine(placement: str) -> None:
    world = World("vtc", {f"e{number}": (4, 60_000) for number in range(3)}, placement=placement)
    for number in range(60):
        world.send("b", 300, 3000, 0.1 + number * 0.01, batch=True)
    for visit in range(5):  # as often as the bound of waste allows, with 12 that run at once
        for number in range(3):
            world.send("a", 100, 20, 5.0 + 3 * visit + 0.001 * number)
    world.run(30)
    assert max(world.waits("a")) < 0.1


@pytest.mark.parametrize("engines", [1, 2])
def test_for_a_large_request_batch_is_stopped_where_that_is_room_enough_and_only_there(engines: int) -> None:
    world = World("vtc", {f"e{number}": (32, 60_000) for number in range(engines)})
    for number in range(5 if engines == 2 else 0):  # answers of 100 seconds, at one engine
        world.send("long", 9_500, 5_000, 0.05 + number * 0.001)
    world.run(0.2)
    for number in range(60):
        world.send("b", 2_300, 3_000, 0.5 + number * 0.01, batch=True)
    world.send("big", 30_000, 50, 10.0)
    world.send("huge", 50_000, 50, 15.0)
    world.run(30)
    [big] = world.of("big")
    assert big.waited_s(world.now) < 1.0
    preempted = [one for one in world.of("b", batch=True) if one.preempted]
    assert preempted
    assert world.engine.requests.preemption.preempted < 30, "none is stopped for what would not fit all the same"


def test_while_a_large_request_waits_for_its_engine_batch_makes_room_for_others_at_the_other_one() -> None:
    world = World("vtc", {"e0": (32, 60_000), "e1": (32, 60_000)})
    for number in range(5):  # answers of 100 seconds, at both
        world.send("long", 9_500, 5_000, 0.05 + number * 0.001)
    for number in range(60):
        world.send("b", 2_300, 3_000, 0.5 + number * 0.01, batch=True)
    world.send("big", 40_000, 50, 10.0)
    for number in range(100):
        world.send("small", 300, 50, 1.0 + 0.5 * number)
    world.run(55)
    assert min(world.waits("big")) > 40.0, "it fits beside no long answers"
    assert max(world.waits("small")) < 2.0


def of_group(policy: str, running_max: int) -> AdmissionEngine:
    terms = tree({"g": (ROOT, {"max_running": running_max})}, {"a": ("g", {})})
    return pool_of("e", policy=policy, slots=16, limits=LONG, tree=terms)


def test_room_that_batch_makes_piece_by_piece_at_a_ceiling_is_not_taken_by_batch() -> None:
    engine = of_group("vtc", 4)
    for number in range(4):
        engine.arrived(make_request(of_batch("a"), id=f"b{number}", streamed=False), 0.0)
    [first] = engine.arrived(make_request("a", id="wide", sequences=2), 1.0)
    [second] = engine.failed(first.id, Failure.PREEMPTED, 1.0)
    assert isinstance(second, Preempt), "another one, and none starts in its place"
    assert engine.failed(second.id, Failure.PREEMPTED, 1.0) == [Dispatch("wide", "e")]


def test_batch_is_not_stopped_at_a_ceiling_for_what_would_not_fit_all_the_same() -> None:
    engine = of_group("vtc", 8)
    engine.arrived(make_request("a", id="runs", sequences=4), 0.0)
    assert engine.arrived(make_request("a", id="wide", sequences=5), 1.0) == []
    for id in ("b0", "b1", "b2"):
        batch = make_request(of_batch("a"), id=id, streamed=False)
        assert engine.arrived(batch, 2.0) == [Dispatch(id, "e")], "and no preemption after that"
    assert engine.finished("runs", ServiceTokens(10, 10), 3.0) == [Dispatch("wide", "e")]


def test_batch_at_a_ceiling_runs_on_until_the_engine_can_start_what_waits_there() -> None:
    engine = of_group("dlpm", 3)
    engine.arrived(make_request("a", id="runs"), 0.0)
    engine.progressed("runs", 0, 0.1)
    engine.arrived(make_request("x", id="prefill", prompt=1_000), 0.2)
    assert engine.arrived(make_request("a", id="large", prompt=50_000), 1.0) == []
    for id in ("b0", "b1"):
        batch = make_request(of_batch("a"), id=id, streamed=False)
        assert engine.arrived(batch, 2.0) == [Dispatch(id, "e")], "no preemption yet for a prompt that cannot begin"
    [preempted] = engine.progressed("prefill", 0, 3.0)
    assert isinstance(preempted, Preempt)
    assert engine.failed(preempted.id, Failure.PREEMPTED, 3.0) == [Dispatch("large", "e")]


def batch_of(engine: AdmissionEngine, id: str, *, streamed: bool = False) -> Sequence[Decision]:
    return engine.arrived(make_request(of_batch("a"), id=id, streamed=streamed), 0.0)


def test_batch_goes_beside_a_request_that_its_end_would_not_let_in() -> None:
    engine = of_group("vtc", 4)
    for id in ("r0", "r1", "r2", "r3"):
        engine.arrived(make_request("a", id=id), 0.0)
    assert engine.arrived(make_request("a", id="wide", sequences=2), 0.0) == []
    assert batch_of(engine, "b") == []
    assert engine.finished("r0", ServiceTokens(10, 10), 1.0) == [Dispatch("b", "e")], "which is woken by itself"


def test_batch_goes_beside_an_answer_that_is_not_stopped() -> None:
    engine = of_group("vtc", 2)
    batch_of(engine, "seen", streamed=True)
    engine.progressed("seen", 1, 0.5)
    assert engine.arrived(make_request("a", id="wide", sequences=2), 1.0) == []
    assert batch_of(engine, "b") == [Dispatch("b", "e")]


def test_batch_goes_while_the_engine_cannot_start_what_waits_at_the_ceiling() -> None:
    engine = of_group("dlpm", 2)
    batch_of(engine, "b0")
    engine.arrived(make_request("x", id="prefill", prompt=1_000), 0.0)
    assert engine.arrived(make_request("a", id="large", prompt=50_000, sequences=2), 1.0) == []
    assert batch_of(engine, "b1") == [Dispatch("b1", "e")]


def test_no_batch_takes_the_room_of_one_that_is_being_stopped() -> None:
    engine = of_group("vtc", 2)
    engine.arrived(make_request(of_batch("x"), id="x", streamed=False), 0.0)
    for id in ("b0", "b1", "b2"):
        batch_of(engine, id)
    [preempted] = engine.arrived(make_request("a", id="wide", sequences=2), 1.0)
    [other] = {"b0", "b1"} - {preempted.id}
    assert engine.finished(other, ServiceTokens(10, 10), 2.0) == []
    assert engine.failed(preempted.id, Failure.PREEMPTED, 3.0) == [Dispatch("wide", "e")]


def with_three_queues() -> AdmissionEngine:
    """A group runs two batch requests, which are all that it may, at engines with a queue each."""
    terms = tree({"g": (ROOT, {"max_running": 2})}, {"a": ("g", {})})
    policy = named_policy("vtc", placement="deficits")
    engine = pool_of("e0", "e1", "e2", policy=policy, slots=16, limits=LONG, tree=terms)
    engine.arrived(make_request(of_batch("x"), id="x", streamed=False), 0.0)
    for id in ("b0", "b1", "b2", "b3"):
        batch_of(engine, id)
    return engine


def test_batch_of_the_queue_of_another_engine_takes_no_room_that_is_made_at_a_ceiling() -> None:
    engine = with_three_queues()
    [first] = engine.arrived(make_request("a", id="wide", sequences=2), 1.0)
    [second] = engine.failed(first.id, Failure.PREEMPTED, 1.0)
    assert dispatched(engine.failed(second.id, Failure.PREEMPTED, 1.0)) == ["wide"]


def test_with_a_queue_for_each_engine_one_request_is_stopped_for_one() -> None:
    assert len(with_three_queues().arrived(make_request("a"), 1.0)) == 1


def with_batch(slots: int, runs: int) -> AdmissionEngine:
    """Two batch requests run, and as many of tenant a."""
    engine = pool_of("e", policy="vtc", slots=slots, limits=LONG)
    for id in ("b0", "b1"):
        engine.arrived(make_request(of_batch("b"), id=id, streamed=False), 0.0)
    for number in range(runs):
        engine.arrived(make_request("a", id=f"r{number}"), 0.0)
        engine.progressed(f"r{number}", 0, 0.0)
    return engine


def test_batch_at_a_full_engine_runs_on_until_the_prompts_of_others_are_processed() -> None:
    engine = with_batch(4, 1)
    engine.arrived(make_request("x", id="prefill", prompt=1_000), 0.0)
    assert engine.arrived(make_request("a", id="large", prompt=50_000), 1.0) == []
    assert isinstance(engine.progressed("prefill", 0, 2.0)[0], Preempt)


def test_batch_at_a_full_engine_runs_on_if_its_slots_are_too_few() -> None:
    engine = with_batch(20, 18)
    assert engine.arrived(make_request("a", id="wide", sequences=20), 1.0) == [], "which takes three"
    assert isinstance(engine.finished("r0", ServiceTokens(10, 10), 2.0)[0], Preempt)


def test_batch_that_is_owed_its_turn_is_not_stopped_for_what_goes_after_it() -> None:
    engine = with_batch(3, 1)
    backlog = engine.policy.order.backlog
    assert backlog is not None
    backlog.owed = 1.0
    assert engine.arrived(make_request("a", id="first"), 1.0) == []
    backlog.owed = 0.0
    assert isinstance(engine.woke(2.0)[0], Preempt)


def light_waits(prompt: int) -> list[float]:
    """How long single questions wait beside a flood, and beside class batch with prompts of this size; 0: none."""
    world = World("vtc", {"e": (32, 120_000)})
    world.closed("a", 60, 3_000, 200)
    for number in range(90):
        world.send("light", 200, 40, 20.0 + 2 * number)
    if prompt:
        world.closed("b", 4, prompt, 200, batch=True, start_s=5.0)
    world.run(200)
    assert world.part("b", batch=True) == pytest.approx(0.05 if prompt else 0.0, abs=0.02)
    return world.waits("light")


@pytest.mark.slow
def test_a_batch_prompt_of_half_of_the_cache_that_is_owed_delays_few_others_and_none_by_a_whole_answer() -> None:
    waits = light_waits(60_000)
    assert quantile(waits, 0.95) < 0.7
    assert max(waits) - max(light_waits(0)) < 4.0, "the KV cache drains for it, and answers take four seconds"
