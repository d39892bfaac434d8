"""What a group may have holds for all tenants in it together, however they ask and however their requests end."""

from __future__ import annotations

import random

import pytest

from policies.limits.quotas import DAY_S, MONTH_S, Quota, Quotas, UsageBucket
from policies.replicas.tallies import SharedQuotas
from policies.request import Request, ServiceTokens, of_batch
from tests.kit.typed_script_store import TypedScriptStore
from tests.policies.limits.sharing import CountingGateway, limit_of
from tests.policies.making import make_request, pool_of

RESEARCH = " research"
BUDGET = 10_000


def grouped(quota: Quota, tenants: int = 100, own: Quota | None = None) -> Quotas:
    """So many tenants in one group with this quota."""
    names = [f"t{number}" for number in range(tenants)]
    return Quotas(own or Quota(), {RESEARCH: quota}, dict.fromkeys(names, (RESEARCH,)))


def test_the_limit_that_holds_is_named_with_its_group() -> None:
    quotas = grouped(Quota(tokens_per_minute=100, concurrent=1), own=Quota(tokens_per_day=10**6))
    request = make_request("t1", prompt=100)
    quotas.admitted(request, 0.0)
    assert limit_of(quotas.find_rejection(make_request("t2", prompt=1), 0.0)) == "tokens (group research)"
    assert {limit.name: limit.remaining for limit in quotas.standing("t2", 0.0)} == {
        "tokens_per_day": 10**6,
        "tokens (group research)": 0,
        "concurrent (group research)": 0,
    }
    assert quotas.find_rejection(make_request("other", prompt=1000), 0.0) is None
    quotas.ended(request, ServiceTokens(0, 0), 1.0)
    assert quotas.find_rejection(make_request("t2", prompt=1), 1.0) is None
    assert quotas.under_way == {}


@pytest.mark.parametrize("quota", ["tokens_per_minute", "tokens_per_day", "tokens_per_month"])
def test_borrowing_and_aborting_gains_nothing(quota: str) -> None:
    """Requests that are cancelled after their dispatch have taken their prompt, and what they made so far."""
    quotas = grouped(Quota(**{quota: BUDGET}))
    engine = pool_of("b", slots=16, quotas=quotas)
    taken = 0
    for number in range(1000):
        now = number * 0.01
        request = make_request(f"t{number % 100}", id=f"r{number}", prompt=90, arrived_s=now)
        engine.arrived(request, now)
        if request.id in engine.requests.leases:
            engine.progressed(request.id, 10, now + 0.001)
            engine.cancelled(request.id, now + 0.002, ServiceTokens(90, 10))
            taken += 100
    assert BUDGET - 100 <= taken <= BUDGET + 100
    assert quotas.under_way == {}


def test_a_month_slides_over_its_days() -> None:
    quotas = Quotas(Quota(tokens_per_month=BUDGET))
    for day in (16, 1):
        request = make_request("a", prompt=BUDGET // 2)
        quotas.admitted(request, MONTH_S - day * DAY_S)
        quotas.ended(request, ServiceTokens(BUDGET // 2, 0), MONTH_S - day * DAY_S)
    assert quotas.find_rejection(make_request("a", prompt=1), MONTH_S) is not None
    assert quotas.find_rejection(make_request("a", prompt=BUDGET // 2), MONTH_S + 15 * DAY_S) is None
    refused = quotas.find_rejection(make_request("a", prompt=BUDGET), MONTH_S + 15 * DAY_S)
    assert refused.retry_after_s == pytest.approx(14.5 * DAY_S)


def test_what_is_under_way_leaves_the_group_where_it_was_counted() -> None:
    """A reload may move its tenant meanwhile, and take the group's limit away."""
    quotas = grouped(Quota(concurrent=5, tokens_per_day=BUDGET))
    requests = [make_request("t1", prompt=100) for _ in range(3)]
    for request in requests:
        quotas.admitted(request, 0.0)
    quotas.set(Quotas(tenants={" other": Quota(concurrent=1)}, around={"t1": (" other",)}))
    quotas.ended(requests[0], ServiceTokens(250, 0), 1.0)
    quotas.withdrawn(requests[1], 1.0)
    assert quotas.under_way == {"t1": 1, RESEARCH: 1}
    quotas.set(grouped(Quota(concurrent=5, tokens_per_day=BUDGET)))
    assert quotas.standing("t1", 1.0)[1].remaining == BUDGET - 250 - 100


def test_the_sum_of_the_tenants_goes_on_for_their_group() -> None:
    quotas = grouped(Quota(tokens_per_day=1000, tokens_per_month=BUDGET, requests_per_month=50), tenants=3)
    at = 2 * MONTH_S + DAY_S
    quotas.month.epoch_s = quotas.day.epoch_s = at
    used = [(30.6, 1000, 10**6), (29.9, 3, 300), (2, 3, 300), (0, 2, 200)]
    for tenant in ("t0", "t1", "t2", "other"):
        found = [
            UsageBucket(at - ago * DAY_S, tenant, "", requests, ServiceTokens(tokens, 0), 0)
            for ago, requests, tokens in used
        ]
        quotas.go_on(found, 0.0)
    left = {limit.name: limit.remaining for limit in quotas.standing("t1", 0.0)}
    assert left == {
        "tokens_per_day (group research)": 1000 - 600,
        "tokens_per_month (group research)": BUDGET - 2400,
        "requests_per_month (group research)": 50 - 24,
    }


@pytest.mark.parametrize("seed", range(5))
def test_replicas_keep_the_month_of_a_group_together(seed: int) -> None:
    """Two gateways, one exchange after another; what one admits between two exchanges it has reserved before."""
    chance = random.Random(seed)
    store = TypedScriptStore()
    gateways = [CountingGateway(name, store, grouped(Quota(tokens_per_month=BUDGET))) for name in ("one", "two")]
    taken, now = 0, 0.0
    for _ in range(400):
        now += 60.0
        for gateway in gateways:
            quotas, asked = gateway.quotas, list[Request]()
            for _ in range(chance.randrange(4)):
                request = make_request(f"t{chance.randrange(100)}", prompt=chance.choice((10, 100)))
                if quotas.find_rejection(request, now) is not None:
                    continue
                is_sure = gateway.shared.is_sure(request, now)
                quotas.admitted(request, now)
                if is_sure:
                    taken += request.prompt_tokens
                    quotas.ended(request, ServiceTokens(request.prompt_tokens, 0), now)
                else:
                    asked.append(request)
            gateway.tells(now)
            for request in reversed(asked):
                if quotas.find_rejection(request, now, is_counted=True) is not None:
                    quotas.withdrawn(request, now)
                else:
                    taken += request.prompt_tokens
                    quotas.ended(request, ServiceTokens(request.prompt_tokens, 0), now)
    assert BUDGET * 0.95 <= taken <= BUDGET


def test_replicas_keep_what_a_group_may_have_at_once_together() -> None:
    one, two = (SharedQuotas(grouped(Quota(concurrent=3), own=Quota(concurrent=2)), epoch_s=0.0) for _ in range(2))
    for tenant in ("t1", "t2"):
        one.quotas.admitted(make_request(of_batch(tenant)), 0.0)
    two.receive([], 2, one.usage())
    assert two.quotas.find_rejection(make_request("t3"), 0.0) is None
    two.quotas.admitted(make_request("t3"), 0.0)
    assert limit_of(two.quotas.find_rejection(make_request("t4"), 0.0)) == "concurrent (group research)"


def test_a_key_and_a_model_have_limits_of_their_own() -> None:
    quotas = Quotas(
        tenants={
            "a": Quota(requests_per_minute=5), "a large": Quota(requests_per_minute=2),
            " team": Quota(), " team large": Quota(requests_per_minute=3), "  0f": Quota(requests_per_minute=4),
        },
        around={"a": (" team",), "b": (" team",)},
    )  # fmt: skip

    def asks(tenant: str, key: str, model: str) -> str:
        request = make_request(tenant, quota_names=quotas.names(tenant, key, model))
        refused = quotas.find_rejection(request, 0.0)
        if refused is None:
            quotas.admitted(request, 0.0)
        return limit_of(refused)

    assert quotas.names("c", "1f", "large") == ()
    assert [asks("a", "0f", "large") for _ in range(3)] == ["", "", "requests (model large)"]
    assert [asks("b", "1f", "large") for _ in range(2)] == ["", "requests (group team, model large)"]
    assert [asks("a", "0f", "small") for _ in range(3)] == ["", "", "requests (key)"]
    assert [asks("a", "1f", "small") for _ in range(2)] == ["", "requests"]
    left = {limit.name: limit.remaining for limit in quotas.standing("a", 0.0, quotas.names("a", "0f", "large"))}
    assert left == {
        "requests": 0, "requests (key)": 0, "requests (model large)": 0, "requests (group team, model large)": 0,
    }  # fmt: skip
    quotas.go_on([UsageBucket(0.0, "a", "large", 1, ServiceTokens(0, 0), 0)], 0.0)
    assert quotas.day.sums("a large")[1] == 2 + 1
    assert quotas.day.sums(" team large")[1] == 3 + 1


def test_the_common_limits_of_a_model_are_of_each_tenant_that_has_the_common_ones() -> None:
    quotas = Quotas(
        Quota(requests_per_day=9), {"own": Quota(requests_per_day=9), RESEARCH: Quota(requests_per_month=9)},
        {"a": (RESEARCH,)}, {"m": Quota(engine_seconds_per_day=5), "n": Quota()},
    )  # fmt: skip
    assert quotas.names("a", "k", "m") == ("a m",)
    assert [quotas.names("own", "k", "m"), quotas.names("a", "k", "n"), quotas.names("a", "k", "other")] == [()] * 3
    assert quotas.rules("  k") == quotas.rules(" gone") == quotas.rules("  k m") == (), "only tenants have the default"
    request = make_request("a", quota_names=quotas.names("a", "k", "m"))
    quotas.admitted(request, 0.0)
    quotas.ended(request, ServiceTokens(0, 0), 6.0, 6.0)
    assert limit_of(quotas.find_rejection(request, 6.0)) == "engine_seconds_per_day (model m)"
    assert quotas.find_rejection(make_request("a"), 6.0) is None
    assert not Quotas(of_models={"m": Quota(concurrent=1)}).is_off
    assert Quotas(of_models={"m": Quota(requests_per_month=1)}).longest.window.longest_s == MONTH_S * 61 / 60


def test_what_is_issued_holds_beside_what_is_configured_and_over_a_reload() -> None:
    quotas = Quotas(tenants={"  named": Quota(concurrent=1)})
    quotas.set_issued({"  k": Quota(requests_per_day=2), "  k m": Quota(requests_per_day=1)})
    for _ in range(2):
        assert quotas.names("t", "k", "m") == ("  k", "  k m")
        assert quotas.names("t", "named", "m") == ("  named",)
        quotas.set(Quotas(tenants={"  named": Quota(concurrent=2)}))
    request = make_request("t", quota_names=("  k", "  k m"))
    quotas.admitted(request, 0.0)
    assert quotas.find_rejection(request, 0.0) is not None
    quotas.set_issued({})
    assert quotas.names("t", "k", "m") == ()
    assert quotas.find_rejection(request, 0.0) is None, "a key that is gone has no limit, nor that of tenants"
    assert not quotas.is_off
    quotas.set(Quotas())
    assert quotas.is_off
