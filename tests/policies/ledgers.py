"""Requests at the ledger of one engine."""

from __future__ import annotations

from policies.capacity.lease import Lease
from policies.capacity.ledger import BackendLedger
from policies.capacity.obstacle import Obstacle
from policies.request import Request
from tests.policies.making import make_request


def start(ledger: BackendLedger, request: Request, now: float = 0.0, *, started: bool = True) -> Lease:
    lease = Lease(request, ledger.name, now)
    ledger.add(lease)
    if started:
        ledger.started(lease, now)
    return lease


def obstacle(ledger: BackendLedger, request: Request | None = None, now: float = 0.0) -> Obstacle | None:
    """Asked within an event: what holds a request back is learned."""
    asked = request or make_request()
    found = ledger.obstacle(asked, now)
    if found is not None:
        ledger.held_back(asked, found)
    return found
