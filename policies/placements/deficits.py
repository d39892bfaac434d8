"""The placement of Double Deficit Longest Prefix Match (D2LPM): which backend gets this request?

("Locality-aware Fair Scheduling in LLM Serving", arXiv 2501.14312, algorithm 2.) A request goes to the backend that has
most of its prompt cached, as long as its tenant has deficit left there. A prompt also counts as cached where a request
with the same beginning already waits. Otherwise the request goes to a backend where the tenant has deficit left. Ties
go to the backend with the fewest requests, running or waiting.

Input is charged to that deficit in full at placement, output at the end. When a tenant has no deficit left anywhere,
all of its backends get as many quanta (times its weight) as are needed. So `backend_quantum` limits how long a tenant
stays at one backend. An infinite one is unfair (theorem A.5).

D2LPM is this placement together with the order `dlpm` in the queue of each backend. One rule is not in the paper: an
idle engine takes a request that waits elsewhere.

Bound (theorems 5.1 and 5.2): two tenants that both have requests waiting at every backend receive extend service, per
weight, that differs by at most 2 W (U + Q) over W backends, with U and Q as in `orders.dlpm`. `backend_quantum` is not
in it. The paper assumes that a backlogged tenant waits everywhere; a few requests may all be placed at one backend.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass

from policies.placements.placement import Assignment
from policies.placements.prefix_index import PrefixIndex
from policies.recent import touch
from policies.request import Request, ServiceTokens
from policies.settings import setting


@dataclass(frozen=True, slots=True)
class DeficitParams:
    """Settings of `ByDeficits`: the cost of service, and the quantum of a tenant at one backend.

    The default quantum is some tens of long prompts. Placement charges input in full, so a smaller quantum drives a
    tenant away from its cache.
    """

    input_weight: float = 1.0
    output_weight: float = 2.0
    backend_quantum: float = setting(
        1_000_000.0, "Service that a tenant receives at one backend before others are tried.", least=1, most=1e9
    )


class ByDeficits(Assignment):
    """The assignment to the longest cached prefix, limited by a deficit of each tenant at each backend.

    Bounded: beyond `flows_max` tenants, the least recently used is forgotten.
    """

    reads_prefixes = True
    idle_takes = True

    def __init__(
        self, params: DeficitParams | None = None, *, prefixes: PrefixIndex | None = None, flows_max: int = 10_000
    ) -> None:
        self._params = params or DeficitParams()
        self._tenants_max = flows_max
        self._tenants: OrderedDict[str, dict[str, float]] = OrderedDict()
        """Service that each tenant may still send to each backend; negative for debt."""

    def assign(self, request: Request, loads: Mapping[str, int], depths: Mapping[str, int]) -> str:
        candidates = self._entitled(request.flow.tenant, request.weight, sorted(loads))
        if depths:
            longest = max(depths.values())
            candidates = [name for name in candidates if depths[name] == longest] or candidates
        return min(candidates, key=lambda name: loads[name])

    def moved(self, request: Request, before: str | None, after: str | None) -> None:
        tenant, service = request.flow.tenant, self._params.input_weight * request.prompt_tokens
        if before is not None:
            self._charge(tenant, before, -service)
        if after is not None:
            self._charge(tenant, after, service)

    def ended(self, request: Request, engine: str, service: ServiceTokens) -> None:
        more_input = self._params.input_weight * (service.prompt - request.prompt_tokens)
        self._charge(request.flow.tenant, engine, more_input + self._params.output_weight * service.output)

    def charged_elsewhere(self, tenant: str, engine: str, service: float) -> None:
        # Refills need not be reported: each gateway derives them from the charges.
        deficits = self._of(tenant)
        deficits[engine] = deficits.get(engine, 0.0) - service

    def explain(self, tenant: str) -> dict[str, float]:
        """Return the tenant's deficit at each engine."""
        return {f"deficit_at_{name}": left for name, left in sorted(self._tenants.get(tenant, {}).items())}

    def _charge(self, tenant: str, engine: str, service: float) -> None:
        self.charged_elsewhere(tenant, engine, service)
        if self.on_charged is not None:
            self.on_charged(tenant, engine, service)

    def _entitled(self, tenant: str, weight: float, backends: list[str]) -> list[str]:
        """Return the backends at which the tenant has deficit left, refilled as often as needed. Never empty."""
        deficits = self._of(tenant)
        left = [name for name in backends if deficits.get(name, 0.0) > 0]
        if left:
            return left
        best = max([deficits.get(name, 0.0) for name in backends])
        quantum = self._params.backend_quantum * weight
        refill = quantum * (-best // quantum + 1)
        for name in backends:
            deficits[name] = deficits.get(name, 0.0) + refill
        left = [name for name in backends if deficits[name] > 0]
        # If the debt is far larger than the quantum, rounding may leave no positive deficit.
        return left or [max(backends, key=lambda name: deficits[name])]

    def _of(self, tenant: str) -> dict[str, float]:
        return touch(self._tenants, tenant, dict, self._tenants_max)
