"""The table of a request's states: every way through it leaves the books as they were, and nothing else can happen."""

from __future__ import annotations

import pickle

import pytest

from policies.admission.engine import AdmissionEngine
from policies.admission.explanation import OF_OBSTACLE, OF_REFUSAL
from policies.admission.lifecycle import (
    BROKE,
    COUNT,
    EVENTS,
    JOIN,
    LEASE,
    LEAVE,
    OPEN,
    REJOIN,
    SERVED,
    SETTLE,
    UNCOUNT,
    UNLEASE,
    UNWAIT,
    WAIT,
    Event,
    IllegalEvent,
    UnknownRequest,
)
from policies.admission.named import named_policy
from policies.capacity.obstacle import Obstacle
from policies.limits.quotas import Quota, Quotas
from policies.request import Claim, Refusal, State
from tests.policies.making import make_request

ENTERS = {WAIT: "queue", COUNT: "limits", OPEN: "interaction", JOIN: "order", REJOIN: "order", LEASE: "ledger"}
LEAVES = {
    UNWAIT: "queue",
    UNCOUNT: "limits",
    SETTLE: "limits",
    SERVED: "interaction",
    BROKE: "interaction",
    LEAVE: "order",
    LEASE: "order",
    UNLEASE: "ledger",
}
ENDS_MAX = 7


def named(entries: int, names: dict[int, str]) -> list[str]:
    return [name for bit, name in names.items() if entries & bit]


def ways(state: State, way: tuple[tuple[Event, State], ...] = ()) -> list[tuple[tuple[Event, State], ...]]:
    """Every sequence of events from a state to its end, in which a request comes back to the queue at most once."""
    if state is State.ENDED:
        return [way]
    if len(way) > ENDS_MAX:
        return []
    found = []
    for event in EVENTS:
        transition = event.transitions.get(state)
        if transition is not None:
            found += ways(transition.to, (*way, (event, state)))
    return found


def test_every_way_to_the_end_leaves_every_book() -> None:
    every = ways(State.NEW)
    assert len(every) > 10
    for way in every:
        entered: list[str] = []
        for event, state in way:
            entries = event.transitions[state].entries
            for name in named(entries, LEAVES):
                entered.remove(name)  # fails if it is in no such book
            for name in named(entries, ENTERS):
                assert name not in entered, f"twice in {name}: {[one.name for one, _ in way]}"
                entered.append(name)
        assert entered == [], [event.name for event, _ in way]


def test_every_state_is_reached_and_every_one_but_the_end_is_left() -> None:
    reached = {transition.to for event in EVENTS for transition in event.transitions.values()}
    left = {state for event in EVENTS for state in event.transitions}
    assert reached == set(State) - {State.NEW}
    assert left == set(State) - {State.ENDED}


def engine_with_books() -> AdmissionEngine:
    engine = AdmissionEngine(named_policy("fairserve"), quotas=Quotas(Quota(concurrent=5)))
    engine.add_backend("one", max_num_seqs=2)
    return engine


ILLEGAL = [(state, event) for state in State for event in EVENTS if state not in event.transitions]


@pytest.mark.parametrize(("state", "event"), ILLEGAL, ids=[f"{state}-{event.name}" for state, event in ILLEGAL])
def test_what_cannot_happen_is_an_error_and_changes_nothing(state: State, event: Event) -> None:
    books = engine_with_books().books
    request = make_request("a", id="x", claim=Claim("i"))
    request.progress.state = state
    before = pickle.dumps(books)
    with pytest.raises(IllegalEvent, match=f"request x is {state.value}: it cannot be {event.name}"):
        books.change(event, request, 1.0, backend="one")
    assert pickle.dumps(books) == before
    assert request.progress.state is state


def test_a_request_that_has_ended_cannot_end_again() -> None:
    engine = engine_with_books()
    engine.arrived(make_request("a", id="x"), 0.0)
    engine.cancelled("x", 0.1)
    with pytest.raises(UnknownRequest, match="request x is not here"):
        engine.cancelled("x", 0.2)
    assert (engine.queued, engine.dispatched) == (0, 0)


def test_there_is_a_sentence_for_every_obstacle_and_every_refusal() -> None:
    assert set(OF_OBSTACLE) == set(Obstacle)
    assert set(OF_REFUSAL) == set(Refusal)
