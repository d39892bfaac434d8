"""What an engine says after each step is taken for a fact, as long as it can be one."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from policies.capacity.gauges import Gauges
from policies.capacity.ledger import BackendLedger
from policies.capacity.obstacle import Obstacle
from policies.capacity.pace import PREFILL_TOKENS_MIN
from tests.policies.ledgers import engine, start
from tests.policies.making import make_request

PAGE = Gauges(0.0, running=0, waiting=0, kv_usage=0.0, kv_capacity_tokens=8160, block_size=16)
STEP = replace(PAGE, is_step=True, scheduled_tokens=0, scheduled_tokens_max=8192, max_num_seqs=64)


def at(gauges: Gauges, now: float, **changed: object) -> Gauges:
    return replace(gauges, taken_s=now, **changed)


def busy(*gauges: Gauges, max_num_seqs: int | None = None) -> BackendLedger:
    """An engine with one request of ours."""
    ledger = engine(max_num_seqs)
    start(ledger, make_request(prompt=100, reserved=100))
    for one in gauges:
        ledger.observe(one, one.taken_s)
    return ledger


@pytest.mark.parametrize(
    ("configured", "page", "slots"), [(None, PAGE, None), (None, STEP, 64), (32, STEP, 32), (128, STEP, 64)]
)
def test_what_is_configured_and_what_a_step_says_are_both_upper_bounds(
    configured: int | None, page: Gauges, slots: int | None
) -> None:
    ledger = busy(page, max_num_seqs=configured)
    assert (ledger.slots.known(), ledger.prefill.tokens == 8192) == (slots, page is STEP)


@settings(max_examples=30)
@given(
    lengths=st.lists(st.tuples(st.integers(1, 400), st.integers(1, 200), st.booleans()), min_size=1, max_size=60),
    ceiling=st.floats(0.5, 1.0),
)
def test_never_beyond_the_capacity_by_what_is_known(lengths: list[tuple[int, int, bool]], ceiling: float) -> None:
    """Answers of known length fit the whole cache at their largest; unknown ones leave what the ceiling says."""
    ledger = engine(1000, kv_ceiling=ceiling)
    ledger.observe(at(STEP, 0.0, max_num_seqs=1000), 0.0)
    unsure = 0
    for prompt, reserved, is_known in lengths:
        request = make_request(
            prompt=prompt, output_max=reserved if is_known else 4000, expected=reserved, reserved=reserved
        )
        if ledger.obstacle(request, 0.0) is None:
            lease = start(ledger, request)
            unsure += 0 if is_known else lease.footprint_tokens
    # Nothing of this ends before something else has grown, but for shorter answers that make room for longer ones.
    held = sum(lease.request.prompt_tokens + 8 for lease in ledger.leases.values())
    assert held <= 8160 or len(ledger.leases) == 1
    if unsure == ledger.kv.held_tokens:
        assert ledger.kv.limit_tokens() == round(8160 * ceiling)
    if not unsure:
        assert ledger.kv.limit_tokens() == 8160


def test_while_the_engine_has_thrown_out_requests_nobody_starts() -> None:
    ledger = busy(PAGE, at(STEP, 0.1, running=0, waiting=1))
    assert ledger.obstacle(make_request(), 0.1) == "waiting"
    ledger.observe(at(STEP, 0.2, running=1, waiting=0), 0.2)
    assert ledger.obstacle(make_request(), 0.2) is None


def test_one_that_waits_for_its_first_start_is_not_thrown_out() -> None:
    ledger = busy(PAGE)
    start(ledger, make_request(), started=False)
    ledger.observe(at(STEP, 0.1, running=1, waiting=1), 0.1)
    assert ledger.obstacle(make_request(), 0.1) is None


def test_hundreds_of_steps_say_no_more_of_common_prefixes_than_ten_pages() -> None:
    """A gauge below the books is believed slowly, however often it is read."""

    def fraction(interval_s: float, gauges: Gauges) -> int:
        ledger = busy(PAGE)
        for number in range(round(1.0 / interval_s)):
            ledger.observe(at(gauges, number * interval_s), number * interval_s)
        return ledger.kv.use(0, 1.0).now

    of_steps, of_pages = (fraction(s, at(one, 0.0, kv_usage=50 / 8160)) for s, one in ((0.005, STEP), (0.1, PAGE)))
    assert of_steps == pytest.approx(of_pages, rel=0.1)


def test_the_prefill_window_is_a_step_at_least_and_more_where_the_engine_then_stands_still() -> None:
    ledger = engine(None)
    start(ledger, make_request(prompt=10), started=False)

    def seen(times: int, **fields: Any) -> int:
        for _ in range(times):
            ledger.held_back(make_request(), Obstacle.PREFILL)
            now = seen_s[0] = seen_s[0] + 0.01
            ledger.observe(at(STEP, now, **{"running": 0, "waiting": 0} | fields), now)
        return ledger.prefill.tokens

    seen_s = [0.0]
    assert seen(1) == 8192 * 5 // 4
    assert seen(20) > 2 * 8192
    assert seen(40, running=1, waiting=4) == 8192
    assert seen(4, running=1, waiting=1) == 8192, "what waits keeps the engine at work"


def test_the_prefill_of_a_step_is_at_least_what_pages_begin_with() -> None:
    assert busy(at(STEP, 0.0, scheduled_tokens_max=512)).prefill.tokens == PREFILL_TOKENS_MIN
