"""How long will a start wait for the working set?

The starts of one tenant go one after another, whenever there is room for one: each is a turn. The flows (apps and
users) of the tenant take turns. So before the next start of a flow that has n starts already, each flow f with n_f
starts has min(n_f, n + 1) turns. With its own, the start is expected to wait for the sum N of these turns. A turn takes
as long as the first in line waited on average. Turns vary as exponentially distributed times do, so N + sqrt(N) turns
are counted: the mean and one standard deviation.

A start that would wait for longer than it may is refused with that time, and its place in the line is kept until it
comes back then. Meanwhile it counts among the starts that go before later ones. When it comes back it waits here, and
goes before starts of its tenant that are not due (`orders.fairserve`).
"""

from __future__ import annotations

from math import sqrt
from typing import Final

from policies.averages import STEADY
from policies.queue.places import Place, Places, place_of
from policies.request import WAIT_S_MAX, Flow, Request

PLACES_MAX: Final = 1000
"""Of one tenant. Beyond that, the place of a start that is refused is not kept."""


class _TenantStarts:
    """The starts of one tenant: the ones that wait here, and the ones that are to come back."""

    __slots__ = ("_flows_with", "_starts", "first_since_s", "places", "turn_s", "turns", "waiting")

    def __init__(self) -> None:
        self.waiting = 0
        self.places = 0
        self.first_since_s = 0.0
        """Since when the first one that waits has been the first."""
        self.turn_s = 0.0
        """Mean time for which the first one waited."""
        self.turns = 0
        """Seen so far."""
        self._starts: dict[Flow, int] = {}
        """By flow."""
        self._flows_with: list[int] = []
        """How many flows have more than 0, 1, 2, ... starts."""

    def add(self, flow: Flow) -> None:
        own = self._starts.get(flow, 0)
        self._starts[flow] = own + 1
        if own == len(self._flows_with):
            self._flows_with.append(0)
        self._flows_with[own] += 1

    def remove(self, flow: Flow) -> None:
        own = self._starts[flow] - 1
        self._flows_with[own] -= 1
        if not self._flows_with[own]:
            self._flows_with.pop()
        if own:
            self._starts[flow] = own
        else:
            del self._starts[flow]

    def expected_s(self, flow: Flow, now: float) -> float:
        """How long would one more start of this flow wait? O(starts of the flow)."""
        turns = sum(self._flows_with[: self._starts.get(flow, 0) + 1]) + 1
        # The turn that is not over yet counts with what is known of it: it takes at least as long as it has taken.
        beyond_s = max(0.0, now - self.first_since_s - self.turn_s)
        return min(WAIT_S_MAX, (self.turn_s + _part(self.turns) * beyond_s) * (turns + sqrt(turns)))


class StartWaits:
    """The starts of a pool that are not admitted yet."""

    def __init__(self) -> None:
        self._tenants: dict[str, _TenantStarts] = {}
        """Those with a start that waits here, or a place that is kept."""
        self._places = Places()

    def __len__(self) -> int:
        """Entries in memory, for places that are kept and that were given up."""
        return self._places.entries()

    def known(self, tenant: str) -> bool:
        """Does a start of this tenant wait here, or is a place kept?"""
        return tenant in self._tenants

    def waiting(self, tenant: str) -> int:
        """Starts of this tenant that wait here, for whatever reason."""
        own = self._tenants.get(tenant)
        return 0 if own is None else own.waiting

    def comes_back_in(self, request: Request, wait_s_max: float, now: float) -> float:
        """In how many seconds is this start to come back, because it would wait for longer than `wait_s_max`? Its place
        is kept until then. 0: it may wait here, or nothing is known of its tenant's starts. A start with a place has
        then come back.
        """
        own = self._tenants.get(request.flow.tenant)
        if own is None:
            return 0.0
        place = place_of(request)
        due_s = self._places.due_s.get(place)
        wait_s = own.expected_s(request.flow, now) if due_s is None else due_s - now
        if wait_s <= wait_s_max:
            if due_s is not None:
                request.progress.came_back = True
                del self._places.due_s[place]
                self._left_place(place)
            return 0.0
        if due_s is None and own.places < PLACES_MAX:
            own.add(request.flow)
            own.places += 1
            self._places.keep(place, wait_s, now)
        return wait_s

    # --- events ---

    def queued(self, request: Request, now: float) -> None:
        """A start waits here."""
        flow = request.flow
        own = self._tenants.get(flow.tenant)
        if own is None:
            own = self._tenants[flow.tenant] = _TenantStarts()
        if not own.waiting:
            own.first_since_s = now
        own.waiting += 1
        own.add(flow)
        request.progress.in_line = True

    def admitted(self, request: Request, now: float) -> None:
        """A start that waited here goes: its turn is over."""
        own = self._tenants[request.flow.tenant]
        own.turn_s += _part(own.turns) * (now - own.first_since_s - own.turn_s)
        own.turns += 1
        own.first_since_s = now
        self.left(request)

    def left(self, request: Request) -> None:
        """A start no longer waits here."""
        request.progress.in_line = False
        self._tenants[request.flow.tenant].waiting -= 1
        self._remove(request.flow)

    def expire(self, now: float) -> None:
        """Time has passed: places that nobody has come back to are no longer kept."""
        for place in self._places.expired(now):
            self._left_place(place)

    def _left_place(self, place: Place) -> None:
        flow = place[0]
        self._tenants[flow.tenant].places -= 1
        self._remove(flow)

    def _remove(self, flow: Flow) -> None:
        own = self._tenants[flow.tenant]
        own.remove(flow)
        if not own.waiting and not own.places:
            del self._tenants[flow.tenant]


def _part(turns: int) -> float:
    """What one more turn counts of the mean after so many."""
    return max(STEADY, 1.0 / (turns + 1))
