"""Least Counter First: virtual token counters without the lift, the baseline that shows what the lift is for."""

from __future__ import annotations

from dataclasses import dataclass

from policies.orders.cost import cost_of, cost_setting, input_weight_setting, output_weight_setting
from policies.orders.vtc import CounterOrder, predict_output_setting
from policies.queue.backlog import Backlog

__all__ = ["Lcf", "LcfParams"]


@dataclass(frozen=True, slots=True)
class LcfParams:
    """What is service, and is it charged ahead?"""

    cost: str = cost_setting()
    input_weight: float = input_weight_setting()
    output_weight: float = output_weight_setting()
    predict_output: bool = predict_output_setting()


class Lcf(CounterOrder):
    """Which flow has received least service ever? VTC whose flows bank credit while idle (VTC paper, section 5.1).

    No bound: a flow that was idle while another one received S is served alone until it has caught up with all of S. A
    flow forgotten beyond `flows_max` starts again at zero, like a new one.
    """

    def __init__(self, params: LcfParams | None = None, *, flows_max: int = 10_000) -> None:
        self._params = params = params or LcfParams()
        self._flows_max = flows_max
        cost = cost_of(params.cost, params.input_weight, params.output_weight)
        super().__init__(Backlog(flows_max=flows_max, lift=False), cost, predict_output=params.predict_output)

    def beside(self, engine: str) -> Lcf:
        return Lcf(self._params, flows_max=self._flows_max)
