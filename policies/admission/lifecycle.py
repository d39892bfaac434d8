"""In which state is a request, what may happen to it then, and which books change when it does?

The table is complete: an event that it does not list for a state is an `IllegalEvent`, and changes nothing. Each
transition names its entries in the books; `admission.books` makes them.

    new -> queued -> dispatched -> ended
     |       ^  |        |
     |       |  |        '-> queued   the engine refused it or was not reached: back to the head of its flow, uncharged
     |       |  |-> ended             it expired, gave way or was cancelled: charged nothing
     |       |  '-> moved -> queued   its pool has no engine: it goes on waiting in the pool that stands in
     |       |
     '-> undecided -> asked           near a limit that several gateways count: the others decide whether it is queued
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from policies.request import State

__all__ = ["EVENTS", "Event", "IllegalEvent", "Transition", "UnknownRequest"]


# Entries in the books. Each is a bit, so that a transition is one number.
WAIT: Final = 1
"""Into the bounded queue, with a deadline."""
UNWAIT: Final = 2
"""Out of the bounded queue."""
COUNT: Final = 4
"""Into the counts of its tenant's limits."""
UNCOUNT: Final = 8
"""Out of these counts, as if it had never come."""
SETTLE: Final = 16
"""The counts of its tenant's limits take over what it took in the end."""
OPEN: Final = 32
"""Its interaction is open, and busy with it."""
SERVED: Final = 64
"""Its interaction has had a whole answer from it."""
BROKE: Final = 128
"""Its interaction has had no whole answer from it."""
JOIN: Final = 256
"""Into the order, and among the active tenants."""
REJOIN: Final = 512
"""Into the order at the head of its flow, and among the active tenants."""
LEAVE: Final = 1024
"""Out of the order, without service."""
LEASE: Final = 2048
"""From the order to the ledger of an engine."""
UNLEASE: Final = 4096
"""Out of the ledger; its service is charged finally."""


class Transition:
    """The new state, and the entries in the books."""

    __slots__ = ("entries", "to")

    def __init__(self, to: State, entries: int) -> None:
        self.to = to
        self.entries = entries


class Event:
    """Something that happens to a request, and what follows in each state where it is possible."""

    __slots__ = ("name", "transitions")

    def __init__(self, name: str, transitions: Mapping[State, Transition]) -> None:
        self.name = name
        self.transitions = dict(transitions)


class IllegalEvent(Exception):
    """This cannot happen to a request in this state. Nothing has changed."""

    def __init__(self, request_id: str, state: State, event: Event) -> None:
        super().__init__(f"request {request_id} is {state.value}: it cannot be {event.name}")


class UnknownRequest(Exception):
    """No request with this id waits or is dispatched here. Nothing has changed."""

    def __init__(self, request_id: str) -> None:
        super().__init__(f"request {request_id} is not here: it has ended, or never came")


ASKS: Final = Event("kept undecided", {State.NEW: Transition(State.UNDECIDED, WAIT)})
TOLD: Final = Event("told to other gateways", {State.UNDECIDED: Transition(State.ASKED, COUNT)})
ADMITTED: Final = Event(
    "admitted",
    {
        State.NEW: Transition(State.QUEUED, WAIT | COUNT | OPEN | JOIN),
        State.ASKED: Transition(State.QUEUED, OPEN | JOIN),
    },
)
REFUSED: Final = Event(
    "refused",
    {
        State.NEW: Transition(State.ENDED, 0),
        State.ASKED: Transition(State.ENDED, UNWAIT | UNCOUNT),
    },
)
WITHDRAWN: Final = Event(
    "withdrawn",
    {
        State.UNDECIDED: Transition(State.ENDED, UNWAIT),
        State.ASKED: Transition(State.ENDED, UNWAIT | UNCOUNT),
        State.QUEUED: Transition(State.ENDED, UNWAIT | LEAVE | BROKE | SETTLE),
    },
)
HANDED_OVER: Final = Event(
    "handed over to another pool", {State.QUEUED: Transition(State.MOVED, UNWAIT | LEAVE | UNCOUNT)}
)
TAKEN_IN: Final = Event("taken in from another pool", {State.MOVED: Transition(State.QUEUED, WAIT | COUNT | JOIN)})
DISPATCHES: Final = Event("dispatched", {State.QUEUED: Transition(State.DISPATCHED, UNWAIT | LEASE)})
RETURNED: Final = Event("returned by its engine", {State.DISPATCHED: Transition(State.QUEUED, UNLEASE | WAIT | REJOIN)})
FINISHED: Final = Event("finished", {State.DISPATCHED: Transition(State.ENDED, UNLEASE | SERVED | SETTLE)})
BROKEN: Final = Event("broken off", {State.DISPATCHED: Transition(State.ENDED, UNLEASE | BROKE | SETTLE)})

EVENTS: Final = (
    ASKS,
    TOLD,
    ADMITTED,
    REFUSED,
    WITHDRAWN,
    HANDED_OVER,
    TAKEN_IN,
    DISPATCHES,
    RETURNED,
    FINISHED,
    BROKEN,
)
