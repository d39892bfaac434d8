"""Nobody is worse off than under plain VTC by more than the window, whatever happens: who goes next is never further
ahead of one that waits. Where turns are in rounds, a quantum is the window.
"""

from __future__ import annotations

from random import Random

import pytest

from policies.admission.policy import Policy
from policies.orders.order import Selection
from policies.orders.vtc import CounterOrder
from policies.request import Request, ServiceTokens
from tests.policies.making import Room, make_request, policy_with

SETTINGS = {"window_tokens": 100.0, "window_calls": 3.0, "quantum": 100.0, "cached_weight": 0.1}
WAITING_MAX = 40


class Service:
    """Requests of some tenants and users come, go, stream, are refused and end, in any order."""

    def __init__(self, name: str, seed: int) -> None:
        self.random = Random(seed)
        self.policy: Policy = policy_with(name, **SETTINGS)
        self.weights = {tenant: self.random.choice([0.5, 1.0, 3.0]) for tenant in "abcd"}
        self.waiting: list[Request] = []
        self.running: list[tuple[Request, int]] = []

    def step(self) -> None:
        kind = self.random.random()
        if kind < 0.4 and len(self.waiting) < WAITING_MAX:
            self.comes()
        elif kind < 0.6 and self.waiting:
            self.goes()
        elif self.running:
            self.goes_on(self.random.randrange(len(self.running)), self.random.random())

    def comes(self) -> None:
        rng = self.random
        tenant = rng.choice("aaabcd")
        text, blocks = rng.choice("xyz"), rng.choice([0, 4, 8])
        request = make_request(
            tenant, user=rng.choice("uvw"), weight=self.weights[tenant], prompt=rng.choice([1, 20, 90]),
            expected=rng.choice([0.0, 10.0]), prefix=tuple(hash((ord(text), block)) for block in range(blocks)),
        )  # fmt: skip
        request.progress.inside = rng.random() < 0.4
        self.policy.push(request, 0.0)
        self.waiting.append(request)

    def goes(self) -> None:
        selection = self.policy.pop(0.0, Room())
        assert isinstance(selection, Selection)
        request = selection.request
        self.waiting.remove(request)
        self.check(request)
        self.charge(request, ServiceTokens(request.prompt_tokens, 0), final=False)
        self.running.append((request, 0))

    def goes_on(self, which: int, how: float) -> None:
        request, output = self.running.pop(which)
        if how < 0.1:  # its engine refused it
            self.charge(request, ServiceTokens(0, 0), final=True)
            self.policy.push(request, 0.0, front=True)
            self.waiting.append(request)
            return
        output += self.random.randint(0, 9)
        self.charge(request, ServiceTokens(request.prompt_tokens, output), final=how < 0.5)
        if how >= 0.5:
            self.running.append((request, output))

    def charge(self, request: Request, service: ServiceTokens, *, final: bool) -> None:
        self.policy.charge(request, service, 0.0, final=final)

    def check(self, request: Request) -> None:
        order = request.progress.order
        assert isinstance(order, CounterOrder)
        backlog = order.backlog
        assert backlog is not None
        own, slack = backlog.flow(request.flow), backlog.quantum + 1e-6
        assert own is not None
        for other in self.waiting:
            theirs = backlog.flow(other.flow)
            assert theirs is not None
            assert own.tenant.counter <= theirs.tenant.counter + backlog.tenants.window + slack
            if own.tenant is theirs.tenant:
                assert own.counter <= theirs.counter + own.tenant.flows.window + slack


@pytest.mark.parametrize("name", ["vtc", "wsc", "fairserve", "lcf", "rr", "dlpm", "d2lpm"])
def test_who_goes_is_ahead_of_nobody_that_waits_by_more_than_the_window(name: str) -> None:
    for seed in range(20):
        service = Service(name, seed)
        for _ in range(200):
            service.step()
