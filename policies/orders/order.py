"""WHO goes next? The contract of an order, and the values that pass through it.

An order knows no capacity, clock, socket or randomness. The admission engine asks the order for the next request, and
tells it the known cost of each request. A placement decides WHERE a request goes (`policies.placements`), and the
engines decide WHEN (`admission.scheduler`).

The clauses (tests/policies/orders/test_contract.py checks each of them for every policy):

P1  Work conserving: if a request is queued and the engines have room for it, one is taken out. Otherwise GPUs idle
    while users wait.
P2  Deterministic: the same calls give the same answers, whatever the hash seed. Otherwise the simulation gives wrong
    results.
P3  Exactly once: every pushed request leaves by `take` or by `remove`, never by both.
P4  A request removed before dispatch has charged nothing. A request that ends after dispatch stays charged, at least
    for its prompt even if its engine did nothing with it.
P5  Idle flows bank no credit: a flow that returns is served as if it had been present, within the bound of the order.
P6  Estimates are corrected: after the final charge, counters are what an oracle would have charged.
P7  Memory is O(queued + running + `flows_max`): beyond that, the flows that have been idle longest are forgotten.
P8  `head`, `take` and `push` are O(log flows); `charge` is O(1).
P9  The service bound that the order's docstring states holds on every trace.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import ClassVar

from policies.limits.sliding_counts import SlidingCounts
from policies.placements.prefix_index import Prefix
from policies.plain_data import LearnedState
from policies.queue.backlog import Backlog
from policies.request import Flow, Pressure, Rejection, Request, ServiceTokens


class Selection:
    """The request that goes next, and its engine."""

    __slots__ = ("backend", "request")

    def __init__(self, request: Request, backend: str) -> None:
        self.request = request
        self.backend = backend


class Order(ABC):
    """The queue of a pool or of one engine, which decides WHO goes next. Most methods may be left at their defaults."""

    reads_prefixes: ClassVar[bool] = False
    """Requests must come with the hashes of their prompt's blocks."""
    reserves: ClassVar[bool] = True
    """An engine is kept free for a head that fits nowhere. Otherwise `Backlog.others` bounds what passes the head."""
    knows_interactions: ClassVar[bool] = False
    """Requests must come with their `Claim` and their interaction."""
    admits_wholes: bool = False
    """Starts of interactions wait for the working set, and calls inside interactions pass them."""
    has_prefill_parts: bool = False
    """A tenant that is ahead begins no more prefill than its part while others' answers run (`PrefillParts`)."""
    charges_ahead: bool = False
    """The expected output is charged at dispatch, so streamed output changes no counter until it is exceeded."""
    passes: bool = False
    """A request that an engine has cached may go before the head."""
    backlog: Backlog | None = None
    """Counters of tenants and flows, which gateways compare; None if the order has none."""
    units: tuple[object, object] = (None, None)
    """Units of the counters of tenants, and of flows. An order with equal units may take the counters over."""
    learned: Mapping[str, LearnedState] = {}
    """Learned tables that survive a restart, by name."""
    counts: Mapping[str, SlidingCounts] = {}
    """Counts over time windows, by name. All gateways count together."""

    def beside(self, engine: str) -> Order:
        """Return an order of this kind for one engine's queue, which shares what this order learns and counts.

        Raises NotImplementedError if the order has none.
        """
        raise NotImplementedError(f"{type(self).__name__} has no order for the queue of one engine")

    def take_over(self, before: Order) -> None:
        """Take over what another order has learned and has counted over time windows, if the units are equal."""
        for name, part in self.learned.items():
            known = before.learned.get(name)
            if known is not None:
                try:
                    part.adopt(part.read(known.snapshot()))
                except ValueError:
                    continue  # learned in other units

    def find_rejection(self, request: Request, now: float, pressure: Pressure) -> Rejection | None:
        """Return why this request must not be queued; None if it may be. Changes nothing: `push` counts the request."""
        return None

    @abstractmethod
    def push(self, request: Request, now: float, *, front: bool = False) -> None:
        """Queue the request. `front` returns a request to the head of its flow after its dispatch has failed.

        Before a request returns, its final charge is set.
        """

    @abstractmethod
    def head(self) -> Request | None:
        """Return the request that goes next, or None if nothing waits and is awake."""

    @abstractmethod
    def take(self, request: Request) -> None:
        """Take out a queued request that is dispatched."""

    def sent(self, prefix: Prefix) -> None:
        """Note that an engine is expected to have a dispatched prompt with this prefix cached."""
        return

    @abstractmethod
    def remove(self, request: Request, now: float) -> None:
        """Take out a queued request that was cancelled or has expired."""

    @abstractmethod
    def charge(self, request: Request, service: ServiceTokens, now: float, *, final: bool) -> None:
        """Set the total service that a dispatched request has received so far (not the increment)."""

    def learn(self, request: Request, service: ServiceTokens, now: float) -> None:
        """Learn from a complete answer, which took this service."""
        return

    @abstractmethod
    def explain(self, flow: Flow, now: float) -> dict[str, float]:
        """Return the numbers that decide this flow's place, by name. Changes nothing."""

    @abstractmethod
    def __len__(self) -> int:
        """Return the number of queued requests."""
