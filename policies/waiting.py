"""Who waits, within which bounds, and who gives way when the queue is full?

Order is the policy's business; here are only the bounds: requests, bytes and time.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass
from heapq import heappop, heappush

from policies.base import Request

__all__ = ["QueueLimits", "WaitingRoom"]


@dataclass(frozen=True, slots=True)
class QueueLimits:
    """How much may wait for one pool, how long, and how often may one request fail to reach a backend?"""

    requests_max: int = 10_000
    bytes_max: int = 268_435_456
    wait_s_max: float = 120.0
    attempts_max: int = 3


class _TenantQueue:
    """What one tenant has waiting, oldest first."""

    __slots__ = ("bytes", "requests", "weight")

    def __init__(self) -> None:
        self.requests: OrderedDict[str, Request] = OrderedDict()
        self.bytes = 0
        self.weight = 1.0


class WaitingRoom:
    """Every queued request by id, by tenant and by deadline."""

    def __init__(self, limits: QueueLimits) -> None:
        self._limits = limits
        self._requests: dict[str, Request] = {}
        self._tenants: dict[str, _TenantQueue] = {}
        self._deadlines: list[tuple[float, str]] = []
        self.bytes = 0

    def __len__(self) -> int:
        return len(self._requests)

    def get(self, request_id: str) -> Request | None:
        return self._requests.get(request_id)

    def add(self, request: Request, *, front: bool = False) -> None:
        """Let it in; `front`: it comes back, and counts as the oldest of its tenant."""
        self._requests[request.id] = request
        tenant = self._tenants.setdefault(request.flow.tenant, _TenantQueue())
        tenant.requests[request.id] = request
        if front:
            tenant.requests.move_to_end(request.id, last=False)
        tenant.bytes += request.body_bytes
        tenant.weight = request.weight
        self.bytes += request.body_bytes
        heappush(self._deadlines, (request.deadline_s, request.id))

    def remove(self, request: Request) -> None:
        del self._requests[request.id]
        tenant = self._tenants[request.flow.tenant]
        del tenant.requests[request.id]
        tenant.bytes -= request.body_bytes
        if not tenant.requests:
            del self._tenants[request.flow.tenant]
        self.bytes -= request.body_bytes

    def earliest_deadline_s(self) -> float:
        """When the first of those waiting expires; infinite if nobody waits."""
        while self._deadlines and self._deadlines[0][1] not in self._requests:
            heappop(self._deadlines)
        return self._deadlines[0][0] if self._deadlines else float("inf")

    def expired(self, now: float) -> Request | None:
        """One whose time is up, or None."""
        return self._requests[self._deadlines[0][1]] if self.earliest_deadline_s() <= now else None

    def giving_way(self, request: Request) -> list[Request] | None:
        """Which queued requests are refused so that this one has room? [] none is needed; None: it has no right to any.

        A full queue is shared by weight: whoever has most in it gives up its newest, to one who has less. So a flood
        meets the bound alone. O(tenants waiting), and only when the queue is full.
        """
        limits = self._limits
        missing = self.bytes + request.body_bytes - limits.bytes_max
        if missing > 0:
            return self._bytes_given(request, missing)
        if len(self._requests) >= limits.requests_max:
            most = max(self._tenants.items(), key=lambda item: (len(item[1].requests) / item[1].weight, item[0]))[1]
            own = self._tenants.get(request.flow.tenant)
            own_after = (len(own.requests) if own else 0) + 1
            if own is most or own_after / request.weight > len(most.requests) / most.weight:
                return None
            return [next(reversed(most.requests.values()))]
        return []

    def _bytes_given(self, request: Request, missing: int) -> list[Request] | None:
        if not self._tenants:
            return None
        most = max(self._tenants.items(), key=lambda item: (item[1].bytes / item[1].weight, item[0]))[1]
        own = self._tenants.get(request.flow.tenant)
        own_after = (own.bytes if own else 0) + request.body_bytes
        if own is most or own_after / request.weight > (most.bytes - missing) / most.weight:
            return None
        victims = []
        for victim in reversed(most.requests.values()):
            if missing <= 0:
                break
            victims.append(victim)
            missing -= victim.body_bytes
        return victims
