"""The schedulers that DLPM and D2LPM are measured against (arXiv 2501.14312, section 6.1). For experiments only."""

from __future__ import annotations

from collections.abc import Mapping
from math import inf

from policies.admission.policy import AssignedPolicy, Policy
from policies.orders.dlpm import Dlpm, DlpmParams
from policies.orders.vtc import Vtc, VtcParams
from policies.placements.placement import Assignment
from policies.placements.prefix import ByPrefix
from policies.placements.prefix_index import PrefixIndex
from policies.request import Request

EXPLOIT_SHARE = 0.5
"""Preble goes where the prefix is when more of a prompt is cached there than has to be computed."""
NO_FAIRNESS = DlpmParams(quantum=inf)
"""Longest prefix match alone: with an infinite quantum all are in the same round for ever."""


def lpm() -> Policy:
    """Longest prefix match without fairness."""
    prefixes = PrefixIndex()
    return Policy(Dlpm(NO_FAIRNESS, prefixes=prefixes), ByPrefix(prefixes=prefixes), prefixes=prefixes)


class RoundRobin(Assignment):
    """Engines take turns, for all requests or (`per_tenant`) for those of each tenant."""

    def __init__(self, *, per_tenant: bool = False) -> None:
        self._per_tenant = per_tenant
        self._turns: dict[str, int] = {}

    def assign(self, request: Request, loads: Mapping[str, int], depths: Mapping[str, int]) -> str:
        whose = request.flow.tenant if self._per_tenant else ""
        # Tenants begin at different engines, or all of their first requests would go to the same one.
        turn = self._turns.get(whose, len(self._turns))
        self._turns[whose] = turn + 1
        return sorted(loads)[turn % len(loads)]


def round_robin_lpm() -> Policy:
    """Requests go round the engines; each engine serves the longest prefix first: SGLang's default."""
    prefixes = PrefixIndex()
    return AssignedPolicy(Dlpm(NO_FAIRNESS, prefixes=prefixes), RoundRobin(), prefixes=prefixes)


def vtc_round_robin() -> Policy:
    """Each tenant's requests go round the engines; each engine serves the least-served tenant first.

    As in the paper, cached input is charged in full; the gateway's own default is a tenth.
    """
    return AssignedPolicy(Vtc(VtcParams(cached_weight=1.0)), RoundRobin(per_tenant=True))


class Preble(Assignment):
    """Preble's rule of placement (arXiv 2407.00023).

    A request whose cached share exceeds a half goes to the least loaded of the engines that hold it (exploit), any
    other to the least loaded one (explore). Preble's migration of load and its queue of priorities are not modelled.
    """

    reads_prefixes = True

    def assign(self, request: Request, loads: Mapping[str, int], depths: Mapping[str, int]) -> str:
        engines = sorted(loads)
        longest = max(depths.values(), default=0)
        if longest > EXPLOIT_SHARE * len(request.prefix):
            engines = [name for name in engines if depths[name] == longest]
        return min(engines, key=lambda name: loads[name])


def preble() -> Policy:
    """Preble's placement, with longest prefix match at each engine."""
    prefixes = PrefixIndex()
    return AssignedPolicy(Dlpm(NO_FAIRNESS, prefixes=prefixes), Preble(), prefixes=prefixes)
