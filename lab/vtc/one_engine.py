"""One engine with a rule of its own for what may start, as `policies.admission.scheduler` sees it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from policies.admission.scheduler import schedule
from policies.capacity.ledger import BackendLedger
from policies.capacity.obstacle import Blocked, Obstacle
from policies.orders.order import Order, Selection
from policies.request import Request

BACKEND: Final = "engine"


class OneEngine:
    """The only engine of a pool. A subclass says what may start in `obstacle`."""

    def obstacle(self, request: Request) -> Obstacle | None:
        """Return the obstacle that keeps the engine from starting a request now, or None."""
        raise NotImplementedError

    def next_of(self, order: Order) -> Selection | None:
        """Take out the next request that can start, or return None."""
        found = schedule(order, self, only=BACKEND)
        return found if isinstance(found, Selection) else None

    def blocked_at(self, request: Request, engine: str) -> Blocked | None:
        obstacle = self.obstacle(request)
        return None if obstacle is None else Blocked(request, {engine: obstacle})

    def find_room(self, request: Request, but: str | None = None) -> Sequence[BackendLedger] | Blocked:
        raise NotImplementedError

    def reserve(self, blocked: Blocked) -> str | None:
        return None

    def may_begin(self, request: Request) -> bool:
        return True

    def may_wake(self, request: Request, engine: str | None) -> bool:
        return True

    def loads(self) -> dict[str, int]:
        return {BACKEND: 0}
