"""Every policy keeps the contract of `orders.order`, clause by clause; what each promises is in `claims`.

P9, the bound that a policy claims, has a file of its own: `test_service_bounds`.
"""

from __future__ import annotations

import os
import pickle
import random
import subprocess
import sys
from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from policies.admission.policy import Policy
from policies.orders.order import Selection
from policies.orders.policy_entries import POLICIES
from policies.request import Flow, Request, ServiceTokens
from tests.policies.making import NoRoom, Room, lines_counted, make_request, policy_with
from tests.policies.orders.claims import CLAIMS, Action, Trace, actions, every_policy, fair_policy, make, pop
from tests.waiting import WAIT_S


def test_every_policy_states_its_claim() -> None:
    assert sorted(CLAIMS) == sorted(POLICIES)


@every_policy
def test_every_order_has_one_for_the_queue_of_one_engine(name: str) -> None:
    """A placement that assigns requests to engines needs it."""
    order = make(name).order
    assert type(order.beside("one")) is type(order)


# --- P1, P3 ---


@every_policy
@settings(max_examples=100)
@given(trace=actions, flows_max=st.sampled_from([1, 3, 100]))
def test_p1_p3_what_is_queued_leaves_exactly_once_when_it_fits_however_few_flows_are_remembered(
    name: str, trace: list[Action], flows_max: int
) -> None:
    policy = make(name, flows_max=flows_max)
    driven = Trace(policy)
    for action in [*trace, *[("pop", 0, 0)] * len(trace)]:
        driven.act(*action)  # fails if nothing is popped, or a request twice or after its removal
        assert len(policy) == len(driven.queued)
        if driven.queued:
            blocked = policy.pop(0.0, NoRoom())
            assert blocked.obstacles
            assert len(policy) == len(driven.queued), "what has no room stays queued"
    assert policy.pop(0.0, Room()) is None


# --- P2 ---


@every_policy
@settings(max_examples=60)
@given(trace=actions)
def test_p2_same_calls_same_answers_under_any_names_that_sort_alike(name: str, trace: list[Action]) -> None:
    once = Trace(make(name)).run(trace)
    assert once == Trace(make(name)).run(trace)
    assert once == Trace(make(name), tenant=lambda number: "abcd"[number] * (9 - 2 * number)).run(trace)


def decision_log(name: str) -> str:
    """A long random trace; also what the processes of the next test run."""
    rng = random.Random(7)
    kinds = ["push", "push", "push", "pop", "pop", "output", "end", "return", "remove"]
    trace = [(rng.choice(kinds), rng.randrange(4), rng.randrange(40)) for _ in range(1000)]
    return " ".join(Trace(make(name)).run(trace))


def test_p2_same_answers_under_any_hash_seed() -> None:
    names = sorted(POLICIES)
    code = (
        f"from tests.policies.orders.test_contract import decision_log as log\nfor name in {names!r}: print(log(name))"
    )

    def run(seed: str) -> subprocess.Popen[str]:
        environment = {**os.environ, "PYTHONHASHSEED": seed}
        return subprocess.Popen([sys.executable, "-c", code], env=environment, stdout=subprocess.PIPE, text=True)

    processes = [run("1"), run("4242")]
    logs = [process.communicate(timeout=WAIT_S)[0].splitlines() for process in processes]
    assert [process.returncode for process in processes] == [0, 0]
    assert logs[0] == logs[1] == [decision_log(name) for name in names]


# --- P4 ---


@every_policy
def test_p4_removed_before_dispatch_charges_nothing(name: str) -> None:
    def order(with_removed: bool) -> list[str]:
        policy = make(name)
        for number in range(4):
            for tenant in "ab":
                policy.push(make_request(tenant, id=f"{tenant}{number}"), 0.0)
        if with_removed:
            huge = [make_request("a", prompt=100_000) for _ in range(3)]
            for request in huge:
                policy.push(request, 0.0)
            for request in huge:
                policy.remove(request, 0.0)
                assert request.progress.charged == 0.0
        return [pop(policy).id for _ in range(8)]

    assert order(with_removed=True) == order(with_removed=False)


# --- P5 ---


def serve(policy: Policy, requests: int, output: int = 10) -> dict[str, float]:
    """One request after the other, each with this much output; what each tenant was charged."""
    received: dict[str, float] = {}
    for _ in range(requests):
        request = pop(policy)
        policy.charge(request, ServiceTokens(request.prompt_tokens, output), 0.0, final=True)
        received[request.flow.tenant] = received.get(request.flow.tenant, 0.0) + request.progress.charged
    return received


U = 2 * (10 + 10)
"""Of requests with 10 tokens in and 10 out, served one at a time; all of these tests use them."""


def push_many(policy: Policy, tenant: str, requests: int) -> None:
    for _ in range(requests):
        policy.push(make_request(tenant, prompt=10), 0.0)


@fair_policy
@pytest.mark.parametrize("idle", ["new", "finished", "withdrawn", "running", "unreached"])
def test_p5_whoever_returns_has_no_credit(name: str, idle: str) -> None:
    policy = make(name)
    mine = make_request("mine", prompt=10)
    if idle != "new":
        policy.push(mine, 0.0)
        if idle == "withdrawn":
            policy.remove(mine, 0.0)
        else:
            assert pop(policy) is mine
    push_many(policy, "other", 300)
    if idle == "finished":
        policy.charge(mine, ServiceTokens(10, 10), 0.0, final=True)
    serve(policy, 200)
    if idle == "unreached":  # a connection that failed only after a long while: back to the queue, unbilled
        policy.charge(mine, ServiceTokens(0, 0), 0.0, final=True)
        policy.push(mine, 0.0, front=True)
    push_many(policy, "mine", 300)
    received = serve(policy, 100)
    assert abs(received.get("mine", 0.0) - received.get("other", 0.0)) <= 2 * U


@fair_policy
def test_p5_whoever_is_in_debt_does_not_lose_it_by_a_short_absence(name: str) -> None:
    policy = make(name)
    push_many(policy, "other", 200)
    push_many(policy, "mine", 1)
    first = next(request for request in (pop(policy) for _ in range(2)) if request.flow.tenant == "mine")
    policy.charge(first, ServiceTokens(10, 500), 0.0, final=True)  # ahead of everybody by 1,000
    push_many(policy, "mine", 100)
    assert serve(policy, 30).keys() == {"other"}


# --- P6 ---


@every_policy
@settings(max_examples=60)
@given(
    requests=st.lists(
        st.tuples(st.sampled_from("abc"), st.integers(0, 50), st.integers(0, 50), st.integers(0, 99)), max_size=12
    )
)
def test_p6_after_the_last_charge_counters_are_those_of_an_oracle(
    name: str, requests: list[tuple[str, int, int, int]]
) -> None:
    def run(*, oracle: bool) -> dict[str, dict[str, float]]:
        policy = make(name, predict_output=not oracle)
        sent = [make_request(tenant, prompt=prompt, expected=guess) for tenant, prompt, _, guess in requests]
        for request in sent:
            policy.push(request, 0.0)
        popped = [policy.pop(0.0, Room()) for _ in sent]
        for tenant in "abc":  # they wait all the while, so that nobody is lifted
            policy.push(make_request(tenant), 0.0)
        for request in sent:
            if not oracle:
                policy.charge(request, ServiceTokens(request.prompt_tokens + 7, 0), 0.0, final=False)
        for request, (_, prompt, output, _) in zip(sent, requests, strict=True):
            policy.charge(request, ServiceTokens(prompt, output), 0.0, final=True)
        assert all(isinstance(selection, Selection) for selection in popped)
        return {tenant: policy.explain(Flow(tenant), 0.0) for tenant in "abc"}

    estimated, truth = run(oracle=False), run(oracle=True)
    for tenant in "abc":
        assert estimated[tenant] == pytest.approx(truth[tenant])


# --- P7 ---


SHAPES: dict[str, Callable[[int], list[tuple[str, str]]]] = {
    "many tenants": lambda n: [(f"t{i}", "") for i in range(n)],
    "many users of one tenant": lambda n: [("t", f"u{i}") for i in range(n)],
    "many users of many tenants": lambda n: [(f"t{i % 50}", f"u{i}") for i in range(n)],
}


def memory(policy: Policy, flows: list[tuple[str, str]], *, is_served: bool) -> int:
    """Bytes that the policy takes, pickled, after each flow has had a request served, or has given up waiting."""
    requests = [make_request(tenant, user=user) for tenant, user in flows]
    for request in requests:
        policy.push(request, 0.0)
        if is_served:
            policy.charge(pop(policy), ServiceTokens(10, 10), 0.0, final=True)
    for request in () if is_served else requests:
        policy.remove(request, 0.0)
    return len(pickle.dumps(policy))


@every_policy
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("is_served", [True, False], ids=["served", "gave up"])
def test_p7_memory_does_not_grow_with_the_flows_that_were_ever_seen(name: str, shape: str, is_served: bool) -> None:
    few, many = (memory(make(name, flows_max=100), SHAPES[shape](n), is_served=is_served) for n in (200, 2500))
    assert many < 2.0 * few, "of 12 times the flows"


# --- P8 ---


class CountedFloat(float):
    """A float that counts how often it is compared, also inside `heapq`, `min` and `sorted`."""

    comparisons = 0
    __hash__ = float.__hash__


def counted(name: str) -> Callable[[float, float], CountedFloat | bool]:
    """The operator of this name, for counted floats."""
    of_float = getattr(float, name)

    def operator(one: float, other: float) -> CountedFloat | bool:
        result = of_float(one, other)
        if isinstance(result, float):
            return CountedFloat(result)
        CountedFloat.comparisons += 1
        return bool(result)

    return operator


for name in ("__add__", "__radd__", "__mul__", "__rmul__", "__sub__", "__truediv__", "__lt__", "__gt__", "__eq__"):
    setattr(CountedFloat, name, counted(name))


def work(name: str, flows: list[tuple[str, str]], cycles: int) -> tuple[float, float]:
    """(lines, comparisons) for one cycle of pop, charges and push, with two requests queued in each flow."""
    policy = make(name, input_weight=CountedFloat(1.0), output_weight=CountedFloat(2.0))
    rng = random.Random(3)
    for _ in range(2):
        for tenant, user in flows:
            policy.push(make_request(tenant, user=user, prompt=rng.randrange(1, 100)), 0.0)
    for _ in range(len(flows)):  # everybody once, so that all counters differ and are counted
        request = pop(policy)
        policy.charge(request, ServiceTokens(request.prompt_tokens, rng.randrange(50)), 0.0, final=True)
        policy.push(make_request(request.flow.tenant, user=request.flow.user, prompt=rng.randrange(1, 100)), 0.0)
    CountedFloat.comparisons = 0
    with lines_counted() as lines:
        for _ in range(cycles):
            request = pop(policy)
            for output in (1, 2, 3):
                policy.charge(request, ServiceTokens(request.prompt_tokens, output), 0.0, final=False)
            policy.charge(request, ServiceTokens(request.prompt_tokens, 20), 0.0, final=True)
            policy.push(make_request(request.flow.tenant, user=request.flow.user, prompt=rng.randrange(1, 100)), 0.0)
    return lines[0] / cycles, CountedFloat.comparisons / cycles


@every_policy
@pytest.mark.parametrize("shape", ["many tenants", "many users of one tenant"])
def test_p8_work_grows_with_the_logarithm_of_the_flows(name: str, shape: str) -> None:
    few_lines, few_comparisons = work(name, SHAPES[shape](32), 4 * 32)
    many_lines, many_comparisons = work(name, SHAPES[shape](512), 512)
    assert many_lines <= 2.5 * few_lines, "16 times the flows are 1.8 times the logarithm"
    assert many_comparisons <= 2.5 * few_comparisons + 8


# --- P9: nobody is worse off than under plain VTC by more than the window, or a quantum ---


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
