"""Requests wait for the start of an engine, are told how long, and go in order, as many as the engine takes."""

from __future__ import annotations

import json

import pytest

from policies.admission.engine import AdmissionEngine
from policies.admission.takeover import adopt, read, snapshot, stranded
from policies.orders.policy_entries import POLICIES
from policies.queue.bounds import QueueLimits
from policies.queue.cold_start import ColdStartEstimator
from policies.request import Flow, RejectReason, Request, ServiceTokens
from tests.policies.making import dispatched, make_request, pool_of, rejected, told_wait
from tests.policies.meetings.world import World, part_right, told_and_true

LIMITS = QueueLimits(queue_wait_s_max=120.0, queue_wait_s_max_inside=120.0)
START_S_MAX = 600.0
SLOTS = 6


def engine_of(policy: str = "fairserve", s_max: float = START_S_MAX) -> AdmissionEngine:
    """A pool whose only engine has not started."""
    engine = pool_of("one", policy=policy, slots=SLOTS, healthy=False, limits=LIMITS)
    engine.requests.cold_start.s_max = s_max
    return engine


def told_s(engine: AdmissionEngine, now: float) -> float:
    request = make_request("asks", arrived_s=now)
    engine.arrived(request, now)
    wait_s = told_wait(request).wait_s
    engine.cancelled(request.id, now)
    return wait_s


def starts(engine: AdmissionEngine, wanted_s: float, took_s: float) -> None:
    """One start, for one request, and the engine's end."""
    now = wanted_s + took_s
    engine.arrived(make_request(id="first", arrived_s=wanted_s), wanted_s)
    assert dispatched(engine.backend_changed("one", True, now)) == ["first"]
    engine.finished("first", ServiceTokens(10, 5), now + 1.0)
    engine.backend_changed("one", False, now + 2.0)


@pytest.mark.parametrize("policy", sorted(POLICIES))
def test_without_a_bound_requests_are_refused_and_with_one_they_wait(policy: str) -> None:
    assert rejected(engine_of(policy, 0.0).arrived(make_request(id="x"), 0.0)) == [("x", RejectReason.NO_BACKEND)]
    engine = engine_of(policy)
    assert list(engine.arrived(make_request(), 0.0)) == []
    assert engine.queued == 1
    assert stranded(engine) == [], "nobody looks again and again for another pool"
    engine.has_fallback = True
    assert len(stranded(engine)) == 1


@pytest.mark.parametrize("policy", sorted(POLICIES))
def test_the_first_engine_gets_them_in_fair_order_and_not_at_once(policy: str) -> None:
    engine = engine_of(policy)
    for number in range(30):
        engine.arrived(make_request("flood", id=f"flood-{number}", arrived_s=0.0), 0.0)
    for number in range(3):
        engine.arrived(make_request("light", id=f"light-{number}", arrived_s=1.0), 1.0)
    went = dispatched(engine.backend_changed("one", True, 20.0))
    [ledger] = engine.backends.values()
    assert len(went) == ledger.sequences <= SLOTS + engine.capacity.waiting_target
    if policy in ("fairserve", "vtc", "wsc"):
        assert sum(name.startswith("light") for name in went) == 3


def test_a_request_waits_as_long_as_usual_beside_the_start() -> None:
    engine = engine_of()
    engine.arrived(make_request(id="x"), 0.0)
    assert engine.next_wakeup() == START_S_MAX + LIMITS.queue_wait_s_max
    assert list(engine.woke(START_S_MAX + LIMITS.queue_wait_s_max - 1.0)) == []
    assert rejected(engine.woke(START_S_MAX + LIMITS.queue_wait_s_max)) == [("x", RejectReason.NO_BACKEND)]
    engine.backend_changed("one", True, 1000.0)
    for _ in range(SLOTS + engine.capacity.waiting_target + 1):
        engine.arrived(request := make_request(arrived_s=1000.0), 1000.0)
    assert request.progress.deadline_s == 1000.0 + LIMITS.queue_wait_s_max


def test_no_request_waits_longer_than_its_client_says() -> None:
    engine = engine_of()
    engine.requests.cold_start.begin(0.0)
    starts(engine, 0.0, 20.0)
    willing = Request("willing", Flow("a"), 1.0, 10, 100, 100.0, wait_s_max=15.0)
    not_willing = Request("not willing", Flow("a"), 1.0, 10, 100, 100.0, wait_s_max=5.0)
    assert list(engine.arrived(willing, 100.0)) == []
    assert willing.progress.deadline_s == 115.0
    assert rejected(engine.arrived(not_willing, 100.0)) == [("not willing", RejectReason.WAIT_TOO_LONG)]


def test_the_bound_is_told_until_a_start_was_seen_and_then_what_starts_took() -> None:
    engine = engine_of()
    assert told_s(engine, 0.0) == pytest.approx(START_S_MAX, abs=2.0)
    assert told_s(engine, 50.0) == pytest.approx(START_S_MAX - 50.0, abs=2.0)
    engine.backend_changed("one", True, 60.0)
    engine.backend_changed("one", False, 61.0)
    assert told_s(engine, 100.0) == pytest.approx(60.0, abs=2.0)
    assert told_s(engine, 140.0) == pytest.approx(20.0, abs=2.0)
    assert told_s(engine, 200.0) == pytest.approx(40.0, abs=2.0), "a start that is late is late for longer"


def test_a_start_begins_with_the_first_request_and_when_the_last_engine_goes() -> None:
    engine = engine_of()
    starts(engine, 0.0, 20.0)
    assert told_s(engine, 500.0) == pytest.approx(20.0, abs=2.0), "nothing was wanted since the engine went"
    engine.backend_changed("one", True, 520.0)
    for _ in range(SLOTS + engine.capacity.waiting_target + 1):
        engine.arrived(make_request(arrived_s=530.0), 530.0)
    engine.backend_changed("one", False, 540.0)
    assert engine.queued, "what waits is held"
    assert engine.requests.cold_start.left_s(550.0) == pytest.approx(10.0)


def test_a_start_that_never_came_is_not_learned_from_and_the_next_one_begins_anew() -> None:
    start = ColdStartEstimator()
    start.s_max = 100.0
    start.begin(0.0)
    start.begin(99.0)
    assert start.left_s(99.0) == 1.0
    start.begin(101.0)
    assert start.left_s(101.0) == 100.0
    assert start.complete(121.0)
    assert not start.complete(122.0)
    start.begin(200.0)
    assert start.left_s(200.0) == 20.0


def test_starts_that_deviate_are_told_with_their_deviation() -> None:
    start = ColdStartEstimator()
    start.s_max = 100.0
    for number, took_s in enumerate((20.0, 30.0, 20.0, 30.0)):
        start.begin(number * 100.0)
        assert start.complete(number * 100.0 + took_s)
    start.begin(1000.0)
    assert start.left_s(1000.0) == pytest.approx(25.0)
    assert 4.0 < start.left_s(1024.0) < 9.0
    start.s_max = 0.0
    assert start.left_s(1000.0) == 0.0, "a reload has taken the bound away"


def kept(engine: AdmissionEngine, **changes: object) -> dict[str, object]:
    """Return what is kept of an engine, as it is read from a file."""
    return json.loads(json.dumps({**snapshot(engine), **changes}))


def test_the_usual_time_of_a_start_is_kept_over_a_restart_and_the_one_with_more_starts_counts() -> None:
    once, twice, never = engine_of(), engine_of(), engine_of()
    starts(once, 0.0, 50.0)
    for number, took_s in enumerate((20.0, 30.0)):
        starts(twice, number * 100.0, took_s)
    adopt(read(twice, kept(once)))
    adopt(read(once, kept(twice)))
    adopt(read(once, kept(never)))
    for engine in (once, twice):
        engine.requests.cold_start.begin(1000.0)
    for now in (1000.0, 1024.0, 1100.0):
        assert once.requests.cold_start.left_s(now) == twice.requests.cold_start.left_s(now)
    assert once.requests.cold_start.usual_s == twice.requests.cold_start.usual_s == 25.0
    adopt(read(never, kept(never)))
    assert never.requests.cold_start.usual_s == START_S_MAX


@pytest.mark.parametrize("start", [None, {}, [1], [[1.0, 2.0]], [[-1.0, 0.0, 1]], [["x", 0.0, 1]], [[1.0, 0.0, 1.5]]])
def test_a_usual_time_that_cannot_be_is_refused(start: object) -> None:
    engine = engine_of()
    with pytest.raises(ValueError, match=r"expected|could have been learned"):
        read(engine, kept(engine, start=start))


def test_what_an_earlier_version_kept_is_read() -> None:
    engine = engine_of()
    earlier = kept(engine)
    del earlier["start"]
    assert len(read(engine, earlier)) == len(read(engine, kept(engine))) - 1


def test_three_cycles_from_nothing_fail_none_and_the_told_wait_is_right_from_the_second_on() -> None:
    world, parts = World("fairserve", {"e": (SLOTS, 120_000)}), []
    world.engine.requests.cold_start.s_max = START_S_MAX
    for start_s in (20.0, 22.0, 19.0):
        began_s = world.now
        world.engine.backend_changed("e", False, began_s)
        for number in range(300):
            tenant = "light" if number % 10 == 0 else f"flood-{number % 2}"
            world.send(tenant, 100, 25, began_s + number / 30)
        world.at(began_s + start_s, lambda: world.carry(world.engine.backend_changed("e", True, world.now)))
        world.run(began_s + 600.0)
        waits = [wait for tenant in ("light", "flood-0", "flood-1") for wait in told_and_true(world, tenant, began_s)]
        parts.append(part_right(waits))
    assert {one.outcome for one in world.asked.values()} == {"completed"}
    assert min(parts[1:]) >= 0.8, parts
