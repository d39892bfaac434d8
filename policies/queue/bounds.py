"""Which requests wait, within which bounds, and which are evicted when the queue is full?

The policy decides the order; this module bounds requests, bytes and time. A call inside an interaction may wait longer
and is evicted only after starts, because the tokens spent on its interaction would be lost.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from heapq import heapify, heappop, heappush
from itertools import chain, islice
from typing import Final, NamedTuple

from policies.queue.places import KeptPlaces
from policies.request import WAIT_S_MAX, RejectReason, Request
from policies.settings import setting

LOOKED_AT: Final = 64
"""Newest requests of a tenant among which those whose clients came back are evicted last."""
PLACES_MAX: Final = 10_000
"""Places kept at once, for clients that were told to retry."""
KEPT_FREE: Final = 0.1
"""Fraction of the queue that only clients whose retry is due may use, while any place is kept."""


@dataclass(frozen=True, slots=True)
class QueueLimits:
    """The bounds of one pool's queue, and of the attempts to reach a backend."""

    queue_requests_max: int = setting(10_000, "Requests that wait at once.", least=1, most=10_000_000)
    queue_bytes_max: int = 268_435_456
    """Body bytes of the waiting requests. Derived from the memory that the process may use."""
    queue_wait_s_max: float = setting(
        120, "Longest wait of a request before it is refused.", kind=float, above=0, most=86_400
    )
    queue_wait_s_max_inside: float = setting(
        600,
        "Longest wait of class batch, and of a call inside an open interaction (fairserve and wsc).",
        kind=float,
        above=0,
        most=86_400,
    )
    attempts_max: int = setting(
        3, "Attempts of one request: failed connections, and refusals by an engine that then accepted a later request. "
        "All other refusals are retried until the queue's wait ends.", least=1, most=100,
    )  # fmt: skip

    def wait_s(self, request: Request) -> float:
        """Return the longest wait of a request in seconds."""
        most_s = self.queue_wait_s_max_inside if request.progress.inside or request.is_batch else self.queue_wait_s_max
        return most_s if most_s <= request.wait_s_max else request.wait_s_max

    @property
    def spares_calls_inside(self) -> bool:
        """Return whether a call inside an interaction may wait longer than a start."""
        return self.queue_wait_s_max_inside > self.queue_wait_s_max


class QueueSummary(NamedTuple):
    """A summary of one tenant's waiting requests."""

    requests: int
    weight: float
    oldest_s: float
    """Arrival time of the oldest request."""


class _TenantQueue:
    """The waiting requests of one tenant, oldest first: starts, and calls inside an interaction."""

    __slots__ = ("bytes", "inside", "starts", "weight")

    def __init__(self) -> None:
        self.starts: OrderedDict[str, Request] = OrderedDict()
        self.inside: OrderedDict[str, Request] = OrderedDict()
        self.bytes = 0
        self.weight = 1.0

    def size(self, by_bytes: bool) -> int:
        return self.bytes if by_bytes else len(self.starts) + len(self.inside)

    def newest(self, missing: int, *, by_bytes: bool, may_be_inside: bool) -> list[Request] | None:
        """Return the newest requests that free `missing` bytes or places, starts first; None if all of them together
        free too little."""
        found: list[Request] = []
        for queue in (self.starts, self.inside) if may_be_inside else (self.starts,):
            newest = reversed(queue.values())
            come_back_last = sorted(islice(newest, LOOKED_AT), key=lambda one: one.progress.came_back is not None)
            for request in chain(come_back_last, newest):
                found.append(request)
                missing -= request.body_bytes if by_bytes else 1
                if missing <= 0:
                    return found
        return None


class BoundedQueue:
    """All waiting requests of a pool by id, by tenant and by deadline, within bounds."""

    def __init__(self, limits: QueueLimits) -> None:
        self.requests: dict[str, Request] = {}
        self.limits = limits
        self._new: dict[str, Request] = {}
        """Requests that are not indexed by tenant and deadline yet. Most requests are dispatched before that."""
        self._indexed: dict[str, _TenantQueue] = {}
        self._deadlines: list[tuple[float, str]] = []
        self.bytes = 0
        self.places = KeptPlaces()
        """Places of requests that were told to retry later."""

    def get(self, request_id: str) -> Request | None:
        return self.requests.get(request_id)

    @property
    def _tenants(self) -> dict[str, _TenantQueue]:
        """Index the new requests, and return the waiting requests by tenant."""
        if self._new:
            new, self._new = self._new, {}
            for request in new.values():
                self._index(request)
        return self._indexed

    def place_of(self, request: Request) -> int:
        """Return a request's place by arrival, from 1, among those of its tenant. O(requests of the tenant)."""
        own = self._tenants[request.flow.tenant]
        others = (*own.starts.values(), *own.inside.values())
        return sum(other.arrived_s <= request.arrived_s for other in others)

    def of_tenant(self, tenant: str) -> list[Request]:
        """Return the waiting requests of this tenant, calls inside interactions before starts."""
        own = self._tenants.get(tenant)
        return [] if own is None else [*own.inside.values(), *own.starts.values()]

    def first_of_each_tenant(self) -> list[Request]:
        """Return one request of each waiting tenant: its oldest call inside an interaction, else its oldest start."""
        return [next(iter((tenant.inside or tenant.starts).values())) for tenant in self._tenants.values()]

    def by_tenant(self) -> dict[str, QueueSummary]:
        """Return a summary of each tenant that has requests waiting. O(tenants waiting)."""
        summaries: dict[str, QueueSummary] = {}
        for name, own in self._tenants.items():
            oldest_s = min([next(iter(each.values())).arrived_s for each in (own.starts, own.inside) if each])
            summaries[name] = QueueSummary(own.size(by_bytes=False), own.weight, oldest_s)
        return summaries

    def in_turns(self) -> Iterator[Request]:
        """Iterate over all requests, one of each tenant in turn; calls inside interactions before starts."""
        turns = deque([chain(own.inside.values(), own.starts.values()) for own in self._tenants.values()])
        while turns:
            turn = turns.popleft()
            request = next(turn, None)
            if request is not None:
                turns.append(turn)
                yield request

    def add(self, request: Request, *, front: bool = False) -> None:
        """Queue the request. `front`: it returns from an engine, and counts as the oldest of its tenant."""
        self.requests[request.id] = self._new[request.id] = request
        self.bytes += request.body_bytes
        if front:
            own = self._tenants[request.flow.tenant]
            (own.inside if request.progress.inside else own.starts).move_to_end(request.id, last=False)

    def _index(self, request: Request) -> None:
        """Add the request to its tenant and to the deadlines."""
        tenant = self._indexed.get(request.flow.tenant)
        if tenant is None:
            tenant = self._indexed[request.flow.tenant] = _TenantQueue()
        (tenant.inside if request.progress.inside else tenant.starts)[request.id] = request
        tenant.bytes += request.body_bytes
        tenant.weight = request.weight
        heappush(self._deadlines, (request.progress.deadline_s, request.id))

    def remove(self, request: Request) -> None:
        del self.requests[request.id]
        self.bytes -= request.body_bytes
        if self._new.pop(request.id, None) is not None:
            return
        tenant = self._indexed[request.flow.tenant]
        del (tenant.inside if request.progress.inside else tenant.starts)[request.id]
        tenant.bytes -= request.body_bytes
        if not tenant.starts and not tenant.inside:
            del self._indexed[request.flow.tenant]
        if len(self._deadlines) > 2 * len(self.requests) + 64:  # most entries are stale
            self._deadlines = [(each.progress.deadline_s, each.id) for each in self.requests.values()]
            heapify(self._deadlines)

    def reweigh(self, weight_of: Callable[[Request], float]) -> None:
        """Replace the weights of the waiting requests. A tenant has the weight of its newest start."""
        for tenant in self._tenants.values():
            for request in (*tenant.inside.values(), *tenant.starts.values()):
                request.weight = tenant.weight = weight_of(request)

    def earliest_deadline_s(self) -> float:
        """Return the time at which the first waiting request expires; inf if none waits."""
        while self._tenants and self._deadlines:
            deadline_s, request_id = self._deadlines[0]
            request = self.requests.get(request_id)
            if request is not None and request.progress.deadline_s == deadline_s:
                return deadline_s
            heappop(self._deadlines)
        return float("inf")

    def expired(self, now: float) -> Request | None:
        """Return a request whose deadline has passed, or None."""
        return self.requests[self._deadlines[0][1]] if self.earliest_deadline_s() <= now else None

    def comes_back_in(self, request: Request, why: RejectReason, wait_s: float, now: float) -> float:
        """Return the seconds after which a refused request is to retry, and keep its place until then.

        `wait_s`: expected wait if the request were admitted. The wait grows with the kept places of the tenant, whose
        clients come first.
        """
        if (left_s := self.places.left_s(request, now)) is not None:
            return max(1.0, left_s)
        own = self._tenants.get(request.flow.tenant)
        queued = own.size(by_bytes=False) if own is not None else 0
        wait_s = min(WAIT_S_MAX, wait_s * (1.0 + self.places.counts[request.flow.tenant] / (queued + 1)))
        if len(self.places.due) < PLACES_MAX:
            self.places.keep(request, why, wait_s, now)
        return wait_s

    def evictions_for(self, request: Request, now: float) -> list[Request] | None:
        """Return the queued requests to evict for this one: [] if there is room; None if it must be rejected itself.

        A full queue is divided by weight: the tenant that fills most of it per weight loses its newest requests to a
        tenant that fills less. So only the tenant that floods the queue meets its bound.

        Starts are evicted before calls inside an interaction. A start evicts such a call only if the call's tenant
        fills more than half of the queue. Otherwise a call inside evicts a start of its own tenant or, if there is none
        and its tenant fills at most half, of the tenant with most starts per weight.

        A tenth of the queue is reserved for requests that return when they are due (`KeptPlaces`). O(tenants waiting),
        and only when the queue is full.
        """
        most, places = self.limits.queue_requests_max, self.places
        if places.due and ((left_s := places.left_s(request, now)) is None or left_s > 0.0):
            most = max(1, round(most * (1.0 - KEPT_FREE)))
        missing = self.bytes + request.body_bytes - self.limits.queue_bytes_max
        if missing > 0:
            return self._victims(request, missing, by_bytes=True) if self._tenants else None
        return [] if len(self.requests) < most else self._victims(request, 1, by_bytes=False)

    def _victims(self, request: Request, missing: int, *, by_bytes: bool) -> list[Request] | None:
        """Return the requests to evict for `missing` bytes or places; None if the request has no right to them."""
        bound = self.limits.queue_bytes_max if by_bytes else self.limits.queue_requests_max
        own, is_inside = self._tenants.get(request.flow.tenant), request.progress.inside
        own_after = (own.size(by_bytes) if own else 0) + (request.body_bytes if by_bytes else 1)
        most = max(self._tenants.items(), key=lambda item: (item[1].size(by_bytes) / item[1].weight, item[0]))[1]
        size = most.size(by_bytes)
        if own is not most and own_after / request.weight <= (size - missing * by_bytes) / most.weight:
            victims = most.newest(missing, by_bytes=by_bytes, may_be_inside=is_inside or 2 * size > bound)
            if victims is not None:
                return victims
        if not is_inside:
            return None
        if own is None or not own.starts:
            if 2 * own_after > bound:
                return None
            own = max(self._tenants.items(), key=lambda item: (len(item[1].starts) / item[1].weight, item[0]))[1]
        return own.newest(missing, by_bytes=by_bytes, may_be_inside=False)
