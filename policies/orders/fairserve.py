"""FairServe: least-served first, calls of open interactions before others, and starts throttled only under overload.

The order is that of WSC (`orders.wsc`), with leads. A tenant that has a call inside an open interaction waiting goes
before others until it has received `lead_tokens` more than they have, per weight. A flow with such a call goes before
the tenant's other flows until it is `lead_calls` normal calls ahead. A lead can be used once, because what is received
with it counts. So keeping interactions open does not raise anyone's fair share. Starts are refused as described in
`policies.limits.throttle`.

Bound, with U of VTC between tenants and U' of WSC between flows: service over any interval in which two are backlogged
differs by at most 2 (U + lead). Proof sketch in docs/policies/fairserve.md.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Final

from policies.limits.ceilings import ThrottleSettings
from policies.limits.throttle import Throttle
from policies.orders.contract import Order
from policies.orders.profiles import Profiles
from policies.orders.wsc import Wsc, WscParams
from policies.request import Flow, Pressure, Refused, Request, ServiceTokens
from policies.settings import setting

__all__ = ["LEAD_CALLS", "LEAD_TOKENS", "FairServe", "FairServeParams"]

LEAD_TOKENS: Final = 8192.0
LEAD_CALLS: Final = 4.0


@dataclass(frozen=True, slots=True)
class FairServeParams(WscParams):
    """What is service, what is a call worth, how far may an interaction go ahead, and who is throttled?

    Attributes:
        throttle: limits at the start of an interaction, which apply while the KV cache is overloaded.
    """

    lead_tokens: float = setting(
        LEAD_TOKENS,
        "Tokens that a tenant's calls inside interactions may receive ahead of other tenants, once.",
        least=0,
        most=1e9,
    )
    lead_calls: float = setting(
        LEAD_CALLS,
        "The lead of one user's calls inside interactions over the tenant's other users, in normal calls.",
        least=0,
        most=1e6,
    )
    throttle: ThrottleSettings = field(default_factory=ThrottleSettings)

    def __post_init__(self) -> None:
        if not (self.lead_tokens >= 0 and self.lead_calls >= 0):
            raise ValueError(
                f"fairserve: a lead cannot be negative: {self.lead_tokens} tokens, {self.lead_calls} calls"
            )


class FairServe(Wsc):
    """Which tenant and flow is owed most, whose interaction is open, and which starts are refused now?"""

    def __init__(
        self,
        params: FairServeParams | None = None,
        *,
        flows_max: int = 10_000,
        profiles: Profiles | None = None,
        throttle: Throttle | None = None,
    ) -> None:
        """`profiles` and `throttle`: given where several queues learn what is usual together."""
        self._fairserve = params = params or FairServeParams()
        leads = (params.lead_calls if params.across_tenants else params.lead_tokens, params.lead_calls)
        super().__init__(params, flows_max=flows_max, leads=leads, profiles=profiles)
        self.throttle = throttle if throttle is not None else Throttle(params.throttle, members_max=flows_max)
        self.learned = {"profiles": self.profiles, "throttle": self.throttle}
        self.counts = self.throttle.counts

    def beside(self, engine: str) -> FairServe:
        return FairServe(self._fairserve, flows_max=self._flows_max, profiles=self.profiles, throttle=self.throttle)

    def resume(self, before: Order) -> None:
        super().resume(before)
        if isinstance(before, FairServe):
            self.throttle.resume(before.throttle)
            self.counts = self.throttle.counts

    def refusal(self, request: Request, now: float, pressure: Pressure) -> Refused | None:
        return self.throttle.refusal(request, now, pressure)

    def push(self, request: Request, now: float, *, front: bool = False) -> None:
        beyond = self.throttle.is_beyond(request, now) if front else self.throttle.count(request, now)
        # Requests beyond a limit are not cut inside an interaction, but they get no lead either.
        self.push_with_lead(request, front=front, leads=request.progress.inside and not beyond)

    def charge(self, request: Request, service: ServiceTokens, now: float, *, final: bool) -> None:
        super().charge(request, service, now, final=final)
        if final:
            self.throttle.settle(request, service, now)

    def explain(self, flow: Flow, now: float) -> dict[str, float]:
        numbers = super().explain(flow, now)
        return numbers | self.throttle.explain(flow, numbers.get("weight", 1.0), now)
