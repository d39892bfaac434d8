"""The KV ledger: what a backend is believed to be able to start, by our books and by its gauges."""

from __future__ import annotations

from dataclasses import replace

import pytest

from policies.capacity.gauges import CapacitySettings, Gauges, Grant
from policies.capacity.obstacle import Obstacle
from policies.capacity.slots import FIRST_SLOTS, Slots
from tests.policies.ledgers import engine, fill, obstacle, start
from tests.policies.making import make_request

SETTINGS = CapacitySettings()
PREFILL_TOKENS_MIN, PREFILL_TOKENS_MAX = 2048, 262_144
"""What vLLM computes in one step by default, and the most that is learned."""


def test_an_idle_backend_may_always_be_probed() -> None:
    ledger = engine(1)
    ledger.observe(Gauges(0.0, running=9, waiting=99, kv_usage=1.0, kv_capacity_tokens=100, block_size=16), 0.0)
    assert obstacle(ledger, make_request(prompt=5000, sequences=7)) is None
    ledger.healthy = False
    assert obstacle(ledger) == "closed"


def test_answers_that_take_no_time_leave_a_pace_that_can_be_reckoned_with() -> None:
    ledger = engine(20)
    for number in range(10_000):
        now = number / 1000
        lease = start(ledger, make_request(prompt=10), now)
        lease.output_tokens = 150
        ledger.remove(lease, now)
    assert 0.0 < ledger.pace.token_s <= 1e-6
    start(ledger, make_request(prompt=10), 1e6)
    assert obstacle(ledger, now=1e6) is None


def test_what_an_engine_usually_runs_is_an_average_over_seconds() -> None:
    ledger = engine(20)
    ledger.observe(Gauges(100.0), 100.0)
    burst = [start(ledger, make_request(prompt=10), 100.0) for _ in range(12)]
    for lease in burst[2:]:
        ledger.remove(lease, 100.5)
    assert 0.5 < ledger.usual.sequences < 0.7
    ledger.observe(Gauges(200.0), 200.0)
    assert ledger.usual.sequences == pytest.approx(2, abs=0.001)
    ledger.observe(Gauges(150.0), 150.0)
    assert ledger.usual.sequences == pytest.approx(2, abs=0.001), "no time has passed on a clock that was set back"


def test_no_request_waits_inside_an_engine_unless_it_may_have_more_slots_than_were_learned() -> None:
    assert fill(engine(20), prompt=1) == 20
    assert fill(engine(20, max_concurrency=5), prompt=1) == 5, "the configured concurrency is never exceeded"
    learned = engine(None)
    learned.slots.learn_from_refusal(6)
    assert learned.slots.most() == 6 + SETTINGS.waiting_target
    learned.slots.raise_to(8)
    assert learned.slots.most() == 8 + SETTINGS.waiting_target


@pytest.mark.parametrize(("free", "starts"), [(0, False), (1, False), (2, True)])
def test_of_a_request_with_four_sequences_two_may_wait_inside(free: int, starts: bool) -> None:
    ledger = engine(16)
    for _ in range(16 - free):
        start(ledger, make_request(prompt=1))
    assert (obstacle(ledger, make_request(prompt=1, sequences=4)) is None) == starts


def has_room(slots: Slots, sequences: int) -> bool:
    """May so many be dispatched in all? Asked within an event: what holds a request back is learned."""
    if sequences <= slots.most():
        return True
    slots.was_short = True
    return False


def test_more_are_under_way_only_if_slots_stay_empty_for_as_long_as_requests_are_held_back() -> None:
    def under_way(*, held_back_s: float) -> int:
        slots = Slots(32, CapacitySettings())
        for tick in range(105):
            if tick >= 105 - 10 * held_back_s:
                assert not has_room(slots, 33 + 32)
            slots.adjust_in_flight(22, 0, tick / 10, period_s=1.0, is_sustained=True)
        room = 32
        while has_room(slots, room + 1):
            room += 1
        return room - 32

    assert under_way(held_back_s=0.9) == 0
    assert under_way(held_back_s=1.5) == 5, "half of those that are empty"


def test_a_burst_is_not_judged_by_its_first_page_though_none_was_read_while_idle() -> None:
    slots = Slots(32, CapacitySettings())
    for now in (1.0, 9.0):
        assert not has_room(slots, 33)
        slots.adjust_in_flight(2, 0, now, period_s=1.0, is_sustained=True)
        assert not has_room(slots, 33)
        slots.emptied()


def test_unknown_slots_grow_as_requests_are_seen_to_start() -> None:
    ledger = engine(None)
    unseen = 0
    while obstacle(ledger) is None:
        start(ledger, make_request(prompt=1), started=False)
        unseen += 1
    assert FIRST_SLOTS <= unseen <= FIRST_SLOTS + 4
    for _ in range(50):
        for lease in list(ledger.starting.values()):
            ledger.started(lease, 0.1)
        while obstacle(ledger) is None:
            start(ledger, make_request(prompt=1), started=False)
    assert ledger.slots.count > 100


@pytest.mark.parametrize(("kv_usage", "known"), [(None, 32), (0.69, 32), (0.71, None), (0.97, None)])
def test_a_queue_inside_an_engine_shows_its_slots_unless_it_may_be_for_want_of_kv(
    kv_usage: float | None, known: int | None
) -> None:
    ledger = engine(None)
    for number in range(40):
        start(ledger, make_request(prompt=1), started=number < 32)
    for taken_s in (1.0, 1.1):
        ledger.observe(Gauges(taken_s, running=32, waiting=8, kv_usage=kv_usage), taken_s)
    assert ledger.slots.known() == known


def test_the_prefill_window_holds_one_however_long_and_then_its_size() -> None:
    ledger = engine()
    start(ledger, make_request(prompt=PREFILL_TOKENS_MIN * 3))  # has started: takes no room in the window
    assert obstacle(ledger, make_request(prompt=PREFILL_TOKENS_MIN * 3)) is None
    start(ledger, make_request(prompt=PREFILL_TOKENS_MIN - 10), started=False)
    assert obstacle(ledger, make_request(prompt=10)) is None
    assert obstacle(ledger, make_request(prompt=11)) == "prefill"


def test_whole_answers_of_an_engine_without_gauges_fill_no_prefill_window() -> None:
    ledger = engine(None)
    for n in range(ledger.slots.most()):
        assert obstacle(ledger, make_request("a", prompt=3_000, id=f"w{n}", streamed=False)) is None
        start(ledger, make_request("a", prompt=3_000, id=f"w{n}", streamed=False), started=False)
    assert obstacle(ledger) is Obstacle.SLOTS


def test_the_prefill_window_adapts_between_its_bounds_if_it_is_used() -> None:
    ledger = engine()
    ledger.observe(Gauges(0.0, waiting=0), 0.0)
    assert ledger.prefill.tokens == PREFILL_TOKENS_MIN
    start(ledger, make_request(prompt=10), started=False)
    for second in range(100):
        assert obstacle(ledger, make_request(prompt=PREFILL_TOKENS_MAX)) == "prefill"
        ledger.observe(Gauges(float(second), waiting=0), float(second))
    assert ledger.prefill.tokens == PREFILL_TOKENS_MAX
    for second in range(100, 200):
        ledger.observe(Gauges(float(second), running=1, waiting=3), float(second))
    assert ledger.prefill.tokens == PREFILL_TOKENS_MIN


def test_a_waiting_gauge_above_the_target_holds_back_until_it_is_stale() -> None:
    ledger = engine()
    start(ledger, make_request())
    ledger.observe(Gauges(4.0, running=1, waiting=2), 4.0)
    assert obstacle(ledger, now=4.0) is None
    ledger.observe(Gauges(5.0, running=1, waiting=3), 5.0)
    assert obstacle(ledger, now=5.0) == "waiting"
    opens_s = ledger.opens_s(make_request(), Obstacle.WAITING, 5.0)
    assert opens_s == pytest.approx(6.0)
    assert obstacle(ledger, now=opens_s) is None, "when it says it opens, it is open"


@pytest.mark.parametrize("is_step", [False, True])
def test_what_the_engine_defers_is_no_queue_for_room(is_step: bool) -> None:
    ledger = engine()
    for _ in range(10):
        start(ledger, make_request(prompt=10), started=False)
    ledger.prefill.tokens = PREFILL_TOKENS_MAX
    for second in (1.0, 2.0):
        ledger.observe(Gauges(second, running=1, waiting=9, is_step=is_step, deferred=9), second)
        assert obstacle(ledger, now=second) is None
    assert (ledger.slots.count, ledger.prefill.tokens) == (100, PREFILL_TOKENS_MAX)
    ledger.observe(Gauges(3.0, running=1, waiting=9, is_step=is_step, deferred=6), 3.0)
    assert obstacle(ledger, now=3.0) == "waiting"


@pytest.mark.parametrize(
    ("page", "started"),
    [(Gauges(1.0, running=3, waiting=2), 3), (Gauges(60.0, running=2, waiting=3, deferred=3), 2)],
    ids=["by the gauges", "but for those that are deferred"],
)
def test_unstreamed_answers_start_in_order_of_dispatch(page: Gauges, started: int) -> None:
    ledger = engine()
    leases = [start(ledger, make_request(streamed=False), 0.01 * number, started=False) for number in range(5)]
    ledger.observe(page, page.taken_s)
    assert [lease.started_s is not None for lease in leases] == [number < started for number in range(5)]


def test_each_refusal_in_a_row_doubles_the_pause_up_to_its_bound() -> None:
    ledger, now, pauses = engine(None), 0.0, []
    for _ in range(8):
        for later_s in (0.0, 0.01, 0.02):  # those that were sent together say no more than one does
            ledger.back_off(now + later_s)
        assert obstacle(ledger, now=now) == "closed"
        opens_s = ledger.opens_s(make_request(), Obstacle.CLOSED, now)
        assert obstacle(ledger, now=opens_s) is None
        pauses.append(opens_s - now)
        now = opens_s
    assert pauses == pytest.approx([0.1, 0.2, 0.4, 0.8, 1.6, 3.2, 5.0, 5.0])
    start(ledger, make_request(), now)
    ledger.back_off(now)
    assert ledger.opens_s(make_request(), Obstacle.CLOSED, now) == pytest.approx(now + 0.1), "a start ends the row"


def test_kv_is_filled_to_the_ceiling() -> None:
    assert (
        fill(engine(1000, kv=10_000), prompt=42, expected=50, reserved=50) == 96
    )  # 92 and half a block are 100 tokens


def test_what_is_kept_for_long_answers_grows_with_the_root_of_their_number() -> None:
    def kept(sequences: int) -> float:
        """Share of the cache that is not in use when no more fit, each of them holding a hundredth to begin with."""
        number = fill(engine(10_000, kv=100 * sequences), prompt=92, output_max=4000, expected=20, reserved=46)
        return 1 - number / sequences

    few, many = kept(20), kept(200)
    assert 0.02 < many < few < 0.3
    # Two hundredths are beyond the ceiling in both.
    assert (few - 0.02) / (many - 0.02) > 2


def test_answers_of_known_length_are_kept_room_for_in_full() -> None:
    ledger, known = engine(kv=1000), {"prompt": 92, "output_max": 400, "expected": 300, "reserved": 300}
    assert fill(ledger, **known) == 2
    assert obstacle(ledger, make_request(**known)) == "kv"


def test_kv_that_others_use_is_not_ours() -> None:
    ledger = engine()
    start(ledger, make_request(prompt=82, expected=1.0, reserved=10))
    for second in range(20):
        ledger.observe(Gauges(float(second), kv_usage=0.59, kv_capacity_tokens=1000, block_size=16), float(second))
    assert obstacle(ledger, make_request(prompt=392), now=20.0) == "kv"
    assert obstacle(ledger, make_request(prompt=292), now=20.0) is None
    assert ledger.kv_fraction() == pytest.approx(0.6, abs=0.01)


def test_what_ended_while_a_page_was_under_way_is_nobody_else_s() -> None:
    ledger = engine()
    gone, stays = (start(ledger, make_request(prompt=392)) for _ in range(2))
    ledger.remove(gone, 1.5)
    ledger.observe(Gauges(1.0, kv_usage=0.8, kv_capacity_tokens=1000, block_size=16), 2.0)
    assert ledger.kv_fraction() == pytest.approx(0.4, abs=0.01)
    ledger.observe(Gauges(2.0, kv_usage=0.8, kv_capacity_tokens=1000, block_size=16), 3.0)
    assert ledger.kv_fraction() > 0.5, "a page from after its end does not count it"
    assert stays.request.id in ledger.leases


def test_an_answer_that_outgrows_its_reserve_takes_more_of_the_ledger() -> None:
    ledger = engine(None)
    lease = start(ledger, make_request(prompt=100, output_max=1000, reserved=50))
    assert lease.footprint_tokens == 158
    lease.output_tokens = 40
    ledger.kv.regrown(lease, 0.0)
    assert lease.footprint_tokens == 158
    lease.output_tokens = 80
    ledger.kv.regrown(lease, 0.0)
    assert lease.footprint_tokens == 208, "a quarter of what it has taken, on top"
    ledger.remove(lease, 1.0)
    assert (ledger.kv.held_tokens, ledger.sequences, len(ledger.starting)) == (0, 0, 0)


@pytest.mark.parametrize(("running", "slots"), [(6, 6), (0, None)], ids=["those that run", "nothing if none runs"])
def test_full_means_the_slots_that_run(running: int, slots: int | None) -> None:
    ledger = engine(None)
    for _ in range(running):
        start(ledger, make_request())
    ledger.back_off(0.0, full_for=start(ledger, make_request(), started=False))
    assert (ledger.slots.count, ledger.slots.known()) == (slots or FIRST_SLOTS, slots)


@pytest.mark.parametrize("running", [0, 8, 16])
def test_what_is_seen_to_stream_runs_whatever_the_gauge_says(running: int) -> None:
    ledger = engine(16)
    for _ in range(16):
        start(ledger, make_request(prompt=1))
    for tick in range(1, 50):
        now = tick / 10
        while obstacle(ledger, now=now) is None:
            start(ledger, make_request(prompt=1), now, started=False)
        ledger.observe(Gauges(now, running=running, waiting=0), now, arrived_s=now)
    assert ledger.sequences == 16


def test_what_has_ended_does_not_stream() -> None:
    ledger = engine(16)
    for _ in range(20):
        ledger.remove(start(ledger, make_request(prompt=1)), 0.0)
    for _ in range(16):
        start(ledger, make_request(prompt=1), started=False)
    for tick in range(1, 50):
        obstacle(ledger, now=tick / 10)
        ledger.observe(Gauges(tick / 10, running=8, waiting=0), tick / 10, arrived_s=tick / 10)
    assert ledger.slots.most() > 16, "slots stay empty, so more may be under way"


def test_a_page_older_than_its_trust_teaches_nothing() -> None:
    ledger = engine(None)
    for _ in range(6):
        start(ledger, make_request(prompt=100))
    ledger.observe(Gauges(0.0, kv_capacity_tokens=10_000, block_size=16), 0.0)
    before = (ledger.slots.count, ledger.prefill.tokens, ledger.kv_fraction())
    for second in range(1, 9):
        page = Gauges(float(second), running=6, waiting=9, kv_usage=0.6, kv_capacity_tokens=10_000)
        ledger.observe(page, second + 1.1 * SETTINGS.gauge_trust_s)
    assert (ledger.slots.count, ledger.slots.known(), ledger.kv_fraction()) == (before[0], None, before[2])
    ledger.observe(replace(page, taken_s=20.0), 20.9)
    ledger.observe(replace(page, taken_s=21.0), 21.9)
    assert ledger.slots.known() == 6, "a younger one does"
    assert ledger.kv_fraction() > before[2]


def test_a_request_takes_a_quarter_of_the_slots_at_most() -> None:
    ledger = engine(8)
    assert fill(ledger, prompt=1, sequences=16) == 4
    assert ledger.sequences == 16 * 4, "each is in the books in full"
    ledger.set(SETTINGS, max_num_seqs=4)
    for lease in list(ledger.leases.values()):
        ledger.remove(lease, 1.0)
    assert ledger.slots_taken == 0, "each gives back what it took"


def test_an_allowance_that_is_too_old_lets_nothing_start() -> None:
    ledger = engine(8)
    ledger.allowance, ledger.allowed_until_s = Grant(8, 10_000), 1.0
    assert obstacle(ledger, now=1.0) is None
    assert obstacle(ledger, now=1.1) is Obstacle.CLOSED


def test_a_cache_full_of_the_requests_of_others_has_no_room() -> None:
    ledger = engine()
    start(ledger, make_request(prompt=83, sequences=2, reserved=100))
    ledger.observe(Gauges(0.0, kv_usage=0.5, kv_capacity_tokens=1024, block_size=1), 0.0)
    ledger.observe(Gauges(1.0, kv_capacity_tokens=214, block_size=1), 1.0)
    assert ledger.kv.limit_tokens() == 0
    assert ledger.obstacle(make_request(reserved=100), 1.0, paced=True) == "kv"


def test_an_engine_that_reports_no_slots_does_not_report_them() -> None:
    ledger = engine(None)
    ledger.observe(Gauges(0.0, max_num_seqs=0), 0.0)
    start(ledger, make_request())
    assert ledger.slots.known() is None
    assert ledger.kv_fraction() == 1 / FIRST_SLOTS


def test_the_prefill_and_the_kv_of_what_is_preempted_are_room_for_another_prompt() -> None:
    ledger, large = engine(kv=20_000), make_request(prompt=12_000)
    lease = start(ledger, make_request(prompt=12_000), started=False)
    assert ledger.fits_without(large, [lease])
    assert not ledger.fits_without(large, [])
    ledger.started(lease, 0.0)
    assert ledger.fits_without(large, [lease])
    assert not ledger.fits_without(large, []), "no prompt is processed, but the cache has no room for both"
