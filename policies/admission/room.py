"""Which engines of a pool can start a request now? What the policy asks while it is asked for the next request."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final, Protocol

from policies.capacity.fair_shares import FairShares
from policies.capacity.ledger import BackendLedger
from policies.capacity.obstacle import Blocked, Obstacle
from policies.request import Request

__all__ = ["PoolRoom", "Rivals"]


class Rivals(Protocol):
    """Those that wait at other gateways for the same engines."""

    def has_turn(self, request: Request, now: float) -> bool:
        """Does one of them go before this request?"""


class PoolRoom:
    """The engines of one pool, within one event (`admission.policy.Engines`).

    Being asked is part of the event: what held a request back is learned by the ledger that it was held back at, and an
    answer holds until `changed`.
    """

    def __init__(self, backends: Mapping[str, BackendLedger], tenants: FairShares) -> None:
        self.rivals: Rivals | None = None
        """None: this gateway is the only one."""
        self._backends: Final = backends
        self._tenants: Final = tenants
        self._blocked: dict[str, Blocked] = {}
        """By request: what was found since anything changed, so that asking again costs O(1)."""
        self._now = 0.0

    def changed(self, now: float) -> None:
        """Something has ended, started or become known: who had no room may have some."""
        self._blocked.clear()
        self._now = now

    def at(self, now: float) -> None:
        """It is this time."""
        self._now = now

    def with_room(self, request: Request) -> Sequence[BackendLedger] | Blocked:
        known = self._blocked.get(request.id)
        if known is not None:
            return known
        free: list[BackendLedger] = []
        obstacles: dict[str, Obstacle] = {}
        for name, ledger in self._backends.items():
            obstacle = self.obstacle_at(request, name)
            if obstacle is None:
                free.append(ledger)
            else:
                obstacles[name] = obstacle
        if free:
            return free
        blocked = self._blocked[request.id] = Blocked(request, obstacles)
        return blocked

    def obstacle_at(self, request: Request, engine: str) -> Obstacle | None:
        if self.rivals is not None and self.rivals.has_turn(request, self._now):
            return Obstacle.TURN
        ledger, tenants = self._backends[engine], self._tenants
        obstacle = ledger.obstacle(
            request,
            spare=tenants.is_below(request),
            absent=tenants.someone_is_absent(),
            now=self._now,
            paced=tenants.is_flooding(request),
        )
        if obstacle is not None:
            ledger.held_back(request, obstacle)
        return obstacle

    def loads(self) -> dict[str, int]:
        return {name: len(ledger.leases) for name, ledger in self._backends.items() if ledger.healthy}
