"""The table of a request's states: every way through it leaves the ledger as it was, and nothing else can happen."""

from __future__ import annotations

import pickle
from collections.abc import Callable

import pytest

from policies.admission import lifecycle
from policies.admission.engine import AdmissionEngine
from policies.admission.explanation import OF_OBSTACLE, OF_REFUSAL
from policies.admission.lifecycle import Event, IllegalEvent, UnknownRequest
from policies.admission.request_ledger import NO_SERVICE, RequestLedger
from policies.capacity.obstacle import Obstacle
from policies.limits.quotas import Quota, Quotas
from policies.orders.order import Selection
from policies.request import Claim, RejectReason, Request, ServiceTokens, State
from policies.tree.node import SEQUENCES
from tests.policies.making import make_request, policy_with, pool_of

SERVICE = ServiceTokens(12, 7)
EVENTS = tuple(each for each in vars(lifecycle).values() if isinstance(each, Event))

KNOWN_TO = {
    State.NEW: set(),
    State.UNDECIDED: {"queue"},
    State.ASKED: {"queue", "limits"},
    State.QUEUED: {"queue", "limits", "interaction", "order", "tree"},
    State.MOVED: {"interaction"},
    State.DISPATCHED: {"limits", "interaction", "leases", "ledger", "running", "tree"},
    State.ENDED: set(),
}
"""The tables that know a request in each state."""

MAKE: dict[Event, Callable[[RequestLedger, Request], None]] = {
    lifecycle.UNDECIDED: lambda requests, request: requests.undecided(request),
    lifecycle.ASKED: lambda requests, request: requests.asked(request, 1.0),
    lifecycle.ADMITTED: lambda requests, request: requests.admitted(request, 1.0),
    lifecycle.REJECTED: lambda requests, request: requests.rejected(request),
    lifecycle.WITHDRAWN: lambda requests, request: requests.withdrawn(request, 1.0),
    lifecycle.HANDED_OVER: lambda requests, request: requests.handed_over(request, 1.0),
    lifecycle.DISPATCHED: lambda requests, request: requests.dispatched(request, "one", 1.0),
    lifecycle.RETURNED: lambda requests, request: requests.returned(request, 1.0),
    lifecycle.FINISHED: lambda requests, request: requests.finished(request, SERVICE, 1.0, None),
    lifecycle.BROKEN: lambda requests, request: requests.broken(request, NO_SERVICE, 1.0),
}

Way = tuple[tuple[Event, State], ...]
LONGEST = 8


def ways(state: State, way: Way = ()) -> list[Way]:
    """Every sequence of events, each with the state that follows, from a state to its end."""
    if state is State.ENDED:
        return [way]
    if len(way) == LONGEST:
        return []
    follow = [(event, event.states[state]) for event in EVENTS if state in event.states]
    return [found for event, after in follow for found in ways(after, (*way, (event, after)))]


def engine_with_ledger() -> AdmissionEngine:
    return pool_of("one", policy=policy_with("fairserve"), quotas=Quotas(Quota(requests_per_minute=50, concurrent=5)))


def known_to(requests: RequestLedger, request: Request) -> set[str]:
    """The tables that know this request, the only one that there is."""
    interaction, quotas, pool = request.progress.interaction, requests.quotas, requests.tree.pool
    counts = {
        "queue": len(requests.waiting.requests),
        "limits": quotas.under_way.get("a", 0),
        "interaction": interaction.under_way if interaction is not None else 0,
        "order": len(requests.policy),
        "leases": len(requests.leases),
        "ledger": len(requests.backends["one"].leases),
        "tree": pool.interactive.present,
        "running": int(pool.used[SEQUENCES]),
    }
    assert set(counts.values()) <= {0, 1}
    return {name for name, count in counts.items() if count}


@pytest.mark.parametrize("way", ways(State.NEW), ids=lambda way: "-".join(event.name.split()[0] for event, _ in way))
def test_each_state_is_known_to_its_books_and_the_end_to_none(way: Way) -> None:
    engine = engine_with_ledger()
    requests, quotas = engine.requests, engine.quotas
    request = make_request("a", id="x", claim=Claim("i"))
    for event, after in way:
        if event is lifecycle.DISPATCHED:
            assert isinstance(engine.policy.pop(1.0, engine.room), Selection)
        MAKE[event](requests, request)
        assert request.progress.state is after
        assert known_to(requests, request) == KNOWN_TO[after], event.name
        if after is not State.ENDED:
            assert request.progress.charged == (request.prompt_tokens if after is State.DISPATCHED else 0.0)
    # What is left is what it took: limits, charges and its interaction agree about it.
    was_queued = State.QUEUED in [after for _, after in way]
    took = {lifecycle.FINISHED: 19, lifecycle.BROKEN: 0}.get(way[-1][0], 0)
    assert quotas.minute.sums("a", 1.0)[1:3] == (was_queued, took)
    assert request.progress.charged == {lifecycle.FINISHED: 12 + 2 * 7, lifecycle.BROKEN: 10}.get(way[-1][0], 0.0)
    interaction = request.progress.interaction
    assert (interaction is not None) == was_queued
    if interaction is not None:
        assert (interaction.calls, interaction.tokens) == (1, took)


def test_every_state_is_reached_and_every_one_but_the_end_is_left() -> None:
    assert {after for event in EVENTS for after in event.states.values()} == set(State) - {State.NEW}
    assert {before for event in EVENTS for before in event.states} == set(State) - {State.ENDED}
    assert {event for way in ways(State.NEW) for event, _ in way} == set(EVENTS) == set(MAKE)


ILLEGAL = [(state, event) for state in State for event in EVENTS if state not in event.states]


@pytest.mark.parametrize(("state", "event"), ILLEGAL, ids=[f"{state}-{event.name}" for state, event in ILLEGAL])
def test_what_cannot_happen_is_an_error_and_changes_nothing(state: State, event: Event) -> None:
    requests = engine_with_ledger().requests
    request = make_request("a", id="x", claim=Claim("i"))
    request.progress.state = state
    before = pickle.dumps((requests, request))
    with pytest.raises(IllegalEvent, match=f"request x is {state.value}: it cannot be {event.name}"):
        MAKE[event](requests, request)
    assert pickle.dumps((requests, request)) == before


def test_a_request_that_has_ended_cannot_end_again() -> None:
    engine = engine_with_ledger()
    engine.arrived(make_request("a", id="x"), 0.0)
    engine.cancelled("x", 0.1)
    with pytest.raises(UnknownRequest, match="request x is not here"):
        engine.cancelled("x", 0.2)
    assert (engine.queued, engine.dispatched) == (0, 0)


@pytest.mark.parametrize("event", [lifecycle.FINISHED, lifecycle.BROKEN], ids=["finished", "broken"])
def test_what_an_engine_did_nothing_with_is_charged_its_prompt(event: Event) -> None:
    engine = engine_with_ledger()
    request = make_request("a", id="x")
    engine.arrived(request, 0.0)
    if event is lifecycle.FINISHED:
        engine.finished("x", NO_SERVICE, 1.0)
    else:
        engine.cancelled("x", 1.0, NO_SERVICE)
    assert request.progress.charged == request.prompt_tokens


def test_there_is_a_sentence_for_every_obstacle_and_every_refusal() -> None:
    assert set(OF_OBSTACLE) == set(Obstacle)
    assert set(OF_REFUSAL) == set(RejectReason)
