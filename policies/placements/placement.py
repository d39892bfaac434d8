"""WHERE does a request go? The contract of a placement.

A placement is asked when a request can start: which of the engines that have room gets it? It never delays a request,
and asking changes nothing. An `Assignment` decides earlier, when the request arrives. Each engine then has a queue of
its own.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar, Protocol

from policies.capacity.pace import Pace, UsualLoad
from policies.capacity.slots import Slots
from policies.placements.prefix_index import PrefixIndex
from policies.request import Placed, Request, ServiceTokens


class EngineLoad(Protocol):
    """How full is an engine, and how fast?"""

    @property
    def name(self) -> str: ...

    @property
    def slots(self) -> Slots: ...

    @property
    def pace(self) -> Pace: ...

    @property
    def usual(self) -> UsualLoad: ...

    @property
    def adapters(self) -> Mapping[str, int]:
        """Adapters that requests dispatched to it ask for, and how many do."""

    @property
    def prefill_tokens(self) -> int:
        """Prompt tokens that were dispatched to it, and that it must compute before another prompt."""

    def sequences_in_all(self) -> int:
        """Sequences that this gateway and others have dispatched to it."""

    def kv_fraction(self) -> float:
        """Largest occupancy of its KV cache that the dispatched requests are expected to reach (1.0 = full)."""


Choice = tuple[str, Placed]
"""Name of the engine that gets a request, and why."""


class Placement(ABC):
    """Which of the engines that can start a request now gets it?"""

    reads_prefixes: ClassVar[bool] = False
    """Requests must come with the hashes of their prompt's blocks."""

    def __init__(self, params: Any = None, *, prefixes: PrefixIndex | None = None, flows_max: int = 10_000) -> None:
        """`params`: its settings. `prefixes`: what engines have cached. `flows_max`: tenants that it remembers."""
        return

    @abstractmethod
    def choose(self, request: Request, engines: Sequence[EngineLoad]) -> Choice:
        """One of the engines. `engines`: at least one, in no particular order."""


class Assignment(Placement):
    """Which engine gets a request? Asked at arrival; the requests for an engine wait in that engine's own queue."""

    idle_takes: ClassVar[bool] = False
    """An engine that runs nothing, and has nothing waiting, takes the next request of the longest queue."""
    on_charged: Callable[[str, str, float], None] | None = None
    """Hears what a tenant was charged at an engine, where other gateways must know of it."""

    @abstractmethod
    def assign(self, request: Request, loads: Mapping[str, int], depths: Mapping[str, int]) -> str:
        """Name of the engine.

        Args:
            loads: requests that run at each engine in service or wait for it; at least one engine.
            depths: leading blocks of the prompt that each of these engines holds, or will soon hold for a request that
                waits there; empty if the prompt is not known.
        """

    def choose(self, request: Request, engines: Sequence[EngineLoad]) -> Choice:
        """The request was assigned already: there is one engine."""
        return engines[0].name, Placed.ASSIGNED

    def moved(self, request: Request, before: str | None, after: str | None) -> None:
        """The request moved from engine `before` (None: it was not assigned) to `after` (None: it has left)."""
        return

    def ended(self, request: Request, engine: str, service: ServiceTokens) -> None:
        """The request ran at this engine, and received this much."""
        return

    def charged_elsewhere(self, tenant: str, engine: str, service: float) -> None:
        """Another gateway charged the tenant this much at an engine."""
        return

    def explain(self, tenant: str) -> dict[str, float]:
        """The numbers that decide where this tenant's requests go, by name."""
        return {}
