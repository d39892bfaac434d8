"""One window: calls inside interactions go first, then what an engine has cached; nobody is passed beyond it."""

from __future__ import annotations

from dataclasses import replace
from math import inf
from typing import Any

import pytest

from policies.admission.named import named_policy
from policies.admission.policy import Policy
from policies.orders.order import Selection
from policies.queue.tenants_and_flows import CALLS_PASSED
from policies.request import Request, ServiceTokens
from tests.policies.caching import BLOCK, CachingServers, Questions, document
from tests.policies.making import Room, make_request

WITH_WINDOW = ("vtc", "wsc", "fairserve")
WINDOW = 100.0
KEEPS_ALL = 1_000_000


def local(name: str = "vtc", window: float = WINDOW, **settings: Any) -> Policy:
    """A policy whose service is what engines compute, so that caches and the window are seen in it."""
    if name != "vtc":
        settings = {"window_calls": 1e6} | settings
    return named_policy(name, placement="prefix", window_tokens=window, cached_weight=0.0, **settings)


def ask(policy: Policy, tenant: str, prefix: tuple[int, ...] = (), *, user: str = "") -> Request:
    request = make_request(tenant, user=user, prompt=BLOCK * max(1, len(prefix)), prefix=prefix)
    policy.push(request, 0.0)
    return request


def pop(policy: Policy) -> Request:
    selection = policy.pop(0.0, Room())
    assert isinstance(selection, Selection)
    policy.charge(selection.request, ServiceTokens(selection.request.prompt_tokens, 0), 0.0, final=False)
    return selection.request


def cached(policy: Policy, prefix: tuple[int, ...]) -> None:
    assert policy.prefixes is not None
    policy.prefixes.insert(prefix, "b")


def test_a_request_that_is_cached_goes_before_one_that_is_not() -> None:
    policy = local()
    cached(policy, document(1, 10))
    first = ask(policy, "a", document(2, 10))
    second = ask(policy, "b", document(1, 10))
    assert [pop(policy), pop(policy)] == [second, first]


def test_the_head_goes_if_half_of_its_own_prompt_is_cached() -> None:
    policy = local()
    cached(policy, document(1, 10))
    cached(policy, document(2, 5))
    first = ask(policy, "a", (*document(2, 5), *document(3, 5)))
    ask(policy, "b", document(1, 10))
    assert pop(policy) is first


def test_whoever_has_less_running_is_not_passed() -> None:
    """A light tenant's request waits for no one's cache."""
    policy = local(window=1e9)
    cached(policy, document(1, 10))
    ask(policy, "heavy", document(1, 10))
    pop(policy)
    ask(policy, "heavy", document(1, 10))
    light = ask(policy, "light", document(2, 10))
    assert pop(policy) is light


def test_what_runs_is_compared_per_weight() -> None:
    """Two of a tenant of twice the weight are no more than one of another."""
    policy = local(window=1e9)
    cached(policy, document(1, 10))
    for tenant, number in (("light", 4), ("heavy", 5), ("heavy", 6)):
        request = make_request(tenant, weight=1.0 + (tenant == "heavy"), prompt=100, prefix=document(number, 10))
        policy.push(request, 0.0)
        assert pop(policy) is request
    ask(policy, "light", document(2, 10))
    heavy = make_request("heavy", weight=2.0, prompt=100, prefix=document(1, 10))
    policy.push(heavy, 0.0)
    assert pop(policy) is heavy


def test_the_window_is_what_a_tenant_may_be_ahead() -> None:
    """Each has one document, only that of `b` is cached, and each question has 10 tokens of its own."""
    policy = local(window=45.0)
    cached(policy, document(1, 9))
    for n in range(20):
        ask(policy, "a", (*document(2 + n, 9), 1000 + n))
        ask(policy, "b", (*document(1, 9), 2000 + n))
    went = []
    for _ in range(9):
        request = pop(policy)
        went.append(request.flow.tenant)
        policy.charge(request, ServiceTokens(100, 0, 90 if request.flow.tenant == "b" else 0), 0.0, final=True)
    assert went == ["b"] * 5 + ["a"] + ["b"] * 3, "5 times 10 tokens is more than 45, then one of 100 for `a`"


def test_the_oldest_request_of_a_flow_is_passed_a_bounded_number_of_times() -> None:
    policy = local(window=1e9)
    cached(policy, document(1, 9))
    oldest = ask(policy, "a", document(2, 9))
    for n in range(2 * CALLS_PASSED):
        ask(policy, "a", (*document(1, 9), n))
    assert [pop(policy) for _ in range(CALLS_PASSED + 1)][-1] is oldest


@pytest.mark.parametrize("name", WITH_WINDOW)
def test_with_a_window_of_0_it_is_the_order_itself(name: str) -> None:
    for seed in range(20):
        traffic = Questions(dict.fromkeys("abc", 1.0), 2, 10, 5, 3, 1, 40, seed=seed)
        settings = {} if name == "vtc" else {"window_calls": 0.0}
        logs = [
            decisions(
                named_policy(name, placement=placement, window_tokens=0.0, cached_weight=1.0, **settings), traffic
            )
            for placement in ("prefix", "least_loaded")
        ]
        assert logs[0] == logs[1]
        assert logs[0] != decisions(local(name), traffic)


def decisions(policy: Policy, traffic: Questions) -> list[tuple[str, int]]:
    servers = CachingServers(policy, traffic)
    for now in range(60):
        servers.step(now)
    return servers.went


# --- the bound ---


def bound(traffic: Questions) -> float:
    """2 (U + L), per weight. U: a prompt, all output that is dispatched, and its input wrongly taken to be cached."""
    slots = traffic.slots * traffic.engines
    believed = 0 if traffic.cache_blocks == KEEPS_ALL else slots * traffic.prompt_max
    most = traffic.prompt_max + believed + 2.0 * slots * traffic.output_max
    return 2 * (most / min(traffic.weights.values()) + WINDOW)


def trace(seed: int) -> Questions:
    return Questions(
        {tenant: (0.5, 1.0, 3.0)[(seed // 3**place) % 3] for place, tenant in enumerate("abc")},
        documents=1 + seed % 4,
        blocks_max=1 + seed * 7 % 20,
        output_max=1 + seed * 11 % 20,
        slots=1 + seed % 6,
        engines=1 + seed % 3,
        cache_blocks=(5, 20, 80, KEEPS_ALL)[seed % 4],
        seed=seed,
    )


@pytest.mark.slow
@pytest.mark.parametrize(("name", "begin"), [*zip(2 * WITH_WINDOW, range(0, 1000, 167), strict=True)])
def test_p9_with_a_window_the_bound_holds_on_a_thousand_random_traces(name: str, begin: int) -> None:
    """Each has a third of them: they have the window in common."""
    for seed in range(begin, begin + 167):
        traffic = trace(seed)
        assert CachingServers(local(name), traffic).spread(40, "a", "c") <= bound(traffic), traffic


HARD = Questions({"a": 1.0, "b": 1.0, "c": 1.0}, 1, 20, 3, 2, 1, 60, seed=1)


@pytest.mark.parametrize(("window", "is_caught"), [(WINDOW, False), (inf, True), (60 * WINDOW, True)])
def test_the_bound_is_one_that_a_wider_window_breaks(window: float, is_caught: bool) -> None:
    spreads = [
        CachingServers(local(window=window), replace(HARD, seed=seed)).spread(900, "a", "c") for seed in range(5)
    ]
    assert any(spread > bound(HARD) for spread in spreads) is is_caught


def test_locality_is_found_where_the_order_alone_thrashes() -> None:
    traffic = Questions(dict.fromkeys("abcdef", 1.0), 1, 20, 3, 2, 1, 60, seed=3)

    def hits(policy: Policy) -> float:
        servers = CachingServers(policy, traffic)
        for now in range(600):
            servers.step(now)
        return servers.cached / servers.prompts

    assert hits(local(window=1000.0)) > hits(local(window=0.0)) + 0.08
