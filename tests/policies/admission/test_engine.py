"""The admission engine: examples of each event."""

from __future__ import annotations

import gc

import pytest

from policies.admission.decisions import Failure
from policies.admission.engine import AdmissionEngine
from policies.capacity.gauges import Gauges
from policies.request import RejectReason, Request, ServiceTokens
from tests.policies.making import LIMITS, dispatched, make_request, pool_of, rejected


def fill(engine: AdmissionEngine, tenant: str = "a", now: float = 0.0) -> list[str]:
    """Arrivals until one has to wait; the ids of those that were dispatched."""
    ids: list[str] = []
    while not engine.queued:
        ids += dispatched(engine.arrived(make_request(tenant), now))
    return ids


def test_nothing_waits_longer_because_a_clock_was_set_back() -> None:
    engine = pool_of("one", limits=LIMITS)
    fill(engine, now=100.0)
    engine.woke(0.0)
    assert engine.next_wakeup() == 2.0
    assert [reason for _, reason in rejected(engine.woke(2.0))] == [RejectReason.QUEUE_TIMEOUT]


@pytest.mark.parametrize("policy", ["vtc", "fairserve"])
def test_of_what_ended_only_the_decision_is_kept(policy: str) -> None:
    """Whatever is kept for a while is looked through by Python's garbage collector, during which nothing is served."""
    engine = pool_of("one", policy=policy, limits=LIMITS)
    ids = [f"request-{number}" for number in range(50)]
    for now, id in enumerate(ids):
        assert dispatched(engine.arrived(make_request("a", id=id), now)) == [id]
        engine.finished(id, ServiceTokens(10, 5), now + 0.5)
    assert not [each for each in gc.get_objects() if isinstance(each, Request) and each.id in ids]
    found = engine.explain(ids[0], 100.0)
    assert (found.state, found.flow.tenant) == ("dispatched", "a")


def test_a_refused_request_goes_back_to_the_head_unbilled_and_the_backend_is_left_alone() -> None:
    engine = pool_of("one", limits=LIMITS)
    ids = fill(engine)
    request = engine.requests.leases[ids[-1]].request
    assert engine.failed(request.id, Failure.REFUSED, 1.0) == []
    assert request.progress.charged == 0.0
    wakeup_s = engine.next_wakeup()
    assert 1.0 < wakeup_s < 1.5
    for other in ids[:-1]:
        assert engine.finished(other, ServiceTokens(10, 5), 1.0) is not None
        assert not dispatched(engine.woke(1.0))
    assert dispatched(engine.woke(wakeup_s))[0] == request.id


def test_a_request_that_reaches_no_backend_is_tried_a_bounded_number_of_times() -> None:
    engine = pool_of("one", limits=LIMITS)
    engine.arrived(make_request("a", id="x"), 0.0)
    now, attempts = 0.0, 1
    while not (found := rejected(engine.failed("x", Failure.UNREACHED, now))):
        now = engine.next_wakeup()
        attempts += len(dispatched(engine.woke(now)))
    assert (attempts, found) == (LIMITS.attempts_max, [("x", RejectReason.NO_BACKEND)])
    assert (engine.queued, engine.dispatched) == (0, 0)


def test_an_arrival_takes_the_room_that_time_has_made() -> None:
    """An answer that is not streamed has started, by its pace; nobody else will say so."""
    engine = pool_of("one", slots=8, limits=LIMITS)
    engine.backend_changed("one", Gauges(0.0, running=0, waiting=0), 0.0)
    engine.arrived(make_request("a", prompt=2000, streamed=False), 0.0)
    assert engine.arrived(make_request("a", id="waits", prompt=2000), 0.0) == []
    assert engine.blocked.nearest() == "prefill"
    started_s = engine.next_wakeup()
    seen = dispatched(engine.arrived(make_request("a", id="next", prompt=1), started_s + 0.5))
    if "waits" not in seen:
        assert engine.next_wakeup() < started_s + 0.6, (
            "the room is there, and nothing but the deadline will wake the queue"
        )


def test_what_was_learned_while_a_request_waited_counts_when_it_is_dispatched() -> None:
    engine = pool_of("one", slots=1, limits=LIMITS)
    for number in range(8):
        engine.arrived(make_request("a", id=f"short-{number}"), 0.0)
        engine.finished(f"short-{number}", ServiceTokens(10, 5), 0.0)
    queued = [make_request("a", id=f"long-{number}") for number in range(6)]
    for request in queued:
        engine.arrived(request, 0.1)
    assert (queued[-1].progress.output_tokens_expected, queued[-1].progress.output_tokens_reserved) == (5, 5)
    for request in queued[:-1]:
        engine.finished(request.id, ServiceTokens(10, 100), 0.2)
    assert queued[-1].id in engine.requests.leases
    assert queued[-1].progress.output_tokens_expected > 50
    assert queued[-1].progress.output_tokens_reserved == 100
