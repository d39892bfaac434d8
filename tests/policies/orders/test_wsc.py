"""WSC and FairServe: what one call counts, when it is queued, when it comes back and when its prompt was cached."""

from __future__ import annotations

import pytest

from policies.admission.scheduler import schedule
from policies.capacity.output_lengths import ENOUGH
from policies.limits.throttle import Ceilings, ThrottleSettings
from policies.orders.fairserve import FairServe, FairServeParams
from policies.orders.order import Selection
from policies.orders.profiles import Profiles
from policies.orders.wsc import Wsc, WscParams
from policies.request import Refusal, Request, ServiceTokens
from tests.policies.making import Room, make_request


def pop(order: Wsc) -> Request:
    selection = schedule(order, Room())
    assert isinstance(selection, Selection)
    return selection.request


def give_back(order: Wsc, request: Request) -> None:
    """Its engine refuses it."""
    order.charge(request, ServiceTokens(0, 0), 0.0, final=True)
    order.push(request, 0.0, front=True)


def with_limit(requests: int) -> FairServe:
    return FairServe(FairServeParams(throttle=ThrottleSettings(user=Ceilings(requests=requests))))


def test_what_is_normal_for_a_call_is_fixed_when_it_is_queued() -> None:
    order, request, later = Wsc(), make_request(), make_request()
    order.push(request, 0.0)
    normal = pop(order).progress.norm
    for _ in range(4 * ENOUGH):
        order.learn(request, ServiceTokens(9000, 1000), 0.0)
    give_back(order, request)
    order.push(later, 0.0)
    assert request.progress.norm == normal != later.progress.norm


def test_a_system_prompt_that_is_cached_counts_as_little_as_other_input() -> None:
    order, request = Wsc(WscParams(cached_weight=0.0)), make_request(prompt=100, system=80)
    order.push(request, 0.0)
    order.charge(pop(order), ServiceTokens(100, 0, 100), 0.0, final=False)
    assert request.progress.normalised == 0.0


def test_a_request_that_comes_back_is_counted_once() -> None:
    order, request = with_limit(10), make_request()
    order.push(request, 0.0)
    give_back(order, pop(order))
    assert order.explain(request.flow, 0.0)["user_requests"] == 1


def test_a_call_beyond_a_limit_does_not_go_before_others() -> None:
    order = with_limit(1)
    calls = [make_request("a") for _ in range(2)]
    for call in calls:
        call.progress.inside = True
    order.push(calls[0], 0.0)
    pop(order)
    start = make_request("b")
    order.push(start, 0.0)
    order.push(calls[1], 0.0)
    assert pop(order) is start


def test_of_two_gateways_the_one_that_has_seen_more_is_believed() -> None:
    few, many = Profiles(), Profiles()
    for profiles, number, worth in ((few, ENOUGH, 50.0), (many, 5 * ENOUGH, 1000.0)):
        for _ in range(number):
            profiles.learn("t", "app", 1, worth)
    of_few = few.snapshot()
    few.adopt(few.read(many.snapshot()))
    many.adopt(many.read(of_few))
    assert few.norm("t", "app", 1) == many.norm("t", "app", 1) == 1000.0


def test_a_start_that_has_waited_elsewhere_goes_first() -> None:
    order, first, back = FairServe(), make_request("a"), make_request("b")
    back.progress.came_back = Refusal.WORKING_SET
    order.push(first, 0.0)
    order.push(back, 0.0)
    assert pop(order) is back


def test_a_young_population_is_its_mean_and_an_old_one_follows_slowly() -> None:
    profiles = Profiles()
    for worth in [100.0] * ENOUGH + [200.0] * (20 - ENOUGH):
        profiles.learn("scope", "app", 1, worth)
    assert profiles.norm("scope", "app", 1) == pytest.approx((100.0 * ENOUGH + 200.0 * (20 - ENOUGH)) / 20)
    for _ in range(480):
        profiles.learn("scope", "app", 1, 200.0)
    old = profiles.norm("scope", "app", 1)
    profiles.learn("scope", "app", 1, 300.0)
    assert profiles.norm("scope", "app", 1) - old == pytest.approx(0.02 * (300.0 - old))
