"""The wait that is told: longer the more stands before it, bounded, asked without consequence, and mostly true."""

from __future__ import annotations

from dataclasses import replace

import pytest

from bench.expected_waits import run
from policies.admission.decisions import Decision
from policies.admission.engine import AdmissionEngine
from policies.capacity.gauges import CapacitySettings
from policies.orders.policy_entries import POLICIES
from policies.queue.bounds import QueueLimits
from policies.queue.expected_wait import GATES_MAX, PASSED, ExpectedWaits, Gate, GateState, WaitEstimate
from policies.request import WAIT_S_MAX, RejectReason, Request, ServiceTokens, Wait, of_batch
from tests.policies.making import make_request, policy_with, pool_of, told_wait

PATIENT = QueueLimits(queue_wait_s_max=1e6)


def full(policy: str = "vtc", limits: QueueLimits = PATIENT) -> AdmissionEngine:
    """One whose slots are taken by a tenant that is not asked about, and that waits with one more."""
    nothing_inside = CapacitySettings(waiting_target=0)
    engine = pool_of(
        "one", policy=policy_with(policy, requests_per_minute=1000), limits=limits, capacity=nothing_inside
    )
    while not engine.queued:
        engine.arrived(make_request("running"), 0.0)
    return engine


def told_s(engine: AdmissionEngine, tenant: str = "a", weight: float = 1.0, now: float = 1.0) -> float:
    """What one more request of this tenant is told."""
    request = make_request(tenant, weight=weight)
    engine.arrived(request, now)
    return told_wait(request).wait_s


@pytest.mark.parametrize("policy", sorted(POLICIES))
def test_it_is_no_shorter_with_more_before_it_and_bounded(policy: str) -> None:
    engine = full(policy)
    own = [told_s(engine) for _ in range(60)]
    assert own == sorted(own)
    assert 0 < own[0] < own[-1] <= WAIT_S_MAX


def test_it_is_longer_the_more_others_wait_and_the_less_its_tenant_weighs() -> None:
    waits = []
    for others in range(6):
        engine = full()
        for number in range(others):
            for _ in range(3):
                engine.arrived(make_request(f"other-{number}"), 0.5)
        for _ in range(3):
            told_s(engine, "a", 2.0)
            told_s(engine, "b")
        waits.append(told_s(engine, "b"))
        assert told_s(engine, "a", 2.0) <= waits[-1]
    assert waits == sorted(waits)
    assert waits[0] < waits[-1]


def test_class_batch_has_the_other_work_before_it() -> None:
    waits = []
    for others in (0, 3, 20):
        engine = full()
        for number in range(others):
            engine.arrived(make_request(f"other-{number}"), 0.5)
        waits.append(told_s(engine, of_batch("night")))
    assert waits == sorted(set(waits))


def test_a_thousand_tenants_are_looked_at_by_a_sample() -> None:
    engine = full()
    for number in range(1000):
        engine.arrived(make_request(f"t{number}"), 0.5)
    found = make_request("last")
    engine.arrived(found, 1.0)
    assert 300 <= told_wait(found).turns <= 1100


def test_who_starts_at_once_is_told_nothing_and_nothing_is_learned_of_it() -> None:
    engine = pool_of("one", limits=PATIENT)
    request = make_request("a")
    engine.arrived(request, 0.0)
    assert request.progress.wait is None
    engine.finished(request.id, ServiceTokens(10, 10), 1.0)
    assert engine.requests.expected_waits.counts() == {"right": 0, "longer": 0, "shorter": 0}


def test_who_is_refused_comes_back_when_it_would_be_served() -> None:
    engine = full(limits=replace(PATIENT, queue_requests_max=20))
    told = [told_s(engine) for _ in range(19)]
    [refused] = engine.arrived(make_request("a"), 1.0)
    assert refused.reason is RejectReason.QUEUE_FULL
    assert told[-1] < refused.retry_after_s < 2 * told[-1]


def test_a_client_that_is_not_willing_to_wait_so_long_is_refused_at_once_and_charged_nothing() -> None:
    engine = full()
    waits_s = [told_s(engine) for _ in range(10)][-1]

    def comes(wait_s_max: float) -> list[Decision]:
        flow = make_request("a").flow
        return list(engine.arrived(Request(f"w{wait_s_max}", flow, 1.0, 10, 100, 1.0, wait_s_max=wait_s_max), 1.0))

    [refused] = comes(waits_s / 2.2)
    assert refused.reason is RejectReason.WAIT_TOO_LONG
    assert refused.retry_after_s == pytest.approx(max(1.0, told_s(engine)), rel=0.2)
    queued = engine.queued
    willing_s = 0.75 * waits_s
    assert comes(willing_s) == [], "the true wait may be half of the expected one"
    assert engine.queued == queued + 1
    assert engine.requests.waiting.earliest_deadline_s() == pytest.approx(1.0 + willing_s), "it is willing to no longer"


def test_a_willing_client_waits_for_no_longer_than_it_may() -> None:
    limits = QueueLimits(queue_wait_s_max=5.0)
    assert limits.wait_s(Request("x", make_request().flow, 1.0, 10, 100, 0.0, wait_s_max=600.0)) == 5.0


def place(queued: int, queues: int = 1, answer_s: float = 0.0) -> GateState:
    """One queue in the order of arrival, or one of several."""
    return GateState(Gate(False), None, queued, queues, 1, answer_s)


def waiter(expected: WaitEstimate | None, since_s: float) -> Request:
    """A request that waits since then."""
    request = make_request("a")
    request.progress.wait = Wait(since_s, "turn", 0.0)
    request.progress.wait.expected = expected
    return request


@pytest.mark.parametrize(("wait_s", "said"), [(4.9, "shorter"), (5.1, "right"), (19.9, "right"), (20.1, "longer")])
def test_a_wait_from_half_to_twice_the_expected_one_is_right(wait_s: float, said: str) -> None:
    waits, request = ExpectedWaits(), waiter(WaitEstimate(10.0, 100.0, 5.0, 0, Gate(False), True), 100.0)
    waits.dispatched(request, place(0), 100.0, 100.0 + wait_s)
    waits.dispatched(request, place(0), 100.0, 101.0)
    assert waits.counts() == {"right": 0, "longer": 0, "shorter": 0} | {said: 1}, "a second is too short to be counted"


def paced(*gaps_s: float, idle_s: float = 0.0) -> float:
    """What two that wait are told, after so many others have gone, so long after each other."""
    waits, now = ExpectedWaits(), 100.0
    for gap_s in gaps_s:
        now += idle_s
        since_s = now if idle_s else 100.0
        now += gap_s
        waits.dispatched(waiter(None, since_s), place(0 if idle_s else 5), since_s, now)
    return waits.of(make_request("b"), place(2), now, comes=False).wait_s


def test_a_turn_takes_as_long_as_lately_while_something_waited() -> None:
    quick, slow = paced(*[0.1] * 50), paced(*[0.2] * 50)
    assert slow == pytest.approx(2 * quick, rel=0.05)
    assert paced(*[0.1] * 50, idle_s=60.0) == pytest.approx(quick, rel=0.05), "idle time is none of it"
    assert paced(*[0.1] * 1000, *[0.2] * 300) == pytest.approx(slow, rel=0.05), "what is long ago counts no more"
    assert paced(*[0.1] * 200, 60.0) < 50 * quick, "one long turn does not make the others forgotten"


@pytest.mark.parametrize(
    "before",
    [
        pytest.param([(waiter(None, 0.0), 1, 0.0, 1.0), (waiter(None, 1000.0), 0, 1000.0, 1001.0)], id="nothing waits"),
        pytest.param(
            # Requests of class batch have waited in the pool all the time.
            [
                (waiter(None, 0.0), 1, 0.0, 1.0),
                (make_request("a"), 0, 2.0, 500.0),
                (waiter(None, 1000.0), 0, 2.0, 1001.0),
            ],
            id="the next wait at its gate begins after one that went at once",
        ),
        pytest.param([(None, 0, 0.0, 1000.0), (waiter(None, 0.0), 0, 0.0, 1001.0)], id="no engine is in service"),
    ],
)
def test_no_time_counts_while(before: list[tuple[Request | None, int, float, float]]) -> None:
    """`before`: who was dispatched, how many it left waiting, since when any waits in the pool, and the time."""
    waits = ExpectedWaits()
    for request, left, since_s, now in before:
        if request is None:
            waits.resumed(now)
        else:
            waits.dispatched(request, place(left), since_s, now)
    assert waits.of(make_request("b"), place(1), 1001.0, comes=False).wait_s <= 1.0


def test_of_who_went_at_once_no_turn_is_learned() -> None:
    waits = ExpectedWaits()
    waits.dispatched(make_request("a"), place(0), 1000.0, 1000.0)
    assert not waits.of(make_request("b"), place(1), 1000.0, comes=False).is_learned


@pytest.mark.parametrize("policy", sorted(POLICIES))
def test_no_idle_time_is_counted_whoever_waited_before_it(policy: str) -> None:
    """Requests of both classes wait together, and one arrives and is dispatched within one event."""

    def told(idle_s: float) -> float:
        engine = full(policy)
        for number in range(3):
            engine.arrived(make_request("a", id=f"a{number}"), 1.0 + number)
        engine.arrived(make_request(of_batch("a"), id="batch"), 4.0)
        now = 5.0
        while engine.requests.leases:
            now += 1.0
            engine.finished(next(iter(engine.requests.leases)), ServiceTokens(10, 10), now)
        assert not engine.queued
        now += idle_s
        while not engine.queued:
            engine.arrived(make_request("b"), now)
        engine.finished(next(iter(engine.requests.leases)), ServiceTokens(10, 10), now + 1.0)
        return told_s(engine, "b", now=now + 1.0)

    assert told(3600.0) == pytest.approx(told(0.0), rel=0.5)


@pytest.mark.parametrize("queues", [1, 2])
def test_how_many_turns_come_true_is_learned(queues: int) -> None:
    waits, now, at = ExpectedWaits(), 0.0, place(5, queues)
    parts = []
    for _ in range(1000):
        request = waiter(waits.of(make_request("a"), at, now, comes=False), now)
        for _ in range(10 * queues - 1):  # one more than can be known goes before each that is
            waits.dispatched(waiter(None, now), at, now, now := now + 1.0 / queues)
        waits.dispatched(request, at, now, now := now + 1.0 / queues)
        parts.append(waits.of(make_request("a"), at, now, comes=False).wait_s / 10.0)
    assert parts[0] < 0.8
    assert parts[-1] == pytest.approx(1.0, rel=0.1)


@pytest.mark.parametrize(("turns", "gone"), [(5.0, 1000), (0.0, 0)])
def test_nothing_is_learned_of_a_wait_that_began_in_another_pool_or_in_no_queue(turns: float, gone: int) -> None:
    told, waits = [], ExpectedWaits()
    for expected in (None, WaitEstimate(10.0, 0.0, turns, gone, Gate(False), True)):
        waits = ExpectedWaits()
        waits.dispatched(waiter(expected, 0.0), place(5), 0.0, 9.0)
        told.append(waits.of(make_request("a"), place(5), 9.0, comes=False).wait_s)
    assert waits.counts()["right"] == 1
    assert told[0] == told[1]


def test_with_a_queue_for_each_engine_every_other_turn_is_of_another_queue() -> None:
    waits, request = ExpectedWaits(), make_request("a")
    one, two = (waits.of(request, place(4, queues, 3.0), 0.0, comes=False).wait_s for queues in (1, 2))
    assert two == 2 * one > 0


def test_the_gates_that_are_remembered_are_bounded() -> None:
    waits = ExpectedWaits()
    gates = [Gate(False, str(number)) for number in range(GATES_MAX + 1)]
    for gate in gates:
        waits.dispatched(waiter(None, 0.0), place(5)._replace(gate=gate), 0.0, 1.0)
    learned = [waits.of(make_request("a"), place(5)._replace(gate=gate), 1.0, comes=False).is_learned for gate in gates]
    assert learned == [False, *[True] * GATES_MAX]


def test_turns_of_tenants_with_long_answers_take_longer() -> None:
    def told(answer_s: float) -> float:
        engine = full()
        for tenant in ("short", "long", "long"):
            told_s(engine, tenant)
        backlog = engine.policy.order.backlog
        members = [member for name in ("running", "short", "long") if (member := backlog.tenant(name)) is not None]
        for member in members:
            member.answer_s = 1.0
        engine.finished(next(iter(engine.requests.leases)), ServiceTokens(10, 10), 1.0)
        members[-1].answer_s = answer_s
        return told_s(engine, "long", now=2.0)

    assert told(5.0) > 2 * told(1.0)


def test_a_tenant_that_asks_now_and_then_goes_first_as_often_as_it_asks() -> None:
    """Not as often as it might by its counter."""

    def told(gap_s: float) -> float:
        engine = full()
        for number in range(100):
            engine.arrived(make_request("often"), number * 0.001)
        for number in range(20):
            engine.arrived(make_request("rare", id=f"r{number}"), number * gap_s)
            if number < 19:
                engine.cancelled(f"r{number}", number * gap_s)
        return told_s(engine, "often", now=20 * gap_s)

    assert told(60.0) < 0.8 * told(0.01)


def test_who_has_no_answers_yet_is_taken_for_a_tenant_and_not_for_the_one_with_most_answers() -> None:
    engine = full()
    backlog, waits = engine.policy.order.backlog, engine.requests.expected_waits
    requests = {tenant: make_request(tenant) for tenant in ("often", "seldom")}
    for request in requests.values():
        engine.arrived(request, 1.0)
    for tenant, answer_s in [("often", 1.0), *[("seldom", 9.0)] * 3, *[("often", 1.0)] * 200]:
        waits.answered(backlog, requests[tenant], answer_s)
    assert waits.answer_s() == pytest.approx(5.0)


def test_the_quick_turns_that_fill_an_idle_engine_are_not_taken_for_its_pace() -> None:
    """32 slots that are filled within a second, and answers of 8 seconds: a turn takes a quarter of a second."""
    engine = pool_of("one", slots=32, limits=PATIENT)
    waits, request, place = engine.requests.expected_waits, make_request("a"), None
    while not engine.queued:
        engine.arrived(request := make_request("a"), 0.0)
    place = engine.requests.gate_of(request)._replace(running=32, answer_s=8.0)
    for _ in range(32):
        waits.dispatched(waiter(None, 0.0), place, 0.0, 1.0)
    assert 0.5 <= waits.of(make_request("b"), place, 1.0, comes=True).wait_s / (place.queued * 0.25 * PASSED) <= 2.0


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "seed", "until_s", "right"), [
    ("many", 11, 300.0, 0.92), ("full", 11, 300.0, 0.92), ("ceiling", 21, 300.0, 0.9), ("bursts", 21, 600.0, 0.88),
    ("bursts", 1, 1200.0, 0.82), ("agents", 1, 300.0, 0.82),
])  # fmt: skip
def test_most_waits_are_as_long_as_was_told(kind: str, seed: int, until_s: float, right: float) -> None:
    assert run(kind, seed, until_s).part_right >= right


def test_a_client_that_comes_back_is_known_by_its_refusal() -> None:
    engine = full(limits=replace(PATIENT, queue_requests_max=1))
    [refused] = engine.arrived(make_request("running"), 1.0)
    engine.cancelled(next(iter(engine.requests.waiting.requests)), 1.0)
    engine.arrived(back := make_request("running"), 1.0)
    assert refused.reason is RejectReason.QUEUE_FULL
    assert back.progress.came_back is RejectReason.QUEUE_FULL
