"""How fast does an engine compute prompts? As fast as it is seen to, whatever it is asked for."""

from __future__ import annotations

from random import Random

import pytest

from policies.capacity.gauges import CapacitySettings, Gauges
from policies.capacity.lease import Lease
from policies.capacity.ledger import BackendLedger
from policies.capacity.pace import PrefillRate
from policies.request import ServiceTokens
from tests.policies.ledgers import start
from tests.policies.making import make_request

TOKENS_PER_S, STEP_S = 10_000.0, 0.02


def computes(rate: PrefillRate, tokens: int, noise_s: float = 0.0) -> None:
    """A prompt takes a step's fixed time besides."""
    rate.observed(tokens, STEP_S + tokens / TOKENS_PER_S + noise_s)


def test_the_rate_is_that_of_long_prompts_and_short_ones_do_not_change_it() -> None:
    """Else it would fall where the engine idles: what is asked for is short then."""
    random, rate = Random(1), PrefillRate()
    assert rate.tokens_per_s is None
    for _ in range(100):
        computes(rate, random.randrange(5000, 8000), random.gauss(0.0, 0.01))
        computes(rate, random.randrange(100, 5000), random.gauss(0.0, 0.01))
    assert rate.tokens_per_s == pytest.approx(TOKENS_PER_S, rel=0.05)
    known = rate.tokens_per_s
    for _ in range(1000):
        computes(rate, 100)
    assert rate.tokens_per_s == known


def test_prompts_of_one_length_show_a_rate() -> None:
    rate = PrefillRate()
    for number in range(20):
        assert rate.tokens_per_s is None, number
        computes(rate, 3000)
    assert rate.tokens_per_s == pytest.approx(3000 / (STEP_S + 0.3))


def test_a_slower_engine_is_seen_in_the_prompts_that_follow() -> None:
    rate = PrefillRate()
    for seconds in (*[0.3] * 200, *[0.6] * 200):
        rate.observed(3000, seconds)
    assert rate.tokens_per_s == pytest.approx(5000, rel=0.05)


def test_a_prompt_that_others_were_before_shows_nothing() -> None:
    rate = PrefillRate()
    for number in range(60):
        lease = Lease(make_request(id=f"{number}", prompt=3000), "one", 0.0)
        lease.is_first = number % 2 == 0
        lease.dispatched_s = 0.5 * number
        lease.started_s = lease.dispatched_s + (0.3 if lease.is_first else 0.001)
        rate.answered(lease, ServiceTokens(3000, 5, 0))
    assert rate.tokens_per_s == pytest.approx(10_000)


@pytest.mark.parametrize("says_tokens", [True, False])
def test_steps_show_the_rate_if_they_say_what_they_computed_and_answers_do_if_they_do_not(says_tokens: bool) -> None:
    random, rate, now = Random(1), PrefillRate(), 0.0
    for number in range(60):
        tokens = random.randrange(2048, 4096)
        lease = Lease(make_request(id=f"{number}", prompt=tokens), "one", now)
        lease.is_first = True
        now += tokens / 4000
        step = Gauges(now, running=1, is_step=True, scheduled_tokens=tokens if says_tokens else None)
        rate.saw_step(step)
        lease.started_s = now
        # Were answers read although steps are, they would say another rate.
        rate.answered(lease, ServiceTokens(tokens * 3 if says_tokens else tokens, 5, 0))
    assert rate.tokens_per_s == pytest.approx(4000, rel=0.01)


def test_a_step_after_which_nothing_runs_begins_no_other() -> None:
    rate, now = PrefillRate(), 0.0
    for number in range(60):
        rate.saw_step(Gauges(now, running=number % 2, is_step=True, scheduled_tokens=4000))
        now += 1.0 if number % 2 else 100.0
    assert rate.tokens_per_s == pytest.approx(4000)


def test_pages_show_the_rate_whoever_starts_and_ends_between_them() -> None:
    """Each step gives every answer a token, and takes longer by the prompts that it computes."""
    rng, rate, step_s, now = Random(4), 8000.0, 0.02, 0.0
    ledger = BackendLedger("e", CapacitySettings(), max_num_seqs=64)
    running = [start(ledger, make_request(id=f"first-{number}")) for number in range(8)]
    for number in range(1, 2000):
        prompts = rng.choice([0, 0, 0, 1, 2])
        ids = [rng.choice([f"r{number}", "comes again"]) for _ in range(prompts)]
        new = [
            start(ledger, make_request(id=id, prompt=rng.randrange(100, 900)), now, started=False)
            for id in dict.fromkeys(ids) if id not in ledger.leases
        ]  # fmt: skip
        now += step_s + sum(lease.request.prompt_tokens for lease in new) / rate
        ledger.prefill_pace.made_tokens += len(running)
        for lease in new:
            ledger.started(lease, now)
        running += new
        while len(running) > 5 and rng.random() < 0.5:
            ledger.remove(running.pop(rng.randrange(len(running))), now)
        if rng.random() < 0.4:
            ledger.observe(Gauges(now, running=len(running), waiting=0), now)
    assert ledger.prefill_pace.tokens_per_s() == pytest.approx(rate, rel=0.05)
