"""Least Counter First: virtual token counters without the lift, the baseline that shows what the lift is for."""

from __future__ import annotations

from policies.orders.vtc import CounterOrder, CounterParams
from policies.queue.backlog import Backlog


class Lcf(CounterOrder):
    """The order by least service ever: VTC whose flows bank credit while idle (VTC paper, section 5.1).

    No bound: a flow that was idle while another flow received S is served alone until it has caught up with all of S.
    A flow forgotten beyond `flows_max` starts again at zero, like a new flow.
    """

    def __init__(self, params: CounterParams | None = None, *, flows_max: int = 10_000) -> None:
        params = params or CounterParams()
        backlog = Backlog(flows_max=flows_max, lift=False)
        super().__init__(params, flows_max, backlog, params.charges(), predict_output=params.predict_output)
