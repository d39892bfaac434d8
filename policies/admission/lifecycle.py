"""Which events are possible in which state of a request?

The table is complete: an event that it does not list for a state raises `IllegalEvent`, and changes nothing. Each event
is a method of `admission.request_ledger`, which updates all tables.

    new -> queued -> dispatched -> ended
     |       ^  |        |
     |       |  |        '-> queued   refused or not reached: uncharged. Preempted: charged for its service so far
     |       |  |-> ended             expired, evicted or cancelled: charged nothing more
     |       |  '-> moved -> queued   failed over: the pool has no engine, so the request waits in the fallback pool
     |       |
     '-> undecided -> asked           near a limit that gateways count together, or with an interaction unknown here:
                                      the reply of the others decides whether the request is queued

An undecided request that leaves early ends, and so does a request that is rejected.
"""

from __future__ import annotations

from typing import Final

from policies.request import State


class Event:
    """An event of a request: its name, and the next state for each state in which it is possible."""

    __slots__ = ("name", "states")

    def __init__(self, name: str, states: dict[State, State]) -> None:
        self.name = name
        self.states = states


class IllegalEvent(Exception):
    """An event that is impossible in the state of its request. Nothing has changed."""

    def __init__(self, request_id: str, state: State, event: Event) -> None:
        super().__init__(f"request {request_id} is {state.value}: it cannot be {event.name}")


class UnknownRequest(Exception):
    """An id of no queued or dispatched request. Nothing has changed."""

    def __init__(self, request_id: str) -> None:
        super().__init__(f"request {request_id} is not here: it has ended, or never came")


UNDECIDED: Final = Event("kept undecided", {State.NEW: State.UNDECIDED})
ASKED: Final = Event("asked about", {State.UNDECIDED: State.ASKED})
ADMITTED: Final = Event("admitted", dict.fromkeys((State.NEW, State.ASKED, State.MOVED), State.QUEUED))
REJECTED: Final = Event("rejected", {State.NEW: State.ENDED})
WITHDRAWN: Final = Event("withdrawn", dict.fromkeys((State.UNDECIDED, State.ASKED, State.QUEUED), State.ENDED))
HANDED_OVER: Final = Event("handed over to another pool", {State.QUEUED: State.MOVED})
DISPATCHED: Final = Event("dispatched", {State.QUEUED: State.DISPATCHED})
RETURNED: Final = Event("returned by its engine", {State.DISPATCHED: State.QUEUED})
FINISHED: Final = Event("finished", {State.DISPATCHED: State.ENDED})
BROKEN: Final = Event("broken off", {State.DISPATCHED: State.ENDED})
