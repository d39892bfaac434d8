"""WSC and FairServe: what calls cost, what each counts, who goes first, and how far ahead."""

from __future__ import annotations

from typing import Any

import pytest

from policies.admission.engine import AdmissionEngine
from policies.admission.named import named_policy
from policies.admission.policy import Policy
from policies.admission.takeover import adopt, read, snapshot
from policies.capacity.output_lengths import ENOUGH
from policies.limits.throttle import Ceilings, ThrottleSettings
from policies.orders.fairserve import FairServe, FairServeParams
from policies.orders.profiles import NEUTRAL, CostProfiles
from policies.placements.placement_entries import PLACEMENTS
from policies.request import Pressure, RejectReason, Request, ServiceTokens
from tests.policies.making import NoRoom, make_request
from tests.policies.orders.claims import knows, pop

LEARNED = 4 * ENOUGH


# --- what a call costs ---


def taught(worths: dict[tuple[str, str, int], float], profiles: CostProfiles | None = None) -> CostProfiles:
    profiles = CostProfiles() if profiles is None else profiles
    for _ in range(LEARNED):
        for (scope, app, stage), cost in worths.items():
            profiles.learn(scope, app, stage, cost)
    return profiles


def test_what_is_known_of_a_stage_falls_back_to_its_app_its_scope_the_pool_and_nothing() -> None:
    profiles = taught({("t", "agent", 1): 1000.0, ("t", "agent", 2): 3000.0, ("t", "chat", 1): 200.0})
    assert profiles.norm("t", "agent", 1) == pytest.approx(1000.0)
    assert profiles.norm("t", "agent", 2) == pytest.approx(3000.0)
    assert profiles.norm("t", "agent", 9) == pytest.approx(2000.0, rel=0.1)
    assert profiles.norm("t", "unseen", 1) == pytest.approx(1400.0, rel=0.1)
    assert profiles.norm("u", "agent", 1) == pytest.approx(1400.0, rel=0.1), "of another tenant only the pool is known"
    assert CostProfiles().norm("t", "agent", 1) == NEUTRAL


def test_tenants_do_not_teach_each_other() -> None:
    policy = named_policy("wsc")
    for _ in range(LEARNED):
        policy.order.learn(make_request("long", app="chat"), ServiceTokens(9000, 1000), 0.0)
        policy.order.learn(make_request("short", app="chat"), ServiceTokens(90, 10), 0.0)
    norms = [push(policy, make_request(tenant, app="chat")).progress.norm for tenant in ("long", "short")]
    assert norms == pytest.approx([10_000.0, 100.0])


def test_equation_2_with_the_constants_as_printed() -> None:
    assert CostProfiles().cost(100, 30, 7) == 1 * 70 + 2 * 30 + 1 * 7
    assert CostProfiles((1.0, 1.0, 2.0)).cost(100, 30, 7) == 70 + 30 + 14


def test_a_young_population_is_its_mean() -> None:
    profiles = CostProfiles()
    for cost in [100.0] * ENOUGH + [200.0] * (20 - ENOUGH):
        profiles.learn("scope", "app", 1, cost)
    assert profiles.norm("scope", "app", 1) == pytest.approx((100.0 * ENOUGH + 200.0 * (20 - ENOUGH)) / 20)


def test_of_two_gateways_the_one_that_has_seen_more_is_believed() -> None:
    few, many = CostProfiles(), CostProfiles()
    for profiles, number, cost in ((few, ENOUGH, 50.0), (many, 5 * ENOUGH, 1000.0)):
        for _ in range(number):
            profiles.learn("t", "app", 1, cost)
    of_few = few.snapshot()
    few.adopt(few.read(many.snapshot()))
    many.adopt(many.read(of_few))
    assert few.norm("t", "app", 1) == many.norm("t", "app", 1) == 1000.0


def test_populations_are_bounded() -> None:
    profiles = CostProfiles()
    for number in range(20_000):
        profiles.learn(f"t{number}", "a", 1, 10.0)
    assert len(profiles) <= 16_384


def test_what_was_learned_is_restored_and_nothing_else_is_taken_for_it() -> None:
    profiles = taught({("t", "agent", 1): 1000.0, ("t", "chat", 40): 200.0})
    learned = profiles.snapshot()
    fresh = CostProfiles()
    fresh.adopt(fresh.read(learned))
    for app in ("agent", "chat", ""):
        assert fresh.norm("t", app, 1) == profiles.norm("t", app, 1)
    infinite = [["t", "a", 1, 1, float("inf")]]
    for wrong in ([], {"units": [1, 2, 1]}, {**learned, "worths": infinite}, {**learned, "pool": []}):
        with pytest.raises(ValueError, match=r"expected|missing|row"):
            fresh.read(wrong)
    with pytest.raises(ValueError, match="alpha, beta, gamma"):
        CostProfiles((1.0, 1.0, 1.0)).read(learned)
    assert fresh.snapshot() == learned


def test_fairserve_restores_all_or_nothing() -> None:
    taught_one, fresh, other = (AdmissionEngine(named_policy("fairserve")) for _ in range(3))
    for _ in range(LEARNED):
        taught_one.policy.order.learn(make_request("t", app="a"), ServiceTokens(70, 30), 0.0)
    learned = snapshot(taught_one)
    with pytest.raises(ValueError, match="missing"):
        read(fresh, learned | {"policy": learned["policy"] | {"profiles": {}}})
    assert snapshot(fresh) == snapshot(other) != learned
    adopt(read(fresh, learned))
    assert snapshot(fresh) == learned


# --- order ---


def push(policy: Policy, request: Request, *, inside: bool = False) -> Request:
    request.progress.inside = inside
    policy.push(request, 0.0)
    return request


def test_users_of_one_tenant_are_compared_by_what_is_normal_for_their_app() -> None:
    policy = knows(named_policy("wsc"), 0.0, long=1000.0, short=10.0)
    for _ in range(40):
        push(policy, make_request("t", app="long", prompt=1000))
        push(policy, make_request("t", app="short", prompt=10))
    apps = [pop(policy).flow.app for _ in range(20)]
    assert apps.count("long") == apps.count("short") == 10


def test_system_tokens_cost_their_own_factor() -> None:
    policy = knows(named_policy("wsc"), 100.0)
    plain = push(policy, make_request("t", user="u", prompt=100))
    system = push(policy, make_request("t", user="v", prompt=100, system=60))
    pop(policy), pop(policy)
    assert plain.progress.normalised == pytest.approx(1.0)
    assert system.progress.normalised == pytest.approx(1.6)
    assert plain.progress.charged == system.progress.charged == 100.0, "between tenants only the engine's tokens count"


@pytest.mark.parametrize("across", [False, True])
def test_what_a_tenant_teaches_decides_between_tenants_only_if_the_operator_says_so(across: bool) -> None:
    policy = knows(named_policy("wsc", across_tenants=across), 0.0, long=1000.0, short=10.0)
    for _ in range(600):
        push(policy, make_request("l", app="long", prompt=1000))
        push(policy, make_request("s", app="short", prompt=10))
    tenants = [pop(policy).flow.tenant for _ in range(202)]
    assert tenants.count("s") == (101 if across else 200)


def test_a_prediction_is_charged_at_dispatch_and_corrected() -> None:
    policy = knows(named_policy("wsc"), 10.0)
    request = push(policy, make_request("t", prompt=10, expected=20.0))
    pop(policy)
    assert (request.progress.charged, request.progress.normalised) == (50.0, 3.0)
    policy.charge(request, ServiceTokens(10, 30), 0.0, final=False)
    assert (request.progress.charged, request.progress.normalised) == (70.0, 4.0)
    policy.charge(request, ServiceTokens(10, 5), 0.0, final=True)
    assert (request.progress.charged, request.progress.normalised) == (20.0, 1.5)


@pytest.mark.parametrize(
    ("settings", "rounds", "asks", "order"),
    [
        pytest.param(
            {"window_tokens": 250.0}, 10, [("b", "", 100, False), ("a", "", 100, True)], "aaabababab",
            id="up to the window",
        ),
        pytest.param(
            {"window_calls": 2.0}, 10, [("", "b", 1, False), ("", "a", 1, True)], "aabababa",
            id="inside a tenant the window is in calls",
        ),
        pytest.param(
            {"window_tokens": 1000.0}, 3, [("a", "", 100, True), ("b", "", 250, True), ("c", "", 1, False)], "abaabb",
            id="of them those of the least-served owner",
        ),
    ],
)  # fmt: skip
def test_calls_inside_an_interaction_go_before_starts(
    settings: dict[str, Any], rounds: int, asks: list[tuple[str, str, int, bool]], order: str
) -> None:
    policy = knows(named_policy("fairserve", **settings), 1.0)
    for _ in range(rounds):
        for tenant, user, prompt, inside in asks:
            push(policy, make_request(tenant, user=user, prompt=prompt), inside=inside)
    assert "".join("".join(pop(policy).flow) for _ in order) == order


def test_a_tenant_is_preferred_until_its_last_call_inside_has_gone() -> None:
    policy = named_policy("fairserve", window_tokens=250.0, window_calls=10.0)
    push(policy, make_request("a", user="x", prompt=100), inside=True)
    for tenant, user in (("a", "x"), ("a", "y"), ("b", "x")):
        push(policy, make_request(tenant, user=user, prompt=100))
    order = [pop(policy).flow[::2] for _ in range(4)]
    assert order == [("a", "x"), ("b", "x"), ("a", "y"), ("a", "x")]


def test_a_flow_serves_its_own_open_interactions_first() -> None:
    policy = named_policy("fairserve")
    start = push(policy, make_request("a"))
    going_on = push(policy, make_request("a"), inside=True)
    assert [pop(policy), pop(policy)] == [going_on, start]


@pytest.mark.parametrize("placement", PLACEMENTS)
def test_limits_refuse_under_every_placement(placement: str) -> None:
    throttle = ThrottleSettings(user=Ceilings(starts=20))
    policy, admitted = named_policy("fairserve", placement=placement, throttle=throttle), 0
    for _ in range(200):
        request = make_request("flood")
        if policy.order.find_rejection(request, 0.0, Pressure(True, "full")) is None:
            admitted += 1
            policy.push(request, 0.0)
            policy.pop(0.0, NoRoom())
    assert admitted == 20


def test_without_a_limit_nothing_is_counted_and_with_one_all_queues_count_together() -> None:
    free = FairServe()
    for number in range(3):
        free.push(make_request("a", user=f"u{number}"), 0.0)
    assert (free.throttle, free.counts) == (None, {})
    assert free.find_rejection(make_request("a"), 0.0, Pressure(True, "full")) is None
    limited = FairServe(FairServeParams(throttle=ThrottleSettings(user=Ceilings(starts=1))))
    assert limited.beside("one").counts is limited.counts != {}
    limited.take_over(free)
    free.take_over(limited)
    assert free.counts == {}


def give_back(policy: Policy, request: Request) -> None:
    """Its engine refuses it."""
    policy.charge(request, ServiceTokens(0, 0), 0.0, final=True)
    policy.push(request, 0.0, front=True)


def test_a_returned_call_goes_back_to_the_head_of_those_inside() -> None:
    policy = named_policy("fairserve")
    first = push(policy, make_request("a"), inside=True)
    push(policy, make_request("a"), inside=True)
    assert pop(policy) is first
    give_back(policy, first)
    assert pop(policy) is first


def test_what_is_normal_for_a_call_is_fixed_when_it_is_queued() -> None:
    policy = named_policy("wsc")
    request = push(policy, make_request())
    normal = pop(policy).progress.norm
    for _ in range(LEARNED):
        policy.order.learn(request, ServiceTokens(9000, 1000), 0.0)
    give_back(policy, request)
    later = push(policy, make_request())
    assert request.progress.norm == normal != later.progress.norm


def test_a_system_prompt_that_is_cached_counts_as_little_as_other_input() -> None:
    policy = named_policy("wsc", cached_weight=0.0)
    request = push(policy, make_request(prompt=100, system=80))
    pop(policy)
    policy.charge(request, ServiceTokens(100, 0, 100), 0.0, final=False)
    assert request.progress.normalised == 0.0


def test_a_request_that_comes_back_is_counted_once_and_a_call_beyond_a_limit_does_not_go_before_others() -> None:
    policy = named_policy("fairserve", throttle=ThrottleSettings(user=Ceilings(requests=1)))
    request = push(policy, make_request("a"), inside=True)
    give_back(policy, pop(policy))
    assert policy.explain(request.flow, 0.0)["user_requests"] == 1
    pop(policy)
    start = push(policy, make_request("b"))
    push(policy, make_request("a"), inside=True)
    assert pop(policy) is start


def test_a_start_that_has_waited_elsewhere_goes_first() -> None:
    policy, back = named_policy("fairserve"), make_request("b")
    back.progress.came_back = RejectReason.WORKING_SET
    push(policy, make_request("a"))
    push(policy, back)
    assert pop(policy) is back
