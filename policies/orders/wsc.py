"""Weighted service counter: service in calls that are normal for their app (FairServe, section 4.3, equation 3).

Tenants are compared as in VTC, by plain service over weight. The (app, user) flows of one tenant are compared by

    sum over its calls of  (alpha * input + beta * system tokens + gamma * output) / w(app, stage)

So a user of an app with long prompts is not put behind a user of an app with short ones. w is learned
(`orders.profiles`), and is fixed for a request when it is queued. Service is charged at dispatch with the expected
output, as it streams beyond that, and corrected at the end. The paper charges at the end, so a burst passes before the
counter moves. Its priority factor E multiplies the cost of a user; here the tenant's weight divides it.

What is learned from a tenant never decides between tenants. Otherwise a tenant with long prompts would teach that long
prompts are normal, and a tenant that claims the heaviest app would be charged least. `WscParams.across_tenants`
compares tenants as the paper compares users, for tenants that trust each other.

Bound between tenants: that of VTC (`orders.vtc`), 2 (U + L). Between flows of one tenant, in normal calls:

    2 (U' + L),  U' = max over all dispatched of the sum of h / w  <=  max(h of a prompt, h of all) / least w

The proof is the same, with h / w for service. A flow is dispatched only when its counter is the least of those waiting.
From then on it grows by at most what it has dispatched, expected or true.
"""

from __future__ import annotations

from dataclasses import dataclass

from policies.orders.cost import CostParams, charged_input
from policies.orders.profiles import CostProfiles
from policies.orders.vtc import CounterOrder, window_tokens_setting
from policies.queue.backlog import Backlog
from policies.request import Request, ServiceTokens
from policies.settings import setting


@dataclass(frozen=True, slots=True)
class WscParams(CostParams):
    """Settings of `Wsc`: the cost by which tenants are compared, and that by which the flows of a tenant are.

    alpha, beta and gamma are 1, 2 and 1 as printed, for input, system and output tokens, "following OpenAI
    conventions". Those conventions charge more for output than for input, so beta and gamma may be swapped in print.

    Attributes:
        across_tenants: also compare tenants in normal calls, as the paper compares all users. Normal calls are then
            learned from all tenants together, and a tenant can gain by claiming a heavier app.
    """

    alpha: float = setting(
        1.0, "Weight of input tokens in the normal cost of an app's calls at one stage.", above=0, most=1000
    )
    beta: float = setting(
        2.0,
        "Weight of system tokens. The paper prints 1, 2, 1, and may have meant 2 for the output (gamma).",
        least=0,
        most=1000,
    )
    gamma: float = setting(1.0, "Weight of output tokens.", least=0, most=1000)
    across_tenants: bool = False
    window_tokens: float = window_tokens_setting()
    window_calls: float = setting(
        1.0, "Normal calls by which a user may go ahead of the tenant's other users in that way.", least=0, most=1e6
    )


class Wsc(CounterOrder):
    """Tenants by least service; flows within a tenant by service normalized by the app's usual call."""

    knows_interactions = True

    def __init__(self, params: WscParams | None = None, *, flows_max: int = 10_000) -> None:
        params = params or WscParams()
        self._is_across = across = params.across_tenants
        self._cached_weight = params.cached_weight
        windows = (params.window_calls if across else params.window_tokens, params.window_calls)
        super().__init__(params, flows_max, Backlog(flows_max=flows_max, windows=windows))
        self.charges_ahead = True
        calls = (params.alpha, params.beta, params.gamma)
        self.units = (calls if across else self._cost, calls)
        self.profiles = CostProfiles(calls, populations_max=max(1, flows_max // 4))
        self.learned = {"profiles": self.profiles}

    def share_state(self, other: CounterOrder) -> None:
        """Share the profiles too: a normal call does not depend on the queue."""
        super().share_state(other)
        if isinstance(other, Wsc):
            self.profiles = other.profiles

    def push(self, request: Request, now: float, *, front: bool = False) -> None:
        self._queue(request, front=front)

    def _queue(self, request: Request, *, front: bool, is_inside: bool = False, goes_first: bool = False) -> None:
        """Queue the request (`Backlog.push`), and fix the cost of a normal call for it."""
        progress, flow = request.progress, request.flow
        if not progress.norm:
            progress.norm = self.profiles.norm("" if self._is_across else flow.tenant, flow.app, progress.stage)
        self._backlog.push(request, front=front, is_inside=is_inside, goes_first=goes_first)

    def charge(self, request: Request, service: ServiceTokens, now: float, *, final: bool) -> None:
        progress = request.progress
        if not final and service.output < progress.output_tokens_expected:
            service = ServiceTokens(service.prompt, round(progress.output_tokens_expected), service.cached)
        prompt = round(charged_input(service, self._cached_weight)) if service.cached else service.prompt
        cost = self.profiles.cost(prompt, min(request.system_tokens, prompt), service.output)
        normalised = cost / progress.norm
        self._backlog.charge(request, normalised if self._is_across else self._cost(service), normalised)
        if final:
            self._end(request, service, now)

    def learn(self, request: Request, service: ServiceTokens, now: float) -> None:
        flow = request.flow
        cost = self.profiles.cost(service.prompt, min(request.system_tokens, service.prompt), service.output)
        self.profiles.learn("" if self._is_across else flow.tenant, flow.app, request.progress.stage, cost)
