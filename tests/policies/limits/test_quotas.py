"""Quotas hold in every window, however requests end."""

from __future__ import annotations

from collections import Counter, defaultdict
from typing import Any, NamedTuple

from hypothesis import given, settings
from hypothesis import strategies as st

from policies.admission.decisions import Dispatch, Failure
from policies.admission.engine import AdmissionEngine
from policies.limits.quotas import DAY_S, MINUTE_S, Quota, Quotas
from policies.limits.sliding_counts import PARTS
from policies.request import Request, ServiceTokens
from tests.policies.limits.sharing import limit_of
from tests.policies.making import make_request, named_policy

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
@given(events=st.lists(EVENTS, max_size=80), limit=st.sampled_from([1500, 10**9]))
def test_each_bucket_counts_what_was_taken_in_it_and_no_minute_has_more_than_its_limit(
    events: list[Any], limit: int
) -> None:
    """What a request took counts when it came, up to its estimate; what it took beyond that counts when it ended."""
    quotas = Quotas(Quota(tokens_per_minute=limit))
    expected: dict[tuple[float, str, int], list[int]] = defaultdict(lambda: [0, 0])
    taken: list[tuple[str, float, int]] = []
    """Tenants, when their requests came, and what was taken of the estimates."""
    under_way: list[tuple[Request, float]] = []
    now = 0.0

    def add(tenant: str, then: float, requests: int, tokens: int) -> None:
        for window_s in (MINUTE_S, DAY_S):
            sums = expected[window_s, tenant, int(then // (window_s / PARTS))]
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
            tokens = int(event.part * estimate)
            if event.is_withdrawn:
                quotas.withdrawn(request, now)
                add(tenant, then, -1, -estimate)
            else:
                quotas.ended(request, ServiceTokens(tokens, 0), now)
                add(tenant, then if tokens < estimate else now, 0, tokens - estimate)
                taken.append((tenant, then, min(tokens, estimate)))
        else:
            tenant, estimate = event
            request = make_request(tenant, prompt=estimate)
            if quotas.find_rejection(request, now) is None:
                quotas.admitted(request, now)
                under_way.append((request, now))
                add(tenant, now, 1, estimate)
        for window_s, counts in ((MINUTE_S, quotas.minute), (DAY_S, quotas.day)):
            counts.at(now)
            for tenant in "ab":
                for bucket in range(counts.oldest, counts.bucket + 1):
                    sums = expected[window_s, tenant, bucket]
                    assert [*counts.measures(tenant, bucket)[1:3]] == sums
                    assert min(sums) >= 0
        assert quotas.under_way == Counter(request.flow.tenant for request, _ in under_way)
    taken += [(request.flow.tenant, then, request.prompt_tokens) for request, then in under_way]
    for tenant, end_s, _ in taken:
        assert sum([tokens for of, then, tokens in taken if of == tenant and end_s - MINUTE_S < then <= end_s]) <= limit


def test_what_a_request_takes_beyond_its_estimate_counts_when_it_ends() -> None:
    quotas = Quotas(Quota(tokens_per_minute=100))
    request = make_request(prompt=10)
    quotas.admitted(request, 0.0)
    quotas.ended(request, ServiceTokens(100, 0), 130.0)
    assert quotas.find_rejection(make_request(prompt=20), 131.0) is not None


def test_seconds_at_engines_count_for_each_answer_of_a_request_when_it_ends() -> None:
    quotas = Quotas(Quota(engine_seconds_per_minute=20, engine_seconds_per_day=100))
    request = make_request("t", sequences=4)
    quotas.admitted(request, 0.0)
    assert [limit.remaining for limit in quotas.standing("t", 0.0)] == [20, 100]
    quotas.ended(request, ServiceTokens(request.prompt_tokens, 0), 4.0, ran_s=4.0)
    assert [limit.remaining for limit in quotas.standing("t", 4.0)] == [4, 84]
    second = make_request("t")
    assert quotas.find_rejection(second, 4.0) is None
    quotas.admitted(second, 4.0)
    quotas.ended(second, ServiceTokens(0, 0), 14.0, ran_s=4.0)
    refused = quotas.find_rejection(make_request("t"), 14.0)
    assert limit_of(refused) == "engine_seconds"
    assert quotas.find_rejection(make_request("other"), 14.0) is None
    assert quotas.find_rejection(make_request("t"), 15.0 + refused.retry_after_s) is None


def test_of_a_request_that_came_back_the_engine_that_served_it_counts() -> None:
    quotas = Quotas(Quota(engine_seconds_per_day=100))
    engine = AdmissionEngine(named_policy("vtc"), quotas=quotas)
    engine.add_backend("one")
    assert isinstance(engine.arrived(make_request("t", id="0"), 0.0)[0], Dispatch)
    engine.failed("0", Failure.REFUSED, 20.0)
    assert any(isinstance(decision, Dispatch) for decision in engine.woke(50.0))
    engine.finished("0", ServiceTokens(10, 5), 57.0)
    assert [limit.remaining for limit in quotas.standing("t", 57.0)] == [93]
    engine.arrived(make_request("t", id="1"), 60.0)
    engine.cancelled("1", 70.0, ServiceTokens(10, 1))
    assert [limit.remaining for limit in quotas.standing("t", 70.0)] == [83]
