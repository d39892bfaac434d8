"""Who waits? A flow with its requests, and a tenant with its flows: the members that the backlog compares."""

from __future__ import annotations

from collections import OrderedDict
from heapq import heappop, heappush
from itertools import takewhile
from typing import Any, Final

from policies.queue.counters import Counters, Member
from policies.request import Flow, Request

CALLS_PASSED: Final = 48
"""The window of the requests of one flow, in calls: about as many as run at once."""


class FlowMember(Member):
    """The waiting requests of one flow, oldest first, and which of them are calls inside interactions."""

    __slots__ = ("_ahead", "_newest", "_numbers", "asleep", "flow", "going_first", "inside", "requests", "tenant")

    def __init__(self, flow: Flow, tenant: TenantMember) -> None:
        super().__init__((flow.app, flow.user))
        self.flow = flow
        self.tenant = tenant
        self.requests: OrderedDict[str, Request] = OrderedDict()
        self.asleep: dict[str, bool] = {}
        """Starts that the working set has no room for, which are not among `requests`: do they let the flow go first
        when they wake?"""
        self.inside: OrderedDict[str, Request] = OrderedDict()
        """The calls inside interactions that count in the working set."""
        self.going_first: set[str] = set()
        """The requests that let the flow and its tenant go before others, within the window."""
        self._numbers: dict[str, int] = {}
        self._newest = 0
        self._ahead: list[int] = []
        """The numbers of requests that went before the oldest one, as a heap."""

    def add(self, request: Request, *, is_inside: bool, front: bool) -> None:
        """Queue the request. `front`: as the oldest."""
        if front and self.requests:
            number = self._numbers[next(iter(self.requests))] - 1
        else:
            number = self._newest = self._newest + 1
        self._numbers[request.id] = number
        self.requests[request.id] = request
        if is_inside:
            self.inside[request.id] = request
        if front:
            for queue in (self.requests, self.inside) if is_inside else (self.requests,):
                queue.move_to_end(request.id, last=False)

    def take(self, request: Request, *, is_served: bool) -> None:
        """The request leaves the queue. `is_served`: for an engine."""
        number = self._numbers.pop(request.id)
        if self.asleep.pop(request.id, None) is not None:
            return
        del self.requests[request.id]
        self.inside.pop(request.id, None)
        self.going_first.discard(request.id)
        oldest = self._numbers[next(iter(self.requests))] if self.requests else self._newest + 1
        if is_served and number > oldest:
            heappush(self._ahead, number)
        while self._ahead and self._ahead[0] < oldest:
            heappop(self._ahead)

    def sleep(self, start: Request) -> None:
        """The working set has no room for this start: it is passed by all others."""
        del self.requests[start.id]
        self.asleep[start.id] = start.id in self.going_first
        self.going_first.discard(start.id)

    def wake(self, start: Request) -> bool:
        """Let a start go after what woke before it. Return whether it goes before other flows."""
        goes_first, own = self.asleep.pop(start.id), sleeps_as(start)
        before = [*takewhile(lambda one: sleeps_as(one) < own, self.requests.values())]
        self.requests[start.id] = start
        for one in (start, *reversed(before)):
            self.requests.move_to_end(one.id, last=False)
        if goes_first:
            self.going_first.add(start.id)
        return goes_first

    def next(self) -> Request | None:
        """The oldest request, or the oldest one inside an interaction as long as that may pass the oldest."""
        queue = self.inside if self.inside and len(self._ahead) < CALLS_PASSED else self.requests
        return next(iter(queue.values()), None)

    def may_go(self, request: Request) -> bool:
        """Is this the oldest request, or have fewer gone before the oldest than may?"""
        return len(self._ahead) < CALLS_PASSED or next(iter(self.requests)) == request.id


class TenantMember(Member):
    """A tenant and its flows, and how many of its waiting requests are inside interactions."""

    __slots__ = ("flows", "full", "going_first", "line")

    def __init__(self, tenant: str, line: Counters[TenantMember], flows: Counters[FlowMember]) -> None:
        super().__init__((tenant,))
        self.line = line
        """Among which it waits: the others, or those of work that can wait."""
        self.flows = flows
        self.going_first = 0
        self.full = ""
        """The node of the tree that is full, so that nothing of this tenant may go; "": none."""

    def next(self) -> Request | None:
        """Its next request; None: it has only starts that sleep."""
        flow = self.flows.least()
        return flow.next() if flow is not None else None


def sleeps_as(start: Request) -> Any:
    """Return the place of a start among the starts of its tenant that sleep."""
    return not start.progress.parked, start.arrived_s, start.id
