"""Weighted service counter: service in calls that are normal for their app (FairServe, section 4.3, equation 3).

Tenants are compared as in VTC, by plain service over weight. The (app, user) flows of one tenant are compared by

    sum over its calls of  (alpha * input + beta * system tokens + gamma * output) / w(app, stage)

so that a user of an app with long prompts is not behind one whose app has short ones. w is learned
(`orders.profiles`) and fixed for a request when it is queued. Service is charged at dispatch with the expected
output, as it streams beyond that, and settled with the truth; the paper charges at the end, and lets a burst pass
before the counter moves. Its priority factor E multiplies the cost of a user; here the tenant's weight divides it.

What tenants teach never decides between tenants: whoever writes long prompts would teach that long prompts are normal,
and whoever claims the heaviest app would be charged least. `WscSettings.across_tenants` compares tenants as the paper
compares users, for those who trust each other.

Bound between tenants: that of VTC (`orders.vtc`), 2U. Between flows of one tenant, in normal calls:

    2 U',  U' = max over what may be dispatched at once of the sum of h / w  <=  max(h of a prompt, h of all) / least w

by the same proof, with h / w for service: a flow is dispatched only when its counter is the least of those waiting, and
from then on grows by at most what it has dispatched, expected or true.
"""

from __future__ import annotations

from policies.orders.cost import Cost
from policies.orders.profiles import Profiles, WscSettings
from policies.orders.vtc import Vtc
from policies.plain_data import fields
from policies.request import Request, ServiceTokens

__all__ = ["Wsc", "WscSettings"]


class Wsc(Vtc):
    """Which user has received least of what is normal for what they use?"""

    def __init__(
        self,
        settings: WscSettings | None = None,
        *,
        cost: Cost | None = None,
        flows_max: int = 10_000,
        leads: tuple[float, float] | None = None,
    ) -> None:
        super().__init__(cost=cost, predict_output=True, flows_max=flows_max, leads=leads)
        self.settings = settings or WscSettings()
        self.profiles = Profiles(self.settings, populations_max=flows_max)

    def push(self, request: Request, now: float, *, front: bool = False, leads: bool = True) -> None:
        if not front:
            request.norm = self.profiles.norm(self._scope(request), request.flow.app, request.stage)
        self._backlog.push(request, front=front, leads=leads)

    def charge(self, request: Request, service: ServiceTokens, now: float, *, final: bool) -> None:
        prompt, output = service.prompt, service.output
        if not final and output < request.output_tokens_expected:
            output = round(request.output_tokens_expected)
            service = ServiceTokens(prompt, output, service.cached)
        normalised = self.profiles.worth(prompt, min(request.system_tokens, prompt), output) / request.norm
        plain = normalised if self.settings.across_tenants else self._cost(service)
        self._backlog.charge(request, plain, normalised)
        if final:
            self._backlog.end(request)

    def learn(self, request: Request, service: ServiceTokens, now: float) -> None:
        worth = self.profiles.worth(service.prompt, min(request.system_tokens, service.prompt), service.output)
        self.profiles.learn(self._scope(request), request.flow.app, request.stage, worth)

    def snapshot(self) -> dict[str, object]:
        return {"profiles": self.profiles.snapshot()}

    def restore(self, learned: object) -> None:
        (profiles,) = fields(learned, "profiles")
        self.profiles.restore(profiles)

    def adopt(self, learned: object) -> None:
        (profiles,) = fields(learned, "profiles")
        self.profiles.adopt(profiles)

    def _scope(self, request: Request) -> str:
        return "" if self.settings.across_tenants else request.flow.tenant
