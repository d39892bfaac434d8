"""The members that the backlog compares: a flow with its requests, and a tenant with its flows."""

from __future__ import annotations

from collections import OrderedDict
from heapq import heappop, heappush
from itertools import takewhile
from typing import Any, Final

from policies.queue.counters import CounterHeap, CounterMember
from policies.request import Flow, Request

CALLS_PASSED: Final = 48
"""Requests of a flow that may pass its oldest one: about as many as run at once."""


class FlowMember(CounterMember):
    """The waiting requests of one flow, oldest first, and which of them are calls inside interactions."""

    __slots__ = ("_ahead", "_newest", "_numbers", "asleep", "flow", "going_first", "inside", "requests", "tenant")

    def __init__(self, flow: Flow, tenant: TenantMember) -> None:
        super().__init__((flow.app, flow.user))
        self.flow = flow
        self.tenant = tenant
        self.requests: OrderedDict[str, Request] = OrderedDict()
        self.asleep: dict[str, bool] = {}
        """Starts for which the working set has no room, apart from `requests`. True if the flow goes first when the
        start wakes."""
        self.inside: OrderedDict[str, Request] = OrderedDict()
        """Calls inside interactions, and starts that already count in the working set. These requests go before other
        starts."""
        self.going_first: set[str] = set()
        """Requests that let the flow and its tenant go before others, within the window."""
        self._numbers: dict[str, int] = {}
        """Places by arrival, by request."""
        self._newest = 0
        self._ahead: list[int] = []
        """Heap of the numbers of the requests that have passed the oldest one."""

    def add(self, request: Request, *, is_inside: bool, front: bool) -> None:
        """Queue the request. `front`: it counts as the oldest."""
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
        """Remove the request. `is_served`: it is dispatched, so it may count as one that passed the oldest."""
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
        """Move a request that starts an interaction out of the queue until the working set has room."""
        del self.requests[start.id]
        self.inside.pop(start.id, None)
        self.asleep[start.id] = start.id in self.going_first
        self.going_first.discard(start.id)

    def wake(self, start: Request) -> bool:
        """Queue a sleeping start at the head, behind requests there that go before it (`start_sort_key`).

        Return whether its flow goes first.
        """
        goes_first, own = self.asleep.pop(start.id), start_sort_key(start)
        before = [*takewhile(lambda one: start_sort_key(one) < own, self.requests.values())]
        self.requests[start.id] = start
        for one in (start, *reversed(before)):
            self.requests.move_to_end(one.id, last=False)
        if goes_first:
            self.going_first.add(start.id)
        return goes_first

    def next(self) -> Request | None:
        """Return the oldest request of `inside` while it may pass, else the oldest request."""
        queue = self.inside if self.inside and len(self._ahead) < CALLS_PASSED else self.requests
        return next(iter(queue.values()), None)

    def may_go(self, request: Request) -> bool:
        """Return whether this request is the oldest, or may pass the oldest."""
        return len(self._ahead) < CALLS_PASSED or next(iter(self.requests)) == request.id


class TenantMember(CounterMember):
    """A tenant in the fair queue of its class, interactive or batch, with the counters of its flows."""

    __slots__ = ("flows", "full", "going_first", "line")

    def __init__(self, tenant: str, line: CounterHeap[TenantMember], flows: CounterHeap[FlowMember]) -> None:
        super().__init__((tenant,))
        self.line = line
        """Heap of its class, interactive or batch."""
        self.flows = flows
        self.going_first = 0
        """Waiting requests that let the tenant go before others, within the window."""
        self.full: str | TenantMember | None = None
        """Key in `Backlog.full` under which this tenant sleeps; None if it does not."""


def start_sort_key(start: Request) -> Any:
    """Return the sort key of a start among the sleeping starts of its tenant.

    Single questions go before agents: they need no room in the working set, and wait only while their tenant is ahead.
    """
    return not start.progress.parked, start.progress.is_followed, start.arrived_s, start.id
