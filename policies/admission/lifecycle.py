"""In which state is a request, and what may happen to it then?

The table is complete: an event that it does not list for a state is an `IllegalEvent`, and changes nothing. Each event
is a method of `admission.request_ledger`, which makes its entries.

    new -> queued -> dispatched -> ended
     |       ^  |        |
     |       |  |        '-> queued   the engine refused it or was not reached: back to the head of its flow, uncharged
     |       |  |-> ended             it expired, gave way or was cancelled: charged nothing
     |       |  '-> moved -> queued   its pool has no engine: it goes on waiting in the pool that stands in
     |       |
     '-> undecided -> asked           near a limit that several gateways count: the others decide whether it is queued
"""

from __future__ import annotations

from typing import Final

from policies.request import State


class Event:
    """Something that happens to a request, and the state that follows on each state where it is possible."""

    __slots__ = ("name", "states")

    def __init__(self, name: str, states: dict[State, State]) -> None:
        self.name = name
        self.states = states


class IllegalEvent(Exception):
    """This cannot happen to a request in this state. Nothing has changed."""

    def __init__(self, request_id: str, state: State, event: Event) -> None:
        super().__init__(f"request {request_id} is {state.value}: it cannot be {event.name}")


class UnknownRequest(Exception):
    """No request with this id waits or is dispatched here. Nothing has changed."""

    def __init__(self, request_id: str) -> None:
        super().__init__(f"request {request_id} is not here: it has ended, or never came")


UNDECIDED: Final = Event("kept undecided", {State.NEW: State.UNDECIDED})
ASKED: Final = Event("asked about", {State.UNDECIDED: State.ASKED})
ADMITTED: Final = Event("admitted", {State.NEW: State.QUEUED, State.ASKED: State.QUEUED})
REFUSED: Final = Event("refused", {State.NEW: State.ENDED, State.ASKED: State.ENDED})
WITHDRAWN: Final = Event(
    "withdrawn", {State.UNDECIDED: State.ENDED, State.ASKED: State.ENDED, State.QUEUED: State.ENDED}
)
HANDED_OVER: Final = Event("handed over to another pool", {State.QUEUED: State.MOVED})
TAKEN_IN: Final = Event("taken in from another pool", {State.MOVED: State.QUEUED})
DISPATCHED: Final = Event("dispatched", {State.QUEUED: State.DISPATCHED})
RETURNED: Final = Event("returned by its engine", {State.DISPATCHED: State.QUEUED})
FINISHED: Final = Event("finished", {State.DISPATCHED: State.ENDED})
BROKEN: Final = Event("broken off", {State.DISPATCHED: State.ENDED})

EVENTS: Final = (
    UNDECIDED, ASKED, ADMITTED, REFUSED, WITHDRAWN, HANDED_OVER, TAKEN_IN, DISPATCHED, RETURNED, FINISHED, BROKEN,
)  # fmt: skip
