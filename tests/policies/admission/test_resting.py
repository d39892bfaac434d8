"""A request that an engine does not want, or died of, goes elsewhere or rests; nobody waits behind it."""

from __future__ import annotations

from dataclasses import replace
from math import inf
from typing import Any

import pytest

from policies.admission.decisions import Dispatch, Failure, Reject
from policies.admission.engine import AdmissionEngine
from policies.admission.named import named_policy
from policies.admission.takeover import PoolSettings, take_over
from policies.capacity.gauges import CapacitySettings
from policies.capacity.overload import OverloadSettings
from policies.limits.throttle import Ceilings, ThrottleSettings
from policies.queue.bounds import QueueLimits
from policies.request import RejectReason, ServiceTokens, State
from tests.policies.making import dispatched, make_request, pool_of, rejected

LIMITS = QueueLimits(queue_wait_s_max=60.0, queue_wait_s_max_inside=60.0)
POLICIES = ("fairserve", "vtc", "fcfs", "d2lpm")


def engine_of(policy: str, *engines: str, slots: int = 8, **settings: Any) -> AdmissionEngine:
    return pool_of(*engines, policy=named_policy(policy, **settings), slots=slots, limits=LIMITS)


def asks(engine: AdmissionEngine, id: str, now: float, tenant: str = "a") -> list[str]:
    return dispatched(engine.arrived(make_request(tenant, id=id, arrived_s=now), now))


def at(engine: AdmissionEngine, id: str) -> str:
    return engine.requests.leases[id].backend


@pytest.mark.parametrize("policy", POLICIES)
def test_what_an_engine_died_of_goes_to_the_other_one_at_once_and_closes_none(policy: str) -> None:
    engine = engine_of(policy, "one", "two")
    assert asks(engine, "x", 0.0) == ["x"]
    first = at(engine, "x")
    assert dispatched(engine.failed("x", Failure.DROPPED, 0.1)) == ["x"]
    assert at(engine, "x") != first
    assert asks(engine, "y", 0.1, "b") == ["y"]
    assert at(engine, "y") == first, "it runs nothing, and is not left alone"


@pytest.mark.parametrize("policy", POLICIES)
def test_what_the_only_engine_wants_later_rests_until_then(policy: str) -> None:
    engine = engine_of(policy, "one")
    asks(engine, "runs", 0.0, "b")
    engine.progressed("runs", 1, 0.0)
    asks(engine, "x", 0.0)
    engine.failed("x", Failure.REFUSED, 1.0, None, 7.0)
    assert asks(engine, "y", 1.5, "b") == ["y"]
    engine.finished("runs", ServiceTokens(10, 5), 2.0)
    engine.finished("y", ServiceTokens(10, 5), 3.0)
    assert (engine.queued, engine.requests.resting) == (1, [(8.0, "x")])
    assert engine.next_wakeup() == 8.0
    assert dispatched(engine.woke(7.9)) == []
    assert dispatched(engine.woke(8.0)) == ["x"]
    assert engine.next_wakeup() is None


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("again_s", [7.0, 500.0])
def test_what_each_engine_wants_later_is_told_when_if_that_is_after_its_time(policy: str, again_s: float) -> None:
    engine = engine_of(policy, "one", "two")
    asks(engine, "x", 0.0)
    assert dispatched(engine.failed("x", Failure.REFUSED, 1.0, None, 400.0)) == ["x"]
    decisions = engine.failed("x", Failure.REFUSED, 2.0, None, again_s)
    if again_s < 60.0:
        assert (list(decisions), engine.next_wakeup()) == ([], 9.0)
    else:
        assert decisions == [Reject("x", RejectReason.SERVER_BUSY, 399.0)]
        assert (engine.queued, engine.next_wakeup()) == (0, None)


@pytest.mark.parametrize("policy", ["fairserve", "vtc", "d2lpm"])
def test_what_waits_for_another_engine_holds_up_nobody_at_the_one_that_is_closed_to_it(policy: str) -> None:
    engine = engine_of(policy, "one", "two", slots=1)
    while not engine.queued:
        asks(engine, f"a{engine.dispatched}", 0.0)
    for number in range(10):
        asks(engine, f"b{number}", 0.0, "b")
    mine = next(iter(engine.requests.leases))
    closed, waiting = at(engine, mine), {*engine.requests.waiting.requests}
    started = dispatched(engine.failed(mine, Failure.DROPPED, 0.1))
    for now in range(1, 12):
        for id in [id for id, lease in engine.requests.leases.items() if lease.backend == closed]:
            started += dispatched(engine.finished(id, ServiceTokens(10, 5), float(now)))
    assert {*started} - {mine} == waiting


@pytest.mark.parametrize("policy", POLICIES)
def test_what_no_engine_may_have_any_more_is_refused_when_its_turn_comes(policy: str) -> None:
    engine = engine_of(policy, "one", "two")
    asks(engine, "x", 0.0)
    first = at(engine, "x")
    engine.failed("x", Failure.DROPPED, 0.1)
    engine.failed("x", Failure.UNREACHED, 0.2)
    other = "two" if first == "one" else "one"
    decisions = engine.backend_changed(other, False, 0.25)
    assert rejected(decisions) == [("x", RejectReason.BACKEND_FAILED)]
    assert asks(engine, "y", 0.3) == ["y"]


def test_where_another_pool_stands_in_it_rests_until_that_has_it() -> None:
    engine = engine_of("vtc", "one")
    engine.has_fallback = True
    asks(engine, "x", 0.0)
    assert engine.failed("x", Failure.DROPPED, 0.1) == []
    request = engine.requests.waiting.requests["x"]
    assert (request.progress.state, request.progress.rests) == (State.QUEUED, True)
    assert rejected(engine.woke(60.0)) == [("x", RejectReason.QUEUE_TIMEOUT)]
    assert (engine.queued, engine.next_wakeup()) == (0, None)


@pytest.mark.parametrize(
    ("policy", "settings"),
    [*[(name, {}) for name in POLICIES], ("fairserve", {"throttle": ThrottleSettings(user=Ceilings(requests=5))})],
    ids=[*POLICIES, "limits in overload"],
)
def test_an_engine_that_comes_takes_what_rests(policy: str, settings: dict[str, Any]) -> None:
    engine = engine_of(policy, "one", "two", **settings)
    engine.backend_changed("two", False, 0.0)
    asks(engine, "x", 0.0)
    engine.failed("x", Failure.REFUSED, 1.0, None, 30.0)
    engine.woke(1.5)
    assert engine.requests.waiting.requests["x"].progress.rests
    assert dispatched(engine.backend_changed("two", True, 2.0)) == ["x"]
    assert at(engine, "x") == "two"


def test_what_rests_may_leave_and_go_on_under_another_policy() -> None:
    engine = engine_of("vtc", "one")
    for id in ("x", "y"):
        asks(engine, id, 0.0)
        engine.failed(id, Failure.REFUSED, 1.0, None, 30.0)
        engine.woke(1.2)
    assert len(engine.requests.resting) == 2
    setup = PoolSettings(LIMITS, CapacitySettings(), OverloadSettings(), {"one": 8}, policy=named_policy("fairserve"))
    assert list(take_over(engine, setup, 2.0)) == []
    engine.cancelled("y", 3.0)
    assert dispatched(engine.woke(31.0)) == ["x"]
    assert engine.queued == len(engine.policy) == 0


def test_those_that_have_left_are_not_remembered() -> None:
    engine = engine_of("vtc", "one")
    for number in range(1000):
        now = float(number) / 100
        if asks(engine, f"r{number}", now):
            engine.failed(f"r{number}", Failure.REFUSED, now, None, 30.0)
            engine.woke(now + 0.005)
        engine.cancelled(f"r{number}", now + 0.006)
    assert len(engine.requests.resting) <= 70


def test_the_limits_of_a_request_hold_while_it_rests() -> None:
    engine = engine_of("vtc", "one")
    engine.limits = replace(LIMITS, queue_wait_s_max=5.0, queue_wait_s_max_inside=5.0)
    asks(engine, "x", 0.0)
    assert engine.failed("x", Failure.DROPPED, 0.1) == [Reject("x", RejectReason.BACKEND_FAILED, 1.0)]
    assert isinstance(engine.arrived(make_request("a", id="y"), 1.0)[0], Dispatch)
    assert inf not in [until_s for until_s, _ in engine.requests.resting]


@pytest.mark.parametrize("policy", POLICIES)
def test_what_only_one_engine_can_serve_rests_while_that_wants_it_later(policy: str) -> None:
    engine = engine_of(policy, "one", "two")
    engine.arrived(make_request("a", id="x", engine="one"), 0.0)
    engine.failed("x", Failure.REFUSED, 0.1, None, 30.0)
    started = [id for number in range(12) for id in asks(engine, f"y{number}", 2.0, "b")]
    assert len(started) == 12, "the engine takes others"
    assert {at(engine, id) for id in started} == {"one", "two"}
    for id in started:
        engine.finished(id, ServiceTokens(10, 5), 3.0)
    assert dispatched(engine.woke(30.1)) == ["x"]
    assert at(engine, "x") == "one"


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("has_fallback", [False, True])
def test_what_only_one_engine_can_serve_is_refused_at_once_where_that_is_gone(policy: str, has_fallback: bool) -> None:
    engine = engine_of(policy, "one", "two")
    engine.has_fallback = has_fallback
    engine.arrived(make_request("a", id="x", engine="one"), 0.0)
    engine.failed("x", Failure.REFUSED, 0.1, None, 30.0)
    assert rejected(engine.backend_changed("one", False, 1.0)) == [("x", RejectReason.NO_BACKEND)]
    later = engine.arrived(make_request("a", id="y", engine="one"), 1.1)
    assert rejected(later) == [("y", RejectReason.NO_BACKEND)]
    assert engine.queued == 0
