"""Agents whose contexts overfill the KV cache, and engines under pressure: what is won, and who pays for it?"""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import pytest

from bench.working_sets import FLOOD, LARGE, SMALL, Found, Row, run
from lab.pressure import CASES, Direct, gateway, press

SECONDS = 350.0
SHORT_S = 250.0
"""Enough where contexts that fill the cache at first decide nothing."""
TWICE = Row("", LARGE, 120_000, 2)


@cache
def found(row: Row, *, holds: bool, seconds: float = SECONDS) -> Found:
    return run(row, 1, seconds, holds=holds)


def both(row: Row, seconds: float = SECONDS) -> tuple[Found, Found]:
    """With the working set and without."""
    return found(row, holds=True, seconds=seconds), found(row, holds=False, seconds=seconds)


def median(values: list[float]) -> float:
    return sorted(values)[len(values) // 2]


def test_agents_of_twice_the_cache_find_their_contexts_again_and_finish_more() -> None:
    with_it, without = both(TWICE)
    assert with_it.tasks > 1.25 * without.tasks
    assert with_it.calls > 1.2 * without.calls
    assert with_it.cached_tokens / with_it.prompt_tokens > 0.6
    assert without.cached_tokens / without.prompt_tokens < 0.2
    assert median(with_it.inside_s) < 0.1 * median(without.inside_s)
    # The 95th percentile is that of the parked: 2 to 58 s by seed.
    assert sorted(with_it.inside_s)[int(0.9 * len(with_it.inside_s))] < 5.0, "few are parked"


def test_agents_that_fit_wait_for_nothing() -> None:
    with_it, without = both(Row("", LARGE, 120_000, 0.5), SHORT_S)
    assert with_it.calls == without.calls
    assert with_it.tasks == without.tasks


def test_agents_that_pause_for_longer_than_the_cache_takes_to_compute_lose_nothing() -> None:
    with_it, without = both(Row("", SMALL, 120_000, 2, pause_s=10.0), SHORT_S)
    assert with_it.calls >= 0.95 * without.calls


def test_tenants_have_service_by_weight_though_a_context_is_large_beside_a_small_part() -> None:
    service = run(Row("", LARGE, 120_000, 4, weights=(4.0, 1.0)), 1, 2 * SHORT_S, holds=True).service
    assert 3.4 < service["a"] / service["b"] < 4.6


def test_a_flood_of_single_questions_gains_no_service_over_agents() -> None:
    service = found(Row("", LARGE, 120_000, 2, beside=(FLOOD,)), holds=True).service
    assert service["flood"] == pytest.approx((service["a"] + service["b"]) / 2, rel=0.15)


def test_where_engines_report_their_steps_no_answer_need_be_streamed() -> None:
    row = Row("", LARGE, 120_000, 2, streams=False)
    with_it, without = (run(row, 1, SHORT_S, holds=holds, steps=True).calls for holds in (True, False))
    assert with_it > 1.2 * without


# --- an engine is kept as full as without a gateway, and nobody waits inside it ---


@pytest.mark.interpreted_only("the experiment extends what is compiled")
def test_on_steps_a_flood_fills_the_engine_without_preemptions() -> None:
    case = replace(CASES["flood of 64, answers of 200"], window_s=5.0)
    direct, ours = press(case, Direct()), press(case, gateway(case), steps=True)
    assert ours.fill >= 0.96 * direct.fill
    assert ours.tokens_per_s >= direct.tokens_per_s
    assert ours.preemptions <= 0.02 * direct.preemptions
    assert ours.waiting_max <= 2
    assert ours.light_p50_s < 0.01 * direct.light_p50_s


@pytest.mark.interpreted_only("the experiment extends what is compiled")
def test_of_few_slots_a_light_tenant_waits_for_the_next_that_is_free() -> None:
    case = replace(CASES["6 slots, not configured"], window_s=8.0)
    direct, ours = press(case, Direct()), press(case, gateway(case), steps=True)
    assert ours.light_p50_s <= 0.02 * direct.light_p50_s
    assert ours.tokens_per_s >= 0.97 * direct.tokens_per_s
