"""FairServe: least-served first, calls of open interactions before others, and starts throttled only under overload.

The order is that of WSC (`orders.wsc`), with one addition: while a tenant has a call inside an open interaction
waiting, it goes before others until it has received `lead_tokens` more than they, per weight; and so does a flow inside
its tenant, until it is `lead_calls` normal calls ahead. A lead is had once: what is received with it counts, so nobody
gets a larger share by keeping interactions open. Starts are refused as `policies.limits.throttle` says.

Bound, with U of VTC between tenants and U' of WSC between flows: service over any interval in which two are backlogged
differs by at most 2 (U + lead). Proof sketch in docs/policies/fairserve.md.
"""

from __future__ import annotations

from typing import Final

from policies.limits.ceilings import ThrottleSettings
from policies.limits.sliding_counts import SlidingCounts
from policies.limits.throttle import Throttle
from policies.orders.cost import Cost
from policies.orders.wsc import Wsc, WscSettings
from policies.plain_data import fields
from policies.request import Flow, Pressure, Refused, Request, ServiceTokens

__all__ = ["LEAD_CALLS", "LEAD_TOKENS", "FairServe"]

LEAD_TOKENS: Final = 8192.0
LEAD_CALLS: Final = 4.0


class FairServe(Wsc):
    """Who is owed most, whose interaction is open, and who may not start one now?"""

    def __init__(
        self,
        settings: WscSettings | None = None,
        throttle: ThrottleSettings | None = None,
        *,
        cost: Cost | None = None,
        flows_max: int = 10_000,
        lead_tokens: float = LEAD_TOKENS,
        lead_calls: float = LEAD_CALLS,
    ) -> None:
        settings = settings or WscSettings()
        if not (lead_tokens >= 0 and lead_calls >= 0):
            raise ValueError(f"fairserve: a lead cannot be negative: {lead_tokens} tokens, {lead_calls} calls")
        leads = (lead_calls if settings.across_tenants else lead_tokens, lead_calls)
        super().__init__(settings, cost=cost, flows_max=flows_max, leads=leads)
        self.throttle = Throttle(throttle, members_max=flows_max)

    def refusal(self, request: Request, now: float, pressure: Pressure) -> Refused | None:
        if not pressure.overloaded:
            return None
        return self.throttle.refusal(request, now, pressure, self._backlog.waiting_of(request.flow.tenant))

    def push(self, request: Request, now: float, *, front: bool = False, leads: bool = True) -> None:
        beyond = self.throttle.is_beyond(request, now) if front else self.throttle.count(request, now)
        # Those beyond their limits are not cut inside an interaction, but they go before nobody either.
        super().push(request, now, front=front, leads=leads and request.inside and not beyond)

    def charge(self, request: Request, service: ServiceTokens, now: float, *, final: bool) -> None:
        super().charge(request, service, now, final=final)
        if final:
            self.throttle.settle(request, service, now)

    def share_counts(self, epoch_s: float) -> list[SlidingCounts]:
        return self.throttle.share(epoch_s)

    def explain(self, flow: Flow, now: float) -> dict[str, float]:
        numbers = super().explain(flow, now)
        return numbers | self.throttle.explain(flow, numbers.get("weight", 1.0), now)

    def snapshot(self) -> dict[str, object]:
        return super().snapshot() | {"throttle": self.throttle.snapshot()}

    def restore(self, learned: object) -> None:
        (throttle,) = fields(learned, "throttle")
        before = self.snapshot()
        super().restore(learned)
        try:
            self.throttle.restore(throttle)
        except ValueError:
            super().restore(before)
            raise

    def adopt(self, learned: object) -> None:
        profiles, throttle = fields(learned, "profiles", "throttle")
        self.throttle.adopt(throttle)
        self.profiles.adopt(profiles)
