"""One window: calls inside interactions go first, then what an engine has cached; nobody is passed beyond it."""

from __future__ import annotations

import pytest

from policies.admission.named import named_policy
from policies.admission.policy import Policy
from policies.request import Request, ServiceTokens
from tests.policies.caching import BLOCK, CachingServers, Questions, document, local
from tests.policies.making import make_request
from tests.policies.orders.claims import pop

WITH_WINDOW = ("vtc", "wsc", "fairserve")
WINDOW = 100.0


def ask(policy: Policy, tenant: str, prefix: tuple[int, ...] = (), *, user: str = "", weight: float = 1.0) -> Request:
    prompt = BLOCK * max(1, len(prefix))
    request = make_request(tenant, user=user, weight=weight, prompt=prompt, prefix=prefix)
    policy.push(request, 0.0)
    return request


def cached(policy: Policy, prefix: tuple[int, ...]) -> None:
    policy.prefixes.insert(prefix, "b")


def test_the_head_goes_if_half_of_its_own_prompt_is_cached() -> None:
    policy = local("vtc", WINDOW)
    cached(policy, document(1, 10))
    cached(policy, document(2, 5))
    first = ask(policy, "a", (*document(2, 5), *document(3, 5)))
    ask(policy, "b", document(1, 10))
    assert pop(policy) is first


def test_whoever_has_less_running_is_not_passed() -> None:
    """A light tenant's request waits for no one's cache."""
    policy = local("vtc", 1e9)
    cached(policy, document(1, 10))
    ask(policy, "heavy", document(1, 10))
    pop(policy)
    ask(policy, "heavy", document(1, 10))
    light = ask(policy, "light", document(2, 10))
    assert pop(policy) is light


def test_what_runs_is_compared_per_weight() -> None:
    """Two of a tenant of twice the weight are no more than one of another."""
    policy = local("vtc", 1e9)
    cached(policy, document(1, 10))
    for tenant, weight, number in (("light", 1.0, 4), ("heavy", 2.0, 5), ("heavy", 2.0, 6)):
        request = ask(policy, tenant, document(number, 10), weight=weight)
        assert pop(policy) is request
    ask(policy, "light", document(2, 10))
    heavy = ask(policy, "heavy", document(1, 10), weight=2.0)
    assert pop(policy) is heavy


def test_the_window_is_what_a_tenant_may_be_ahead() -> None:
    """Each has one document, only that of `b` is cached, and each question has 10 tokens of its own."""
    policy = local("vtc", 45.0)
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


@pytest.mark.parametrize("name", WITH_WINDOW)
def test_with_a_window_of_0_it_is_the_order_itself(name: str) -> None:
    for seed in range(20):
        traffic = Questions(dict.fromkeys("abc", 1.0), 2, 10, 5, 3, 1, 40, seed=seed)
        settings = {} if name == "vtc" else {"window_calls": 0.0}
        logs = [
            CachingServers(policy, traffic).run(60).went
            for policy in (
                *[
                    named_policy(name, placement=placement, window_tokens=0.0, cached_weight=1.0, **settings)
                    for placement in ("prefix", "least_loaded")
                ],
                local(name, WINDOW),
            )
        ]
        assert logs[0] == logs[1] != logs[2]
