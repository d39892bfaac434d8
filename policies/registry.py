"""Which policies are there? One entry each: its name in the YAML, and how it is made."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from policies.base import Policy
from policies.cost import LinearCost
from policies.fcfs import Fcfs
from policies.vtc import Vtc

__all__ = ["POLICIES", "PolicyParams"]


@dataclass(frozen=True, slots=True)
class PolicyParams:
    """What may be set for a policy; each takes what concerns it."""

    input_weight: float = 1.0
    output_weight: float = 2.0
    predict_output: bool = False
    flows_max: int = 10_000


def _vtc(params: PolicyParams) -> Policy:
    return Vtc(
        cost=LinearCost(params.input_weight, params.output_weight),
        predict_output=params.predict_output,
        flows_max=params.flows_max,
    )


POLICIES: dict[str, Callable[[PolicyParams], Policy]] = {
    "fcfs": lambda params: Fcfs(),
    "vtc": _vtc,
}
