"""What does a context count with, and how much does the cache keep?"""

from __future__ import annotations

import gc
import tracemalloc
from collections.abc import Iterable

import pytest

from policies.admission.admission_core import HistoryLimits
from policies.capacity.gauges import Gauges
from policies.capacity.output_lengths import APPS_MAX
from policies.contexts import SHARE_MAX, SHARE_MIN, InteractionKind, KeptShare
from policies.interactions import Interactions, InteractionSettings
from policies.request import NO_CLAIM, Claim, CorrelationKeys, Interaction, Request, ServiceTokens
from tests.policies.agents import HOLD_S, K, Pool, call, full
from tests.policies.making import dispatched, make_request, pool_of

IDLE_BYTES = 400
"""What a context takes, with its numbers and what the tables of the last requests grow by: 261."""


def kind(*, prompts: Iterable[int] = (), returns: float = 0.0, shared: int = 0) -> InteractionKind:
    found = InteractionKind()
    for prompt in prompts:
        found.prompt_tokens.learn(prompt)
    for number in range(50):
        found.return_rate.learn(number < 50 * returns)
        found.shared_tokens.learn(shared)
    return found


@pytest.mark.parametrize(("returns", "running", "idle"), [(0.0, 1000, 0), (0.5, 3000, 2500), (1.0, 5000, 5000)])
def test_a_context_counts_with_what_the_next_calls_bring_as_far_as_they_come(
    returns: float, running: int, idle: int
) -> None:
    young = kind(prompts=[5000] * 9, returns=returns)
    assert young.running_tokens(1000) == running
    assert young.idle_tokens(1200) == idle
    assert young.idle_tokens(8000) == 8000 * returns


def test_what_prompts_have_in_common_is_in_the_cache_once() -> None:
    alike = kind(prompts=[4300] * 9, returns=1.0, shared=4000)
    assert alike.running_tokens(4300) == 300
    assert alike.running_tokens(3000) == 1300, "all in common, and it grows to a usual prompt"
    assert alike.idle_tokens(4500) == 500


@pytest.mark.parametrize("claim", [NO_CLAIM, Claim("other", begins=True)])
def test_single_questions_and_raw_completions_count_while_they_run_and_no_longer(claim: Claim) -> None:
    engine = Pool().engine
    for number in range(20):
        claim = claim if claim is NO_CLAIM else Claim(f"q{number}", begins=True)
        one = make_request("z", id=f"q{number}", prompt=3000, claim=claim)
        assert dispatched(engine.arrived(one, number)), "the ones before it left no room"
        engine.progressed(one.id, 1, number)
        assert engine.working_set.tokens == 3000
        engine.finished(one.id, ServiceTokens(3000, 10), number + 0.1)
        assert engine.working_set.tokens == 0


@pytest.mark.parametrize("is_final", [True, False, None])
def test_whether_calls_come_back_is_learned_whatever_their_answers_looked_like(is_final: bool | None) -> None:
    """An agent that calls its tools in its text gives answers that look final."""
    pool = Pool()
    for serial in range(20):
        one = make_request("z", id=f"z{serial}", prompt=1000 + serial, claim=Claim("agent", explicit=True))
        assert pool.asks(one)
        pool.engine.finished(one.id, ServiceTokens(one.prompt_tokens, 10), pool.now, is_final)
        pool.now += 0.5
    assert pool.set.tokens == pytest.approx(1029, rel=0.02)


def test_an_app_whose_calls_come_too_late_holds_nothing() -> None:
    pool = Pool()
    for serial in range(60):
        one = make_request("z", id=f"z{serial}", prompt=1000, claim=Claim("slow", explicit=True))
        assert pool.asks(one)
        pool.answers(one)
        pool.now += 1.1 * HOLD_S
        pool.scraped()
    assert pool.set.kinds.get(one).idle_tokens(1000) == 0


def test_an_idle_context_keeps_no_interaction_and_takes_little() -> None:
    """Single questions leave the table of interactions, which is bounded, long before their contexts are forgotten."""
    table = Interactions(InteractionSettings(open_max=10))
    engine = pool_of("one", policy="fairserve", slots=64, interactions=table, remembered=HistoryLimits(10, 10))
    engine.backend_changed("one", Gauges(0.0, running=0, waiting=0, kv_capacity_tokens=K, kv_usage=0.1), 0.0)

    def ask(serial: int) -> None:
        one = make_request(id=f"{serial}", prompt=1000, claim=Claim(f"{serial}", 1, True))
        one.progress.answer_keys = CorrelationKeys((), (f"turn {serial}",))
        engine.arrived(one, 0.0)
        engine.finished(one.id, ServiceTokens(1000, 10), 0.0, False)

    def kept() -> int:
        gc.collect()
        return sum([isinstance(one, Interaction) for one in gc.get_objects()])

    for serial in range(100):
        ask(serial)
    before = kept()
    taken = []
    for first in (100, 400):  # other threads of the test run may allocate, too
        tracemalloc.start()
        try:
            for serial in range(first, first + 300):
                ask(serial)
            gc.collect()
            taken.append(tracemalloc.get_traced_memory()[0])
        finally:
            tracemalloc.stop()
    assert kept() <= before
    assert min(taken) < 300 * IDLE_BYTES
    assert len(engine.working_set) == 700


def test_kinds_are_forgotten_beyond_a_bound_the_longest_unused_first() -> None:
    kinds = Pool().engine.working_set.kinds
    starts = [make_request("t", app=str(number)) for number in range(APPS_MAX + 1)]
    first, second = kinds.get_or_create(starts[0]), kinds.get_or_create(starts[1])
    for start in starts[2:APPS_MAX]:
        kinds.get_or_create(start)
    assert kinds.get_or_create(starts[0]) is first
    kinds.get_or_create(starts[APPS_MAX])
    assert kinds.get(starts[0]) is first
    assert kinds.get(starts[1]) is not second


def test_nothing_waits_where_no_call_ever_returns_however_full_the_cache_is() -> None:
    pool = Pool()
    for tenant, begins in (("y", True), ("a", False)):  # calls of `a` are known to return
        one = make_request(tenant, id=f"{tenant}0", prompt=6000, claim=Claim(f"{tenant}0", begins=True))
        assert dispatched(pool.engine.arrived(one, 0.0))
        following = make_request(tenant, id="next", prompt=6000, claim=Claim("next", begins=True))
        assert pool.set.has_room(following) is begins
        pool.engine.cancelled(one.id, 0.0)


# --- K ---


def returns(kept: KeptShare, part: float, times: int, *, binds: bool = True) -> float:
    for _ in range(times):
        kept.returned(1000, round(1000 * part), binds=binds)
    return kept.share


def test_where_calls_find_less_than_was_counted_the_cache_keeps_less_and_where_they_find_all_it_grows_back() -> None:
    kept = KeptShare()
    returns(kept, 1.0, 1)
    lost = returns(kept, 0.5, 50)
    assert 0.5 < lost < 0.8
    assert returns(kept, 1.0, 50, binds=False) == lost, "without a start that waits a hit shows nothing"
    assert returns(kept, 1.0, 300) >= 1.0


@pytest.mark.parametrize(("part", "is_kept"), [(0.96, True), (0.99, False)])
def test_only_where_next_to_nothing_is_lost_does_a_lower_tier_hold_more_than_the_engines(
    part: float, is_kept: bool
) -> None:
    assert (returns(KeptShare(), part, 2000) < 1.01) is is_kept


def test_a_lower_tier_is_found_and_what_is_lost_at_once_counts_more_than_what_is_found() -> None:
    kept = KeptShare()
    assert returns(kept, 1.0, 5000) > 5.0, "several times the KV cache, after an hour of a call a second"
    assert returns(kept, 0.0, 120) < 1.0
    assert returns(kept, 0.0, 10_000) == SHARE_MIN
    assert returns(kept, 1.0, 100_000) == SHARE_MAX


def test_an_engine_that_never_reports_cached_tokens_shows_nothing() -> None:
    kept = KeptShare()
    assert returns(kept, 0.0, 100) == 1.0
    returns(kept, 1.0, 1)
    assert returns(kept, 0.0, 1) < 1.0


def loses(pool: Pool, cached: int | None, times: int, engine: str = "one") -> int:
    """An agent's calls find so much of their context. Returns K."""
    for serial in range(times):
        one = call("a", "agent", 3000, serial=serial)
        assert pool.asks(one)
        pool.engine.finished(one.id, ServiceTokens(3000, 10, cached), pool.now)
        pool.now += 1.0
        pool.scraped()
    return pool.set.capacity_tokens


def test_k_follows_what_returning_calls_find() -> None:
    pool = Pool()
    assert loses(pool, None, 20) == K
    assert loses(pool, 2990, 20) == K
    assert loses(pool, 500, 20) < 0.8 * K


@pytest.mark.parametrize("waits", [True, False])
def test_a_hit_shows_that_k_is_too_small_only_while_a_start_waits_though_the_set_is_below_k(waits: bool) -> None:
    """With nine tenths taken a start of 3,000 tokens waits, and each of the agent's calls finds all of its context."""
    pool = Pool()
    under_way = full(pool)
    if waits:
        assert not pool.asks(call("a", "other", 3000))
    for serial in range(2, 40):
        pool.engine.finished(under_way.id, ServiceTokens(3000, 0, 3000), pool.now)
        under_way = call("a", "a0", 3000, serial=serial)
        assert pool.asks(under_way) == [under_way.id]
    assert pool.set.tokens < K
    assert (pool.set.kept.share > 1.0) is waits


def test_a_call_that_went_to_another_engine_says_nothing_of_the_cache() -> None:
    for moves in (False, True):
        pool = Pool()
        loses(pool, 2990, 3)
        if moves:
            pool.engine.backend_changed("one", False, pool.now)
            pool.engine.add_backend("two", max_num_seqs=64)
        one = call("a", "agent", 3000, serial=9)
        assert pool.asks(one)
        pool.engine.finished(one.id, ServiceTokens(3000, 10, 0), pool.now)
        assert (pool.set.kept.share == 1.0) is moves


# --- a tenant that holds nothing ---


def test_a_tenant_that_holds_nothing_gets_a_start_in_after_the_time_for_which_holding_pays_one_at_a_time() -> None:
    """Meanwhile agents of two tenants, whose contexts take nine tenths of the cache, make a call each second."""
    pool, asked, began = Pool(), dict[str, Request](), dict[str, float]()

    def asks(request: Request) -> list[str]:
        asked[request.id] = request
        return pool.asks(request)

    for serial in range(30):
        started = []
        for name in ("a0", "a1", "b0", "b1"):
            started += asks(call(name[0], name, 2250, serial=serial))
        if serial == 1:
            for name in ("big0", "big1"):
                assert asks(call(name, name, 4000)) == [], "more than its part"
            assert asks(call("a", "other", 2250)) == [], "its tenant holds some"
        while started:
            id = started.pop()
            began[id] = pool.now
            started += pool.answers(asked[id], output=0)
        pool.now += 1.0
        for id in pool.scraped():
            began[id] = pool.now
            pool.engine.progressed(id, 1, pool.now)
            pool.answers(asked[id], output=0)
    first, second = sorted(began[name] for name in ("big0.0", "big1.0"))
    assert first == pytest.approx(1.0 + HOLD_S, abs=1.0)
    assert second == pytest.approx(first + HOLD_S, abs=1.0)
    assert "other.0" not in began


def test_a_call_that_does_not_come_in_time_lowers_the_rate_of_its_kind() -> None:
    pool, rates = Pool(), []
    for serial in range(2):
        pool.serves(last := call("a", f"a{serial}", 1000))
        rates.append(pool.set.kinds.get(last).return_rate.value)
        pool.after(1.1 * HOLD_S)
    assert rates[0] > rates[1]
