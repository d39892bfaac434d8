"""VTC, and what is made of it (LCF, round robin), serve in the order of the paper's algorithms, transcribed."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from policies.admission.named import named_policy
from policies.admission.policy import Policy
from policies.orders.cost import ProfiledCost
from policies.orders.order import Selection
from policies.request import Request, ServiceTokens
from tests.policies.making import Room, make_request
from tests.reference.naive_vtc import NaiveVtc

WEIGHTS = {"a": 1.0, "b": 2.0, "c": 4.0}

PAIRS: dict[str, Callable[[], tuple[Policy, NaiveVtc]]] = {
    "vtc": lambda: (named_policy("vtc"), NaiveVtc()),
    "vtc, predicting": lambda: (named_policy("vtc", predict_output=True), NaiveVtc(predict_output=True)),
    "lcf": lambda: (named_policy("lcf"), NaiveVtc(lift=False)),
    "rr": lambda: (named_policy("rr", quantum=16.0), NaiveVtc(quantum=16.0)),
    "rr, predicting": lambda: (
        named_policy("rr", quantum=40.0, predict_output=True),
        NaiveVtc(quantum=40.0, predict_output=True),
    ),
}

Action = tuple[str, str, str, int]
actions = st.lists(
    st.tuples(
        st.sampled_from(["push", "push", "push", "pop", "pop", "output", "end", "remove"]),
        st.sampled_from(sorted(WEIGHTS)),
        st.sampled_from(["", "x", "y"]),
        st.integers(0, 60),
    ),
    min_size=20,
    max_size=120,
)


class Both:
    """The same calls to both, comparing what they answer."""

    def __init__(self, fast: Policy, naive: NaiveVtc) -> None:
        self.fast = fast
        self.naive = naive
        self.queued: list[Request] = []
        self.running: list[tuple[Request, int]] = []
        self.serial = 0

    def act(self, kind: str, tenant: str, user: str, number: int) -> None:
        if kind == "push":
            self.serial += 1
            request = make_request(
                tenant, id=str(self.serial), user=user, weight=WEIGHTS[tenant], prompt=number, expected=7 * number % 50
            )
            self.queued.append(request)
            self.fast.push(request, 0.0)
            self.naive.push(request)
        elif kind == "pop":
            self.pop()
        elif kind == "remove" and self.queued:
            request = self.queued.pop(number % len(self.queued))
            self.fast.remove(request, 0.0)
            self.naive.remove(request)
        elif kind in ("output", "end") and self.running:
            place = number % len(self.running)
            request, output = self.running.pop(place)
            service = ServiceTokens(request.prompt_tokens, output + number)
            if kind == "output":
                self.running.insert(place, (request, service.output))
            self.fast.charge(request, service, 0.0, final=kind == "end")
            self.naive.charge(request, service, final=kind == "end")

    def pop(self) -> None:
        expected = self.naive.pop()
        selection = self.fast.pop(0.0, Room())
        assert (selection.request.id if isinstance(selection, Selection) else None) == (
            expected.id if expected else None
        )
        if expected is None:
            assert selection is None
            return
        self.queued.remove(expected)
        self.running.append((expected, 0))
        at_dispatch = ServiceTokens(expected.prompt_tokens, 0)
        self.fast.charge(expected, at_dispatch, 0.0, final=False)
        self.naive.charge(expected, at_dispatch, final=False)


@pytest.mark.parametrize("pair", PAIRS)
@settings(max_examples=100)
@given(trace=actions)
def test_serves_in_the_order_of_the_printed_algorithm(pair: str, trace: list[Action]) -> None:
    both = Both(*PAIRS[pair]())
    for action in trace:
        both.act(*action)
    while both.queued:
        both.pop()
    assert len(both.fast) == 0


def pop(policy: Policy) -> Request:
    """The next request, at the one engine there is."""
    selection = policy.pop(0.0, Room())
    assert isinstance(selection, Selection)
    assert selection.backend == "b"
    return selection.request


def test_expected_output_is_charged_at_dispatch_and_corrected_by_the_truth() -> None:
    policy = named_policy("vtc", predict_output=True)
    one, other = make_request("a", prompt=10, expected=50), make_request("b", prompt=90)
    for request in (one, other):
        policy.push(request, 0.0)
    for request in (one, other):
        assert pop(policy) is request
        policy.charge(request, ServiceTokens(request.prompt_tokens, 0), 0.0, final=False)
    assert (one.progress.charged, other.progress.charged) == (110.0, 90.0)
    policy.charge(one, ServiceTokens(10, 49), 0.0, final=False)
    assert one.progress.charged == 110.0, "no more is charged until the answer is longer than expected"
    policy.charge(one, ServiceTokens(10, 51), 0.0, final=False)
    assert one.progress.charged == 112.0
    policy.charge(one, ServiceTokens(10, 30), 0.0, final=True)
    assert one.progress.charged == 70.0, "what was charged too much is given back at the end"


def serve_alone(policy: Policy, tenant: str, output: int) -> None:
    """One request of this tenant, from its arrival to its end, with nobody else about."""
    request = make_request(tenant, prompt=10)
    policy.push(request, 0.0)
    assert pop(policy) is request
    policy.charge(request, ServiceTokens(10, output), 0.0, final=True)


def order(policy: Policy, requests: int) -> str:
    """Tenants in the order of service, with one output token per request."""
    served = ""
    for _ in range(requests):
        request = pop(policy)
        policy.charge(request, ServiceTokens(10, 1), 0.0, final=True)
        served += request.flow.tenant
    return served


@pytest.mark.parametrize(("policy", "expected"), [(named_policy("vtc"), "abab"), (named_policy("lcf"), "bbbb")])
def test_after_an_idle_system_a_newcomer_starts_where_the_last_one_left(policy: Policy, expected: str) -> None:
    """Lines 9 and 10 of algorithm 2; without the lift, whoever was away is served until it has caught up."""
    for _ in range(10):
        serve_alone(policy, "a", 100)
    for _ in range(5):
        policy.push(make_request("b", prompt=10), 0.0)
        policy.push(make_request("a", prompt=10), 0.0)
    assert "".join(sorted(order(policy, 4))) == "".join(sorted(expected))


def test_an_idle_system_does_not_forgive() -> None:
    policy = named_policy("vtc")
    for tenant in "ab":
        policy.push(make_request(tenant, prompt=10), 0.0)
    for output in (500, 1):  # a has the longer answer; b is the last to leave the queue
        policy.charge(pop(policy), ServiceTokens(10, output), 0.0, final=True)
    for tenant in "b" * 90 + "a":
        policy.push(make_request(tenant, prompt=10), 0.0)
    assert order(policy, 80) == "b" * 80


def test_round_robin_serves_a_quantum_at_a_time_and_weights_scale_it() -> None:
    policy = named_policy("rr", quantum=24.0)
    for _ in range(20):
        for tenant, weight in (("a", 1.0), ("b", 2.0)):
            policy.push(make_request(tenant, prompt=10, weight=weight), 0.0)
    assert order(policy, 18) == "aabbbb" * 3  # 12 tokens of service each


def test_round_robin_skips_the_rounds_of_a_debt_at_once() -> None:
    policy = named_policy("rr", quantum=24.0)
    for _ in range(20):
        for tenant in "ab":
            policy.push(make_request(tenant, prompt=10), 0.0)
    policy.charge(pop(policy), ServiceTokens(10, 55), 0.0, final=True)  # 120: the credit of five rounds
    assert order(policy, 14) == "b" * 10 + "aabb"
    assert named_policy("rr", quantum=1e-6).pop(0.0, Room()) is None


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
