"""How fast does an engine compute prompts? As fast as it is seen to, whatever is in its queue."""

from __future__ import annotations

from random import Random

import pytest

from policies.capacity.gauges import Gauges
from policies.capacity.lease import Lease
from policies.capacity.pace import PrefillRate
from policies.request import ServiceTokens
from tests.policies.making import make_request


def test_the_rate_of_prefill_is_the_slope_of_the_time_over_what_is_not_cached() -> None:
    random, rate = Random(1), PrefillRate()
    assert rate.tokens_per_s is None
    for _ in range(100):
        tokens, output = random.randrange(100, 5000), random.choice([0, random.randrange(500)])
        rate.observed(tokens, output, 0.2 + tokens / 10_000 + 0.02 * output + random.gauss(0.0, 0.01))
    assert rate.tokens_per_s == pytest.approx(10_000, rel=0.05)


def test_prompts_that_do_not_differ_or_do_not_matter_say_nothing_of_the_rate() -> None:
    alike, noise, random = PrefillRate(), PrefillRate(), Random(1)
    for _ in range(100):
        alike.observed(500, 0.0, random.uniform(0.1, 0.2))
        noise.observed(random.randrange(100, 200), 0.0, random.uniform(0.1, 5.0))
    assert alike.tokens_per_s is None
    assert noise.tokens_per_s is None


def test_prompts_that_never_are_alone_show_the_rate_by_what_they_take_together_until_a_slope_is_found() -> None:
    random, rate = Random(1), PrefillRate()
    leases = [
        Lease(make_request(id=f"{number}", prompt=random.randrange(500, 3000)), "one", 0.0) for number in range(60)
    ]
    now = 0.0
    for number, lease in enumerate(leases):
        now += lease.request.prompt_tokens / 4000
        # Two that are computed in one step show their first tokens together.
        lease.started_s = now if number % 2 else now + leases[number + 1].request.prompt_tokens / 4000
        rate.started(lease, lease.started_s)
        rate.answered(lease, ServiceTokens(lease.request.prompt_tokens, 5, 0), now + 1.0)
        assert (rate.tokens_per_s is None) == (number < 19)
    assert rate.tokens_per_s == pytest.approx(4000, rel=0.05)
    for _ in range(40):
        tokens = random.randrange(100, 5000)
        rate.observed(tokens, 0.0, 0.2 + tokens / 10_000)
    rate.answered(leases[-1], ServiceTokens(3000, 5, 0), now + 1.0)
    assert rate.tokens_per_s == pytest.approx(10_000, rel=0.01), "what decoding takes is no part of a slope"


@pytest.mark.parametrize("says_tokens", [True, False])
def test_steps_show_the_rate_if_they_say_what_they_computed_and_answers_do_if_they_do_not(says_tokens: bool) -> None:
    random, rate, now, before = Random(1), PrefillRate(), 0.0, None
    for number in range(60):
        tokens = random.randrange(500, 3000)
        lease = Lease(make_request(id=f"{number}", prompt=tokens), "one", now)
        lease.is_first = True
        now += 0.01 + tokens / 4000
        step = Gauges(now, running=1, is_step=True, scheduled_tokens=tokens if says_tokens else None)
        rate.saw_step(step, before)
        before, lease.started_s = step, now
        rate.started(lease, now)
        # Were answers read although steps are, they would say another rate.
        rate.answered(lease, ServiceTokens(tokens * 3 if says_tokens else tokens, 5, 0), now)
    assert rate.tokens_per_s == pytest.approx(4000, rel=0.01)
