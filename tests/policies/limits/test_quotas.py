"""Quotas hold in every window, however requests end."""

from __future__ import annotations

from collections import defaultdict
from typing import Any, NamedTuple

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from policies.limits.quotas import DAY_S, MINUTE_S, Quota, Quotas
from policies.request import Request
from tests.policies.making import make_request

STEPS = st.sampled_from([0.0, 0.5, 7.0, 31.0, 59.0, 60.0, 119.0, 0.4 * DAY_S, DAY_S, 2.5 * DAY_S])
ESTIMATES = st.sampled_from([1, 40, 300, 1000])


class Ends(NamedTuple):
    """A request that is under way ends: one of them, having taken this part of its estimate, or it is withdrawn."""

    which: int
    part: float
    is_withdrawn: bool = False


EVENTS = st.one_of(
    st.tuples(st.just("a"), ESTIMATES),
    st.tuples(st.just("b"), ESTIMATES),
    STEPS,
    st.builds(Ends, st.integers(0, 99), st.sampled_from([0.0, 0.3, 1.0, 1.7])),
    st.builds(Ends, st.integers(0, 99), st.just(0.0), st.just(True)),
)


@settings(max_examples=300)
@given(events=st.lists(EVENTS, max_size=60))
def test_each_period_counts_what_was_taken_in_it(events: list[Any]) -> None:
    """What a request took counts when it came, up to its estimate; what it took beyond that counts when it ended."""
    quotas = Quotas(Quota(tokens_per_day=10**9))
    expected: dict[tuple[float, str, int], list[int]] = defaultdict(lambda: [0, 0])
    under_way: list[tuple[Request, float]] = []
    now = 0.0

    def add(tenant: str, then: float, requests: int, tokens: int) -> None:
        for window_s in (MINUTE_S, DAY_S):
            sums = expected[window_s, tenant, int(then // window_s)]
            sums[0] += requests
            sums[1] += tokens

    for event in events:
        if isinstance(event, float):
            now += event
        elif isinstance(event, Ends):
            if not under_way:
                continue
            request, then = under_way.pop(event.which % len(under_way))
            tenant, estimate = request.flow.tenant, request.prompt_tokens
            taken = int(event.part * estimate)
            if event.is_withdrawn:
                quotas.withdrawn(request, now)
                add(tenant, then, -1, -estimate)
            else:
                quotas.ended(request, taken, now)
                add(tenant, then if taken < estimate else now, 0, taken - estimate)
        else:
            tenant, estimate = event
            request = make_request(tenant, prompt=estimate)
            quotas.admitted(request, now)
            under_way.append((request, now))
            add(tenant, now, 1, estimate)
        for window_s, counts in ((MINUTE_S, quotas.minute), (DAY_S, quotas.day)):
            counts.at(now)
            for tenant in "ab":
                for ago, count in enumerate(counts.counted(tenant)[:2]):
                    sums = expected[window_s, tenant, int(now // window_s) - ago]
                    assert [count.requests, count.tokens] == sums
                    assert min(sums) >= 0
        waiting = [request.flow.tenant for request, _ in under_way]
        assert quotas.under_way == {tenant: waiting.count(tenant) for tenant in set(waiting)}


@settings(max_examples=200)
@given(events=st.lists(EVENTS, max_size=80))
def test_no_more_is_served_in_a_minute_than_its_limit(events: list[Any]) -> None:
    limit = 1500
    quotas = Quotas(Quota(tokens_per_minute=limit))
    taken: dict[tuple[str, int], int] = defaultdict(int)
    under_way: list[tuple[Request, int]] = []
    now = 0.0
    for event in events:
        if isinstance(event, float):
            now += event
        elif isinstance(event, Ends):
            if under_way:
                request, minute = under_way.pop(event.which % len(under_way))
                tokens = int(min(1.0, event.part) * request.prompt_tokens)
                quotas.ended(request, tokens, now)
                taken[request.flow.tenant, minute] += tokens
        else:
            request = make_request(event[0], prompt=event[1])
            if quotas.refusal(request, now) is None:
                quotas.admitted(request, now)
                under_way.append((request, int(now // MINUTE_S)))
    for request, minute in under_way:
        taken[request.flow.tenant, minute] += request.prompt_tokens
    assert max(taken.values(), default=0) <= limit


@pytest.mark.parametrize(("window_s", "quota"), [(MINUTE_S, "tokens_per_minute"), (DAY_S, "tokens_per_day")])
@pytest.mark.parametrize("way", ["ended", "withdrawn"])
def test_what_ends_unserved_in_a_later_period_gives_that_one_nothing(window_s: float, quota: str, way: str) -> None:
    quotas = Quotas(Quota(**{quota: 1000}))
    requests = [make_request(prompt=100) for _ in range(10)]
    now = 10 * window_s - 1.0
    for request in requests:
        assert quotas.refusal(request, now) is None
        quotas.admitted(request, now)
    now += 2.0
    assert quotas.refusal(make_request(prompt=100), now) is not None
    for request in requests:
        if way == "ended":
            quotas.ended(request, 0, now)
        else:
            quotas.withdrawn(request, now)
    served = 0
    for number in range(1000):
        request = make_request(prompt=10)
        then = now + number * (window_s - 2.0) / 1000
        if quotas.refusal(request, then) is None:
            quotas.admitted(request, then)
            quotas.ended(request, 10, then)
            served += 10
    assert served == 1000, "what was not taken in the period before is free, and no more"


def test_what_a_request_takes_beyond_its_estimate_counts_when_it_ends() -> None:
    quotas = Quotas(Quota(tokens_per_minute=100))
    request = make_request(prompt=10)
    quotas.admitted(request, 0.0)
    quotas.ended(request, 100, 130.0)
    assert quotas.refusal(make_request(prompt=20), 131.0) is not None
