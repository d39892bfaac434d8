"""WHO goes next? The contract of an order, and the values that pass through it.

An order knows no capacity, time, socket or randomness. The admission engine asks it for the next request, and informs
it of the known cost of each request. A placement decides WHERE a request goes (`policies.placements`). The order offers
requests to a `Room`, which names an engine, or the obstacle at each engine.

The clauses (tests/policies/orders/test_contract.py checks each of them for every policy):

P1  Work conserving: if a request is queued and the room places whatever it is offered, `pop` returns one. Otherwise
    GPUs idle while users wait.
P2  Deterministic: the same calls give the same answers, whatever the hash seed. Otherwise the simulation gives wrong
    results.
P3  Exactly once: every pushed request leaves by `pop` or by `remove`, never by both.
P4  A request removed before dispatch has charged nothing. One that ends after dispatch keeps what was charged, and at
    least its prompt where its engine did nothing with it.
P5  Idle flows bank no credit: a flow that returns is served as if it had been present, within the bound of the order.
P6  Estimates are corrected: after the final charge, counters are what an oracle would have charged.
P7  Memory is O(queued + running + `flows_max`): beyond that, the flows that have been idle longest are forgotten.
P8  `pop` and `push` are O(log flows); `charge` is O(1).
P9  The service bound that the order's docstring states holds on every trace.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from typing import ClassVar, Protocol

from policies.capacity.obstacle import Blocked
from policies.limits.sliding_counts import SlidingCounts
from policies.plain_data import Learned
from policies.queue.backlog import Backlog
from policies.request import Flow, Pressure, Refused, Request, ServiceTokens


class Room(Protocol):
    """Where would a request go now?"""

    def place(self, request: Request, *, but: str | None = None) -> str | Blocked:
        """Name of the engine that can start it now, or the obstacle at each. `but`: not this engine."""

    def reserve(self, blocked: Blocked) -> str | None:
        """Which engine is kept for the next request, which no engine can start, so that nothing delays its start there?

        None: no other request could start anywhere else.
        """

    def may_begin(self, request: Request) -> bool:
        """Has the working set room for this start?"""

    def is_below(self, request: Request) -> bool:
        """Have its tenant and the groups around it room for it?"""

    def nearest(self, head: Request, engine: str, may_pass: Callable[[Request, Request], bool]) -> Request:
        """Which request loses least by going to this engine now: the head, or one that may pass the head?

        The head, if the engine has half of the head's prompt. Else the request whose prompt the engine has most of.
        """


class Selection:
    """Which request goes next, and to which engine?"""

    __slots__ = ("backend", "request")

    def __init__(self, request: Request, backend: str) -> None:
        self.request = request
        self.backend = backend


class Order(ABC):
    """Which request is served next? Most orders need not answer all of these questions and events."""

    reads_prefixes: ClassVar[bool] = False
    """Requests must come with the hashes of their prompt's blocks."""
    knows_interactions: ClassVar[bool] = False
    """Requests must come with what they show of their interaction."""

    def __init__(self) -> None:
        self.admits_wholes = False
        """Starts of interactions wait for the working set, and calls inside pass them."""
        self.has_prefill_parts = False
        """A tenant that is ahead begins no more prefill than its part while others' answers run (`PrefillParts`)."""
        self.passes = False
        """A request that an engine has cached may go before the next one (`Room.nearest`)."""
        self.backlog: Backlog | None = None
        """The counters of tenants and flows, if the order has them. Gateways compare them."""
        self.units: tuple[object, object] = (None, None)
        """What its counters of tenants and of flows count. Another order that counts the same may go on with them."""
        self.learned: Mapping[str, Learned] = {}
        """What the order learns and a restart should not lose, by name."""
        self.counts: Mapping[str, SlidingCounts] = {}
        """What the order counts over time windows, by name. Gateways count together."""

    def beside(self, engine: str) -> Order:
        """An order of the same kind for the queue of one engine. What is learned and counted is common to all of
        them.
        """
        raise NotImplementedError(f"{type(self).__name__} has no order for the queue of one engine")

    def resume(self, before: Order) -> None:
        """Go on with what another order has learned, and has counted over time windows, where that means the same."""
        for name, part in self.learned.items():
            known = before.learned.get(name)
            if known is not None:
                try:
                    part.adopt(part.read(known.snapshot()))
                except ValueError:
                    continue  # it was learned in other units, so it is learned anew

    def refusal(self, request: Request, now: float, pressure: Pressure) -> Refused | None:
        """May this request not be queued? None: it may. Changes nothing: `push` counts what is queued."""
        return None

    @abstractmethod
    def push(self, request: Request, now: float, *, front: bool = False) -> None:
        """Queue the request. `front` puts a request that an engine refused back at the head of its flow.

        Before a request comes back, its final charge is zero.
        """

    @abstractmethod
    def pop(self, now: float, room: Room) -> Selection | Blocked | None:
        """Take out the next request that the room places. `Blocked`: the next one found no room. None: nothing
        waits.
        """

    @abstractmethod
    def remove(self, request: Request, now: float) -> None:
        """Take out a queued request that was cancelled or has expired."""

    @abstractmethod
    def charge(self, request: Request, service: ServiceTokens, now: float, *, final: bool) -> None:
        """Set the total service that a dispatched request has received so far (not the increment)."""

    def learn(self, request: Request, service: ServiceTokens, now: float) -> None:
        """An answer came whole, and took this much."""
        return

    @abstractmethod
    def explain(self, flow: Flow, now: float) -> dict[str, float]:
        """The numbers that decide this flow's place, by name. Changes nothing."""

    @abstractmethod
    def __len__(self) -> int:
        """Requests queued."""
