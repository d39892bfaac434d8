"""Who goes next? The policy protocol, its numbered contract, and the values that pass through it.

A policy orders requests; it holds no capacity, time, socket or randomness. The `AdmissionEngine` asks it for the next
request and tells it what each request is known to have cost.

Contract (tests/policies/test_contract.py runs every clause over every registered policy):

P1  Work conserving: if some queued request is eligible and the view places whatever it is offered, `pop` returns one.
    A policy that holds requests for time declares when in `next_eligible`. Otherwise GPUs idle while users wait.
P2  Deterministic: the same calls give the same answers, whatever the hash seed. Otherwise the simulation lies.
P3  Exactly once: every pushed request leaves by `pop` or by `remove`, never by both.
P4  A request removed before dispatch has charged nothing; one that ends after dispatch keeps what was charged.
P5  Idle flows bank no credit: a flow that returns is served as if it had been present, within the bound of the policy.
P6  Estimates are trued up: after the final charge, counters are what an oracle would have charged.
P7  Memory is O(queued + running + `flows_max`): beyond so many, the flows that have been idle longest are forgotten.
P8  `pop` and `push` are O(log flows); `charge` is O(1).
P9  The service bound that the policy's docstring states holds on every trace.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Protocol

from policies.request import Flow, Pressure, Refused, Request, ServiceTokens

if TYPE_CHECKING:
    from policies.limits.sliding_counts import SlidingCounts
    from policies.queue.backlog import Backlog

__all__ = ["ClusterView", "Policy", "Selection"]


class ClusterView(Protocol):
    """Where would this request fit now?"""

    def place(self, request: Request) -> str | None:
        """Name of the backend that can start it now, or None."""

    def fits(self, request: Request, backend: str) -> bool:
        """Can this backend start it now? For a policy that chooses the backend itself."""

    def loads(self) -> dict[str, int]:
        """Requests dispatched to each backend in service, by its name."""


@dataclass(slots=True, init=False)
class Selection:
    """What goes next, and where?"""

    request: Request
    backend: str

    def __init__(self, request: Request, backend: str) -> None:
        self.request = request
        self.backend = backend


class Policy(ABC):
    """Which request is served next, and where? A policy that learns what is normal overrides the last three."""

    reads_prefixes: ClassVar[bool] = False
    """Requests are to come with the hashes of their prompt's blocks."""

    @abstractmethod
    def refusal(self, request: Request, now: float, pressure: Pressure) -> Refused | None:
        """May an arriving request not be queued? None: it may. Changes nothing: what is queued is counted by `push`."""

    @abstractmethod
    def push(self, request: Request, now: float, *, front: bool = False) -> None:
        """Queue it; `front` puts a request that a backend refused back at the head of its flow.

        A request that comes back was charged nothing, finally, before it is pushed.
        """

    @abstractmethod
    def pop(self, now: float, view: ClusterView) -> Selection | None:
        """Take out the next request that the view places, or None if the next one in order has no room."""

    @abstractmethod
    def remove(self, request: Request, now: float) -> None:
        """Take out a queued request that was cancelled or has expired."""

    @abstractmethod
    def charge(self, request: Request, service: ServiceTokens, now: float, *, final: bool) -> None:
        """The service that a dispatched request has received is now this much in all (not: more)."""

    @abstractmethod
    def next_eligible(self, now: float) -> float | None:
        """When will time alone make a queued request eligible? None: nothing waits for time."""

    @abstractmethod
    def explain(self, flow: Flow, now: float) -> dict[str, float]:
        """The numbers that decide this flow's place, by name."""

    @abstractmethod
    def __len__(self) -> int:
        """Requests queued."""

    def backlog(self) -> Backlog | None:
        """The counters that gateways share; None: it has none, or some for each backend."""
        return None

    def share_counts(self, epoch_s: float) -> list[SlidingCounts]:
        """From now on there may be other gateways that count the same, by a clock that is so much ahead: what is it?"""
        return []

    def learn(self, request: Request, service: ServiceTokens, now: float) -> None:
        """An answer came whole, and took this much."""
        return

    def snapshot(self) -> dict[str, Any]:
        """What was learned, as plain data that JSON can hold; empty if nothing ever is."""
        return {}

    def restore(self, learned: Any) -> None:
        """Go on from a snapshot. ValueError if it is none; then nothing has changed."""
        return

    def adopt(self, learned: Any) -> None:
        """Take from a snapshot of another gateway what it has seen more of. ValueError if it is none."""
        return
