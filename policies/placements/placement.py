"""WHERE does a request go? The contract of a placement.

When a request can start, the placement chooses among the engines that have room. A placement never delays a request,
and asking it changes nothing. An `Assignment` decides earlier, when the request arrives. Each engine then has a queue
of its own.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar

from policies.capacity.ledger import BackendLedger
from policies.placements.prefix_index import PrefixIndex
from policies.request import Placed, Request, ServiceTokens

Choice = tuple[str, Placed]
"""The engine that gets a request, and why."""


class Placement(ABC):
    """A choice among the engines that can start a request now."""

    reads_prefixes: ClassVar[bool] = False
    """Requests must come with the hashes of their prompt's blocks."""

    def __init__(self, params: Any = None, *, prefixes: PrefixIndex | None = None, flows_max: int = 10_000) -> None:
        """Take the settings, the index of cached prefixes, and the most tenants that the placement remembers."""
        return

    @abstractmethod
    def choose(self, request: Request, engines: Sequence[BackendLedger]) -> Choice:
        """Return one of the engines, and why. `engines`: at least two, in no particular order."""


class Assignment(Placement):
    """A choice at arrival. The requests for an engine then wait in that engine's own queue."""

    idle_takes: ClassVar[bool] = False
    """An engine that runs nothing, and has nothing waiting, takes the next request of the longest queue."""
    on_charged: Callable[[str, str, float], None] | None = None
    """Callback with tenant, engine and service for each charge, if other gateways must know of charges."""

    @abstractmethod
    def assign(self, request: Request, loads: Mapping[str, int], depths: Mapping[str, int]) -> str:
        """Return the engine that gets the request.

        Args:
            loads: requests that run at each engine in service or wait for it; at least one engine.
            depths: leading blocks of the prompt that each of these engines holds, or will soon hold for a request that
                waits there; empty if the prompt is not known.
        """

    def choose(self, request: Request, engines: Sequence[BackendLedger]) -> Choice:
        """Return the only engine, to which the request was assigned at arrival."""
        return engines[0].name, Placed.ASSIGNED

    def moved(self, request: Request, before: str | None, after: str | None) -> None:
        """Count a request that was assigned (`before` is None), assigned again, or has left (`after` is None)."""
        return

    def ended(self, request: Request, engine: str, service: ServiceTokens) -> None:
        """Count a request that has run at this engine and received this service."""
        return

    def charged_elsewhere(self, tenant: str, engine: str, service: float) -> None:
        """Count service that another gateway charged the tenant at an engine."""
        return

    def explain(self, tenant: str) -> dict[str, float]:
        """Return the numbers that decide where this tenant's requests go, by name."""
        return {}
