"""VTC, and what is made of it (LCF, round robin), serve in the order of the paper's algorithms, transcribed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given, settings

from lab.vtc.unfair_orders import Lcf
from policies.admission.named import named_policy
from policies.admission.policy import Policy
from policies.capacity.obstacle import Blocked
from policies.orders.cost import ProfiledCost
from policies.orders.order import Selection
from policies.request import Request, ServiceTokens
from tests.policies.making import Room, make_request
from tests.policies.orders.claims import Action, Trace, actions
from tests.reference.naive_vtc import NaiveVtc

PAIRS: dict[str, Callable[[], tuple[Policy, NaiveVtc]]] = {
    "vtc": lambda: (named_policy("vtc"), NaiveVtc()),
    "vtc, predicting": lambda: (named_policy("vtc", predict_output=True), NaiveVtc(predict_output=True)),
    "lcf": lambda: (Policy(Lcf()), NaiveVtc(lift=False)),
    "rr": lambda: (named_policy("rr", quantum=16.0), NaiveVtc(quantum=16.0)),
    "rr, predicting": lambda: (
        named_policy("rr", quantum=40.0, predict_output=True), NaiveVtc(quantum=40.0, predict_output=True)
    ),
}  # fmt: skip
NAMED = [name for name in PAIRS if name != "lcf"]
LCF = pytest.param("lcf", marks=pytest.mark.interpreted_only("extends a policy"))
# The paper sends no request back to the queue.
printed_actions = actions.map(lambda trace: [action for action in trace if action[0] != "return"])


class Both:
    """A policy and the printed algorithm, to which the same calls are made, and that must answer alike."""

    def __init__(self, fast: Policy, naive: NaiveVtc) -> None:
        self.fast = fast
        self.naive = naive

    def push(self, request: Request, now: float) -> None:
        self.fast.push(request, now)
        self.naive.push(request)

    def pop(self, now: float, room: Room) -> Selection | Blocked | None:
        selection, expected = self.fast.pop(now, room), self.naive.pop()
        assert (selection.request if isinstance(selection, Selection) else selection) is expected
        return selection

    def remove(self, request: Request, now: float) -> None:
        self.fast.remove(request, now)
        self.naive.remove(request)

    def charge(self, request: Request, service: ServiceTokens, now: float, *, final: bool) -> None:
        self.fast.charge(request, service, now, final=final)
        self.naive.charge(request, service, final=final)


@pytest.mark.parametrize("pair", [*NAMED, LCF])
@settings(max_examples=150)
@given(trace=printed_actions)
def test_serves_in_the_order_of_the_printed_algorithm(pair: str, trace: list[Action]) -> None:
    both: Any = Both(*PAIRS[pair]())
    Trace(both, weights=(1.0, 2.0, 4.0, 0.5)).run(trace)
    assert both.pop(0.0, Room()) is None
    assert len(both.fast) == 0


def test_the_profiled_cost_is_that_of_the_papers_tables() -> None:
    cost = ProfiledCost()
    assert cost(ServiceTokens(256, 256)) == pytest.approx(554.7, abs=0.1)
    assert cost(ServiceTokens(0, 0)) == 0.0, "what an engine refused costs nothing"
    policy = named_policy("vtc", cost="profiled")
    request = make_request("a", prompt=100)
    policy.push(request, 0.0)
    policy.pop(0.0, Room())
    for output in (0, 10, 20):
        policy.charge(request, ServiceTokens(100, output), 0.0, final=False)
        assert request.progress.charged == cost(ServiceTokens(100, output))
