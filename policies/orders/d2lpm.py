"""Double Deficit Longest Prefix Match: which backend is this request for, and who goes next there?

("Locality-aware Fair Scheduling in LLM Serving", arXiv 2501.14312, algorithm 2.) Placement: a request goes where most
of its prompt is cached, or is about to be since one that begins alike waits there, as long as its tenant has deficit
left at that backend; otherwise where the tenant has some; ties go to the shortest queue. Input is charged to that
deficit in full when it is placed, output at the end; when a tenant has none left anywhere, all of its backends get a
quantum (times its weight), as many as are needed at once. So `backend_quantum` limits how long a tenant sticks to one
backend: an infinite one is unfair (theorem A.5).

Local order: each backend has a `Dlpm` of its own, see `placements.per_backend`. One rule is not in the paper: an idle
engine takes what waits elsewhere.

Bound (theorems 5.1 and 5.2): two tenants that both have requests waiting at every backend receive extend service, per
weight, that differs by at most 2 W (U + Q) over W backends, with U and Q as in `orders.dlpm`; `backend_quantum` is
not in it. The paper takes whoever is backlogged to wait everywhere; few requests may all be placed at one backend.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import Final

from policies.orders.cost import Cost, ExtendCost
from policies.orders.dlpm import Dlpm
from policies.placements.per_backend import PerBackend
from policies.placements.prefix_index import PrefixIndex
from policies.request import Flow, Request, ServiceTokens

__all__ = ["BACKEND_QUANTUM", "D2lpm"]

BACKEND_QUANTUM: Final = 1_000_000.0
"""Some tens of long prompts. Placement charges input in full, so a smaller one drives a tenant from its cache."""


class _Deficits:
    """How much may each tenant still send to each backend? The tenants unused for longest are forgotten."""

    def __init__(self, *, tenants_max: int, quantum: float) -> None:
        self._tenants_max = tenants_max
        self._quantum = quantum
        self._tenants: OrderedDict[str, dict[str, float]] = OrderedDict()

    def entitled(self, tenant: str, weight: float, backends: list[str]) -> list[str]:
        """The backends at which it has some left, after as many refills as that takes. Never empty."""
        deficits = self._of(tenant)
        left = [name for name in backends if deficits.get(name, 0.0) > 0]
        if left:
            return left
        best = max([deficits.get(name, 0.0) for name in backends])
        quantum = self._quantum * weight
        refill = quantum * (-best // quantum + 1)
        for name in backends:
            deficits[name] = deficits.get(name, 0.0) + refill
        left = [name for name in backends if deficits[name] > 0]
        # Of a debt far larger than the quantum, rounding may leave nothing to be positive.
        return left or [max(backends, key=lambda name: deficits[name])]

    def charge(self, tenant: str, backend: str, service: float) -> None:
        deficits = self._of(tenant)
        deficits[backend] = deficits.get(backend, 0.0) - service

    def explain(self, tenant: str) -> dict[str, float]:
        return {f"deficit_at_{name}": left for name, left in sorted(self._tenants.get(tenant, {}).items())}

    def _of(self, tenant: str) -> dict[str, float]:
        deficits = self._tenants.get(tenant)
        if deficits is None:
            deficits = self._tenants[tenant] = {}
            if len(self._tenants) > self._tenants_max:
                self._tenants.popitem(last=False)
        else:
            self._tenants.move_to_end(tenant)
        return deficits


class D2lpm(PerBackend[Dlpm]):
    """Where does a request find its prefix, without its tenant sticking there, and who is next at that backend?"""

    reads_prefixes = True

    def __init__(
        self,
        *,
        cost: Cost | None = None,
        quantum: float | None = None,
        backend_quantum: float | None = None,
        flows_max: int = 10_000,
    ) -> None:
        super().__init__(idle_takes=True)
        self.prefixes = PrefixIndex()
        self._cost = cost if cost is not None else ExtendCost()
        self._quantum = quantum
        self._flows_max = flows_max
        self._deficits = _Deficits(
            tenants_max=flows_max, quantum=BACKEND_QUANTUM if backend_quantum is None else backend_quantum
        )

    def charge(self, request: Request, service: ServiceTokens, now: float, *, final: bool) -> None:
        backend, _ = self._running[request.id]
        super().charge(request, service, now, final=final)
        if final:
            received = self._cost(ServiceTokens(service.prompt, service.output, 0))
            self._deficits.charge(request.flow.tenant, backend, received - self._input(request))

    def explain(self, flow: Flow, now: float) -> dict[str, float]:
        """As of all backends, and what its tenant has left at each."""
        return {**super().explain(flow, now), **self._deficits.explain(flow.tenant)}

    def remembered(self) -> int:
        """Tenants and flows in memory, over all backends."""
        return sum(local.remembered() for local in self._local.values())

    def _local_policy(self, backend: str) -> Dlpm:
        return Dlpm(
            cost=self._cost,
            quantum=self._quantum,
            flows_max=self._flows_max,
            prefixes=self.prefixes,
            backend=backend,
        )

    def _choose(self, request: Request, loads: dict[str, int]) -> str:
        candidates = self._deficits.entitled(request.flow.tenant, request.weight, sorted(loads))
        if request.prefix:
            cached = self.prefixes.depths(request.prefix)
            depths = {name: max(cached.get(name, 0), self._local[name].shared_depth(request)) for name in loads}
            longest = max(depths.values())
            candidates = [name for name in candidates if depths[name] == longest] or candidates
        chosen = candidates[0]
        for name in candidates:
            if loads[name] < loads[chosen]:
                chosen = name
        return chosen

    def _moved(self, request: Request, before: str | None, after: str | None) -> None:
        tenant, service = request.flow.tenant, self._input(request)
        if before is not None:
            self._deficits.charge(tenant, before, -service)
        if after is not None:
            self._deficits.charge(tenant, after, service)

    def _input(self, request: Request) -> float:
        return self._cost(ServiceTokens(request.prompt_tokens, 0, 0))
