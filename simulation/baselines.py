"""The schedulers that DLPM and D2LPM are measured against (arXiv 2501.14312, section 6.1). For experiments only."""

from __future__ import annotations

from collections.abc import Callable
from math import inf

from policies.orders.contract import Policy
from policies.orders.dlpm import Dlpm
from policies.orders.vtc import Vtc
from policies.placements.per_backend import PerBackend
from policies.placements.prefix_index import PrefixIndex
from policies.request import Request

__all__ = ["Preble", "RoundRobin", "lpm", "round_robin_lpm", "vtc_round_robin"]

EXPLOIT_SHARE = 0.5
"""Preble goes where the prefix is when more of a prompt is cached there than has to be computed."""


def lpm(prefixes: PrefixIndex | None = None, backend: str | None = None) -> Dlpm:
    """Longest prefix match without fairness: an infinite quantum, so that all are in the same round for ever."""
    return Dlpm(quantum=inf, prefixes=prefixes, backend=backend)


class RoundRobin(PerBackend[Policy]):
    """Backends take turns, for all requests or (`per_tenant`) for those of each tenant; `local` orders each queue."""

    def __init__(self, local: Callable[[str], Policy], *, per_tenant: bool = False) -> None:
        super().__init__(idle_takes=False)
        self._make_local = local
        self._per_tenant = per_tenant
        self._turns: dict[str, int] = {}

    def _local_policy(self, backend: str) -> Policy:
        return self._make_local(backend)

    def _choose(self, request: Request, loads: dict[str, int]) -> str:
        whose = request.flow.tenant if self._per_tenant else ""
        # Tenants begin at different backends, or all of their first requests would go to the same one.
        turn = self._turns.get(whose, len(self._turns))
        self._turns[whose] = turn + 1
        return sorted(loads)[turn % len(loads)]


def round_robin_lpm() -> RoundRobin:
    """Requests go round the backends, each of which serves the longest prefix first: SGLang's default."""
    prefixes = PrefixIndex()
    return RoundRobin(lambda backend: lpm(prefixes, backend))


def vtc_round_robin() -> RoundRobin:
    """Each tenant's requests go round the backends, each of which serves the least-served tenant first."""
    return RoundRobin(lambda backend: Vtc(), per_tenant=True)


class Preble(PerBackend[Dlpm]):
    """Preble's rule of placement (arXiv 2407.00023), with longest prefix match at each backend.

    A request whose cached share exceeds a half goes to the least loaded of the backends that hold it (exploit), any
    other to the least loaded one (explore). Preble's migration of load and its queue of priorities are not modelled.
    """

    def __init__(self) -> None:
        super().__init__(idle_takes=False)
        self._prefixes = PrefixIndex()

    def _local_policy(self, backend: str) -> Dlpm:
        return lpm(self._prefixes, backend)

    def _choose(self, request: Request, loads: dict[str, int]) -> str:
        backends = sorted(loads)
        if request.prefix:
            cached = self._prefixes.depths(request.prefix)
            depths = {name: max(cached.get(name, 0), self._local[name].shared_depth(request)) for name in loads}
            longest = max(depths.values())
            if longest > EXPLOIT_SHARE * len(request.prefix):
                backends = [name for name in backends if depths[name] == longest]
        return min(backends, key=lambda name: loads[name])
