"""Which policies are there? One entry each: its name in the YAML, and how it is made."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Literal

from policies.limits.ceilings import ThrottleSettings
from policies.orders.contract import Policy
from policies.orders.cost import Cost, ExtendCost, LinearCost, ProfiledCost
from policies.orders.d2lpm import D2lpm
from policies.orders.dlpm import Dlpm
from policies.orders.fairserve import LEAD_CALLS, LEAD_TOKENS, FairServe
from policies.orders.fcfs import Fcfs
from policies.orders.lcf import Lcf
from policies.orders.rpm import Rpm
from policies.orders.rr import Rr
from policies.orders.vtc import Vtc
from policies.orders.wsc import Wsc, WscSettings

__all__ = ["POLICIES", "PolicyParams"]


@dataclass(frozen=True, slots=True)
class PolicyParams:
    """What may be set for a policy; each takes what concerns it. The YAML has the same names (`PolicyConfig`)."""

    cost: Literal["linear", "profiled"] = "linear"
    input_weight: float = 1.0
    output_weight: float = 2.0
    predict_output: bool = False
    quantum: float | None = None
    backend_quantum: float | None = None
    requests_per_minute: int = 30
    wsc: WscSettings = field(default_factory=WscSettings)
    throttle: ThrottleSettings = field(default_factory=ThrottleSettings)
    lead_tokens: float = LEAD_TOKENS
    lead_calls: float = LEAD_CALLS
    flows_max: int = 100_000


def _cost(params: PolicyParams) -> Cost:
    return ProfiledCost() if params.cost == "profiled" else LinearCost(params.input_weight, params.output_weight)


def _vtc(params: PolicyParams) -> Policy:
    return Vtc(cost=_cost(params), predict_output=params.predict_output, flows_max=params.flows_max)


def _lcf(params: PolicyParams) -> Policy:
    return Lcf(cost=_cost(params), predict_output=params.predict_output, flows_max=params.flows_max)


def _rr(params: PolicyParams) -> Policy:
    return Rr(
        cost=_cost(params),
        predict_output=params.predict_output,
        flows_max=params.flows_max,
        quantum=params.quantum,
    )


def _rpm(params: PolicyParams) -> Policy:
    return Rpm(requests_per_minute=params.requests_per_minute, flows_max=params.flows_max)


def _dlpm(params: PolicyParams) -> Policy:
    return Dlpm(
        cost=ExtendCost(params.input_weight, params.output_weight), quantum=params.quantum, flows_max=params.flows_max
    )


def _d2lpm(params: PolicyParams) -> Policy:
    return D2lpm(
        cost=ExtendCost(params.input_weight, params.output_weight),
        quantum=params.quantum,
        backend_quantum=params.backend_quantum,
        flows_max=params.flows_max,
    )


def _wsc(params: PolicyParams) -> Policy:
    return Wsc(params.wsc, cost=_cost(params), flows_max=params.flows_max)


def _fairserve(params: PolicyParams) -> Policy:
    return FairServe(
        params.wsc,
        params.throttle,
        cost=_cost(params),
        flows_max=params.flows_max,
        lead_tokens=params.lead_tokens,
        lead_calls=params.lead_calls,
    )


POLICIES: dict[str, Callable[[PolicyParams], Policy]] = {
    "fcfs": lambda params: Fcfs(),
    "rpm": _rpm,
    "lcf": _lcf,
    "rr": _rr,
    "vtc": _vtc,
    "dlpm": _dlpm,
    "d2lpm": _d2lpm,
    "wsc": _wsc,
    "fairserve": _fairserve,
}
