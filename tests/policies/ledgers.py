"""Requests at the ledger of one engine."""

from __future__ import annotations

from typing import Any

from policies.capacity.gauges import CapacitySettings, Gauges
from policies.capacity.lease import Lease
from policies.capacity.ledger import BackendLedger
from policies.capacity.obstacle import Obstacle
from policies.request import Request
from tests.policies.making import make_request


def engine(slots: int | None = 100, *, kv: int | None = None, name: str = "b", **settings: Any) -> BackendLedger:
    """An engine with these slots, or with slots that are learned, which has shown the size of its cache at most."""
    ledger = BackendLedger(name, CapacitySettings(**settings), max_num_seqs=slots)
    if kv is not None:
        ledger.observe(Gauges(0.0, kv_capacity_tokens=kv, block_size=16), 0.0)
    return ledger


def start(ledger: BackendLedger, request: Request, now: float = 0.0, *, started: bool = True) -> Lease:
    lease = Lease(request, ledger.name, now)
    ledger.add(lease)
    if started:
        ledger.started(lease, now)
    return lease


def fill(ledger: BackendLedger, now: float = 0.0, **request: Any) -> int:
    """Start requests of this kind until something is in the way; how many."""
    number = 0
    while obstacle(ledger, make_request(**request), now) is None:
        start(ledger, make_request(**request), now)
        number += 1
    return number


def obstacle(ledger: BackendLedger, request: Request | None = None, now: float = 0.0) -> Obstacle | None:
    """Asked within an event: what holds a request back is learned."""
    asked = request or make_request()
    found = ledger.obstacle(asked, now)
    if found is not None:
        ledger.held_back(asked, found)
    return found
