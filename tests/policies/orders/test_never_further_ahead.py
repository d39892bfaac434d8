"""Nobody is worse off than under plain VTC by more than the window, whatever happens: who goes next is never further
ahead of one that waits. Where turns are in rounds, a quantum is the window.
"""

from __future__ import annotations

import pytest
from hypothesis import given, settings

from policies.orders.vtc import CounterOrder
from policies.request import Request
from tests.policies.making import make_request, policy_with
from tests.policies.orders.claims import Action, Trace, actions

SETTINGS = {"window_tokens": 100.0, "window_calls": 3.0, "quantum": 100.0, "cached_weight": 0.1}


class Ahead(Trace):
    """Requests of some tenants and users, inside interactions or not, about texts that engines cache."""

    def request(self, who: int, number: int) -> Request:
        request = make_request(
            self.tenant(who), id=str(self.pushed), user="uvw"[number % 3], weight=(0.5, 1.0, 3.0, 1.0)[who],
            prompt=(1, 20, 90)[number % 7 % 3], expected=10.0 * (number % 2),
            prefix=tuple(hash((number % 5 % 3, block)) for block in range((0, 4, 8)[number % 11 % 3])),
        )  # fmt: skip
        request.progress.inside = number % 13 < 5
        return request

    def chosen(self, request: Request) -> None:
        order = request.progress.order
        backlog = order.backlog
        own, slack = backlog.flow(request.flow), backlog.quantum + 1e-6
        for other in self.queued:
            theirs = backlog.flow(other.flow)
            assert own.tenant.counter <= theirs.tenant.counter + backlog.tenants.window + slack
            if own.tenant is theirs.tenant:
                assert own.counter <= theirs.counter + own.tenant.flows.window + slack


@pytest.mark.parametrize("name", ["vtc", "wsc", "fairserve", "rr", "dlpm", "d2lpm"])
@settings(max_examples=100)
@given(trace=actions)
def test_who_goes_is_ahead_of_nobody_that_waits_by_more_than_the_window(name: str, trace: list[Action]) -> None:
    Ahead(policy_with(name, **SETTINGS)).run(trace)
