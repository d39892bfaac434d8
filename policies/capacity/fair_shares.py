"""Which tenants are active, and which of them hold less KV than their fair share of the KV that is dispatched?

While an active tenant has nothing queued, KV is kept for tenants below their fair share, and only their requests may
wait inside an engine, where nothing passes them. A tenant stays active for a while after its last request, so that its
next request still finds both.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Mapping, Set
from math import inf
from typing import NamedTuple

from policies.request import Request


class Activity(NamedTuple):
    """Sums over the active tenants of this gateway, or of all other gateways together."""

    weights: float = 0.0
    held_tokens: int = 0
    running: int = 0
    absent: int = 0
    """Active tenants with nothing queued."""


class _Tenant:
    __slots__ = ("can_wait", "held_tokens", "queued", "running", "seen_s", "weight")

    def __init__(self, *, can_wait: bool) -> None:
        self.can_wait = can_wait
        """The node is a tenant's batch work, which has no share and takes what others leave."""
        self.weight = 0.0
        self.held_tokens = 0
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
        self._held_tokens = 0
        self._running = 0
        self._present = 0
        """Active tenants with something queued, without batch."""
        self._can_wait = 0
        """Active tenant nodes of batch work."""
        self._elsewhere = Activity()
        self._present_elsewhere = 0
        """Active tenants with nothing queued here, but with something queued at another gateway."""

    def __len__(self) -> int:
        return len(self._tenants)

    def seen(self, request: Request, now: float) -> None:
        """Count a queued request, and mark its tenant as active."""
        tenant = request.flow.tenant
        own = self._tenants.get(tenant)
        if own is None:
            own = self._tenants[tenant] = _Tenant(can_wait=request.can_wait)
            self._can_wait += request.can_wait
        else:
            self._tenants.move_to_end(tenant)
        if not request.can_wait:
            self._weights += request.weight - own.weight
            self._present += not own.queued
        own.weight = request.weight
        own.seen_s = now
        own.queued += 1
        self.expire(now)

    def recount(self, waiting: Iterable[Request], running: Iterable[tuple[Request, int]]) -> None:
        """Count anew from the waiting requests, and from the running ones with their KV tokens."""
        for own in self._tenants.values():
            own.queued = own.running = own.held_tokens = 0
        self._held_tokens = self._running = self._present = 0
        for request in waiting:
            self._tenants[request.flow.tenant].queued += 1
        self._present = sum([own.queued > 0 and not own.can_wait for own in self._tenants.values()])
        for request, held_tokens in running:
            own = self._tenants[request.flow.tenant]
            own.running += 1
            own.held_tokens += held_tokens
            self._running += 1
            self._held_tokens += held_tokens

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

    def dispatched(self, request: Request, held_tokens: int) -> None:
        """Count a queued request that was dispatched and holds these KV tokens."""
        own = self._tenants[request.flow.tenant]
        own.running += 1
        self._running += 1
        own.held_tokens += held_tokens
        self._held_tokens += held_tokens
        self._left_queue(own)

    def grew(self, request: Request, held_tokens: int) -> None:
        """Count further KV tokens of a dispatched request."""
        self._tenants[request.flow.tenant].held_tokens += held_tokens
        self._held_tokens += held_tokens

    def ended(self, request: Request, held_tokens: int) -> None:
        """Take out a dispatched request that ended and held these KV tokens."""
        own = self._tenants[request.flow.tenant]
        own.running -= 1
        self._running -= 1
        own.held_tokens -= held_tokens
        self._held_tokens -= held_tokens

    def withdrawn(self, request: Request) -> None:
        """Take out a queued request that left without service."""
        self._left_queue(self._tenants[request.flow.tenant])

    def someone_is_absent(self) -> bool:
        """Return whether an active tenant has nothing queued, so that its next request may come at any moment."""
        return self._absent() > 0 or self._elsewhere.absent > 0

    def _absent(self) -> int:
        return len(self._tenants) - self._can_wait - self._present - self._present_elsewhere

    def expires_s(self) -> float:
        """Return when the next tenant may cease to be active; inf if every active tenant has something queued."""
        if not self.someone_is_absent() or not self._tenants:
            return inf
        return next(iter(self._tenants.values())).seen_s + self._active_s

    def is_below(self, request: Request) -> bool:
        """Return whether the tenant holds less than its fair share of the dispatched KV tokens; False for batch."""
        if request.can_wait:
            return False
        own, elsewhere = self._tenants[request.flow.tenant], self._elsewhere
        held_tokens = self._held_tokens + elsewhere.held_tokens
        return own.held_tokens * (self._weights + elsewhere.weights) < held_tokens * own.weight or not held_tokens

    def is_flooding(self, request: Request) -> bool:
        """Return whether the tenant has more queued than its fair share of the number of dispatched requests."""
        own, elsewhere = self._tenants[request.flow.tenant], self._elsewhere
        return own.queued * (self._weights + elsewhere.weights) > (self._running + elsewhere.running) * own.weight

    def activity(self) -> Activity:
        """Return the sums over the tenants that are active here."""
        return Activity(self._weights, self._held_tokens, self._running, max(0, self._absent()))

    def set_elsewhere(self, activity: Activity, waiting: Set[str]) -> None:
        """Set the sums over other gateways, and the tenants that wait there.

        A tenant that is active at several gateways is counted at each.
        """
        self._elsewhere = activity
        here = [self._tenants[tenant] for tenant in waiting if tenant in self._tenants]
        self._present_elsewhere = sum([not own.queued and not own.can_wait for own in here])

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
            self._can_wait -= own.can_wait
            del self._tenants[tenant]

    def _left_queue(self, own: _Tenant) -> None:
        own.queued -= 1
        self._present -= not own.queued and not own.can_wait
