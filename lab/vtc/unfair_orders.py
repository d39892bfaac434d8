"""The baselines of the papers that no operator needs: counters without the lift, and flat limits of requests."""

from __future__ import annotations

from collections import defaultdict, deque
from functools import partial
from typing import Any, Self

from lab.experiment import require_source
from policies.orders.fcfs import Fcfs
from policies.orders.vtc import CounterOrder, CounterParams
from policies.queue.backlog import Backlog
from policies.queue.counters import CounterMember, Counters
from policies.request import Limit, Pressure, Rejection, RejectReason, Request

WINDOW_S = 60.0


class Lcf(CounterOrder):
    """Least Counter First: VTC whose flows bank credit while idle (VTC paper, section 5.1). It has no bound."""

    def __new__(cls, *_args: object, **_options: object) -> Self:
        """Create an order. Raise FromSourceError where its base class is compiled."""
        require_source()
        return super().__new__(cls)

    def __init__(self, params: CounterParams | None = None, *, flows_max: int = 10_000) -> None:
        params = params or CounterParams()
        super().__init__(params, flows_max, Backlog(flows_max=flows_max))
        self.charges_ahead = params.predict_output

    def push(self, request: Request, now: float, *, front: bool = False) -> None:
        super().push(request, now, front=front)
        flow = self._backlog.flow(request.flow)
        assert flow is not None
        _undo_lift(flow.tenant.line, flow.tenant)
        _undo_lift(flow.tenant.flows, flow)


def _undo_lift(counters: Counters[Any], member: CounterMember) -> None:
    counters.charged(member, -member.lifted)
    counters.unconfirmed.pop(member.name, None)
    member.lifted, member.is_sole = 0.0, False


class Rpm(Fcfs):
    """Requests per minute: a flat limit for each tenant, then first come, first served.

    The window slides over the admitted requests. Rejected requests do not count, and a request that a backend sent back
    is not counted again.
    """

    def __new__(cls, *_args: object, **_options: object) -> Self:
        """Create an order. Raise FromSourceError where its base class is compiled."""
        require_source()
        return super().__new__(cls)

    def __init__(self, requests_per_minute: int) -> None:
        super().__init__()
        self._limit = requests_per_minute
        self._admitted_s: defaultdict[str, deque[float]] = defaultdict(partial(deque, maxlen=requests_per_minute))
        """Times of each tenant's last admitted requests."""

    def find_rejection(self, request: Request, now: float, pressure: Pressure) -> Rejection | None:
        admitted_s = self._admitted_s[request.flow.tenant]
        opens_in_s = admitted_s[0] + WINDOW_S - now if len(admitted_s) == self._limit else 0.0
        if opens_in_s <= 0.0:
            return None
        return Rejection(RejectReason.RATE_LIMITED, opens_in_s, Limit("requests", self._limit, 0, opens_in_s, WINDOW_S))

    def push(self, request: Request, now: float, *, front: bool = False) -> None:
        super().push(request, now, front=front)
        if not front:
            self._admitted_s[request.flow.tenant].append(now)
