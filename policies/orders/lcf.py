"""Least Counter First: virtual token counters without the lift, the baseline that shows what the lift is for."""

from __future__ import annotations

from policies.orders.cost import Cost
from policies.orders.vtc import Vtc

__all__ = ["Lcf"]


class Lcf(Vtc):
    """Who has received least service, ever? VTC (section 5.1) whose flows bank credit while they are idle.

    No bound: a flow that was idle while another received S is served alone until it has caught up with all of S.
    A flow forgotten beyond `flows_max` starts at nothing again, as one never seen.
    """

    def __init__(self, *, cost: Cost | None = None, predict_output: bool = False, flows_max: int = 10_000) -> None:
        super().__init__(cost=cost, predict_output=predict_output, flows_max=flows_max, lift=False)
