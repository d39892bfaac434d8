"""Requests per minute: a flat limit for each tenant, then first come, first served (the papers' baseline)."""

from __future__ import annotations

from collections import OrderedDict, deque
from dataclasses import dataclass

from policies.orders.fcfs import Fcfs
from policies.orders.order import Order
from policies.request import Limit, Pressure, Refusal, Refused, Request
from policies.settings import setting

WINDOW_S = 60.0


@dataclass(frozen=True, slots=True)
class RpmParams:
    """Settings of `Rpm`."""

    requests_per_minute: int = setting(
        30, "Requests of one tenant that are admitted in any 60 seconds.", least=1, most=100_000
    )


class Rpm(Fcfs):
    """The order of arrival, with a limit of admitted requests per tenant and minute, even if the engines are idle.

    The window slides over the admitted requests. Rejected requests do not count, and a request that a backend sent back
    is not counted again. Bounded: at most `requests_per_minute` times per tenant, and `flows_max` tenants. The tenants
    admitted longest ago are forgotten first.

    No bound on service: within its limit a tenant is served in order of arrival, whatever its requests cost.
    """

    def __init__(self, params: RpmParams | None = None, *, flows_max: int = 10_000) -> None:
        super().__init__()
        self._params = params or RpmParams()
        self._limit = self._params.requests_per_minute
        self._flows_max = flows_max
        self._admitted_s: OrderedDict[str, deque[float]] = OrderedDict()
        """Times of each tenant's last admitted requests. The tenant admitted longest ago comes first."""

    def beside(self, engine: str) -> Rpm:
        order = Rpm(self._params, flows_max=self._flows_max)
        order._admitted_s = self._admitted_s
        return order

    def resume(self, before: Order) -> None:
        super().resume(before)
        if isinstance(before, Rpm):
            self._admitted_s = OrderedDict(
                [(tenant, deque(times, maxlen=self._limit)) for tenant, times in before._admitted_s.items()]
            )

    def refusal(self, request: Request, now: float, pressure: Pressure) -> Refused | None:
        admitted_s = self._admitted_s.get(request.flow.tenant)
        if admitted_s is None or len(admitted_s) < self._limit:
            return None
        opens_in_s = admitted_s[0] + WINDOW_S - now
        if opens_in_s <= 0:
            return None
        return Refused(Refusal.RATE_LIMITED, opens_in_s, Limit("requests", self._limit, 0, opens_in_s, WINDOW_S))

    def push(self, request: Request, now: float, *, front: bool = False) -> None:
        super().push(request, now, front=front)
        if not front:
            self._count(request.flow.tenant, now)

    def _count(self, tenant: str, now: float) -> None:
        admitted_s = self._admitted_s.get(tenant)
        if admitted_s is None:
            admitted_s = self._admitted_s[tenant] = deque(maxlen=self._limit)
        else:
            self._admitted_s.move_to_end(tenant)
        admitted_s.append(now)
        while self._admitted_s:
            longest_ago_s = next(iter(self._admitted_s.values()))[-1]
            if len(self._admitted_s) <= self._flows_max and now - longest_ago_s < WINDOW_S:
                break
            self._admitted_s.popitem(last=False)
