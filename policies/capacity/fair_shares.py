"""Which tenants are active, and what part of the pool does each have?

A tenant stays active for a while after its last request.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Mapping
from typing import NamedTuple

from policies.request import Request


class Activity(NamedTuple):
    """Sums over the active tenants of this gateway, or of all other gateways together."""

    weights: float = 0.0
    running: int = 0


class _Tenant:
    __slots__ = ("can_wait", "queued", "running", "seen_s", "weight")

    def __init__(self, *, can_wait: bool) -> None:
        self.can_wait = can_wait
        """The node is a tenant's batch work, which has no share and takes what others leave."""
        self.weight = 0.0
        self.queued = 0
        self.running = 0
        self.seen_s = 0.0


class FairShares:
    """The active tenants and their fair shares: a tenant's weight divided by the weights of all active tenants."""

    def __init__(self, *, active_s: float = 30.0, tenants_max: int = 10_000) -> None:
        """Create an empty table. Beyond `tenants_max` tenants, those with nothing queued or running are dropped."""
        self._active_s = active_s
        self._tenants_max = tenants_max
        self._tenants: OrderedDict[str, _Tenant] = OrderedDict()
        self._weights = 0.0
        self._running = 0
        self._elsewhere = Activity()

    def __len__(self) -> int:
        return len(self._tenants)

    def seen(self, request: Request, now: float) -> None:
        """Count a queued request, and mark its tenant as active."""
        tenant = request.flow.tenant
        own = self._tenants.get(tenant)
        if own is None:
            own = self._tenants[tenant] = _Tenant(can_wait=request.can_wait)
        else:
            self._tenants.move_to_end(tenant)
        if not request.can_wait:
            self._weights += request.weight - own.weight
        own.weight = request.weight
        own.seen_s = now
        own.queued += 1
        self.expire(now)

    def recount(self, waiting: Iterable[Request], running: Iterable[Request]) -> None:
        """Count anew from the waiting and the running requests."""
        for own in self._tenants.values():
            own.queued = own.running = 0
        self._running = 0
        for request in waiting:
            self._tenants[request.flow.tenant].queued += 1
        for request in running:
            self._tenants[request.flow.tenant].running += 1
            self._running += 1

    def reweigh(self, weights: Mapping[str, float]) -> None:
        """Change the weights of active tenants."""
        for name, weight in weights.items():
            own = self._tenants.get(name)
            if own is not None:
                self._weights += 0.0 if own.can_wait else weight - own.weight
                own.weight = weight

    def weight(self, request: Request) -> float:
        """Return the present weight of the request's tenant. The request must be queued or running."""
        return self._tenants[request.flow.tenant].weight

    def weight_of(self, tenant: str) -> float:
        """Return the weight of a tenant; 1.0 if the tenant is not active."""
        own = self._tenants.get(tenant)
        return own.weight if own is not None else 1.0

    def part(self, request: Request) -> float:
        """Return the request's tenant's part (0..1) by weight among the active tenants."""
        return self.part_of(request.flow.tenant, request.weight)

    def part_of(self, tenant: str, weight: float) -> float:
        """Return the part (0..1) that a tenant has, or would have with this weight if it were active."""
        own = self._tenants.get(tenant)
        weight = weight if own is None else own.weight
        return weight / (self._weights + self._elsewhere.weights + (weight if own is None else 0.0))

    def dispatched(self, request: Request) -> None:
        """Count a queued request that was dispatched."""
        own = self._tenants[request.flow.tenant]
        own.running += 1
        self._running += 1
        own.queued -= 1

    def ended(self, request: Request) -> None:
        """Take out a dispatched request that ended."""
        self._tenants[request.flow.tenant].running -= 1
        self._running -= 1

    def withdrawn(self, request: Request) -> None:
        """Take out a queued request that left without service."""
        self._tenants[request.flow.tenant].queued -= 1

    def is_flooding(self, request: Request) -> bool:
        """Return whether the tenant has more queued than its fair share of the number of dispatched requests."""
        own, elsewhere = self._tenants[request.flow.tenant], self._elsewhere
        return own.queued * (self._weights + elsewhere.weights) > (self._running + elsewhere.running) * own.weight

    def activity(self) -> Activity:
        """Return the sums over the tenants that are active here."""
        return Activity(self._weights, self._running)

    def set_elsewhere(self, activity: Activity) -> None:
        """Set the sums over other gateways. A tenant that is active at several gateways is counted at each."""
        self._elsewhere = activity

    def expire(self, now: float) -> None:
        """Drop the tenants that were last seen `active_s` ago and have nothing queued or running. O(1) on average."""
        beyond = len(self._tenants) - self._tenants_max
        while self._tenants:
            tenant, own = next(iter(self._tenants.items()))
            if now < own.seen_s + self._active_s and beyond <= 0:
                break
            beyond -= 1
            if own.queued or own.running:
                # A tenant with requests here stays active, however long they take. The next check is a period later.
                own.seen_s = now
                self._tenants.move_to_end(tenant)
                continue
            self._weights -= 0.0 if own.can_wait else own.weight
            del self._tenants[tenant]
