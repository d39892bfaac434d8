"""What does a ledger know between two gauges, and what does it forget with the next one?"""

from __future__ import annotations

from math import inf

from policies.capacity.gauges import CapacitySettings, Gauges, Grant
from policies.capacity.obstacle import Obstacle
from policies.capacity.slots import Slots
from tests.policies.ledgers import engine, obstacle, start
from tests.policies.making import make_request


def test_what_leaves_the_engines_queue_without_a_start_has_left_it() -> None:
    ledger = engine()
    leases = [start(ledger, make_request(), started=False) for _ in range(5)]
    ledger.observe(Gauges(0.0, running=1, waiting=6), 0.0)
    for lease in leases[:3]:
        ledger.started(lease, 0.1)
    assert obstacle(ledger, now=0.1) == "waiting"
    ledger.remove(leases[3], 0.2)
    assert obstacle(ledger, now=0.2) is None


def test_ends_before_a_gauge_are_in_it() -> None:
    ledger = engine()
    leases = [start(ledger, make_request()) for _ in range(4)]
    ledger.observe(Gauges(0.0, running=4, waiting=4), 0.0)
    for lease in leases[:2]:
        ledger.remove(lease, 0.1)
    assert obstacle(ledger, now=0.1) is None
    ledger.observe(Gauges(0.2, running=2, waiting=4), 0.2)
    assert obstacle(ledger, now=0.2) == "waiting"


def test_what_was_reserved_for_unknown_lengths_is_free_when_they_have_ended() -> None:
    ledger = engine()
    ledger.observe(Gauges(0.0, running=0, waiting=0, kv_usage=0.0, kv_capacity_tokens=10_000, block_size=16), 0.0)
    unknown = start(ledger, make_request(prompt=1000, output_max=4000, reserved=100))
    start(ledger, make_request(prompt=1000, output_max=100, reserved=100))
    assert ledger.kv.limit_tokens() < 10_000
    ledger.remove(unknown, 1.0)
    assert ledger.kv.limit_tokens() == 10_000


def test_what_is_under_way_beyond_the_slots_falls_with_the_engines_queue_and_with_the_last_request() -> None:
    slots = Slots(32, CapacitySettings())

    def seen(running: int, waiting: int, from_s: float) -> int:
        for tick in range(30):
            slots.was_short = True
            slots.adjust_in_flight(running, waiting, from_s + tick / 10, period_s=1.0, is_sustained=True)
        return slots.most() - 32

    assert seen(22, 0, 0.0) > 0
    assert seen(32, 12, 10.0) == 0, "ten more wait than should"
    assert seen(22, 0, 20.0) > 0
    slots.emptied()
    assert slots.most() == 32


def test_a_streamed_answer_makes_room_for_a_prompt_with_its_first_token_and_by_no_time() -> None:
    ledger = engine(8)
    ledger.observe(Gauges(0.0, running=0, waiting=0), 0.0)
    start(ledger, make_request(prompt=3000), started=False)
    waits = make_request(prompt=3000)
    assert obstacle(ledger, waits) is Obstacle.PREFILL
    assert ledger.opens_s(waits, Obstacle.PREFILL, 0.0) == inf
    start(ledger, make_request(prompt=1, streamed=False), 1.0, started=False)
    assert ledger.opens_s(waits, Obstacle.PREFILL, 1.0) == 1.0 + ledger.pace.first_token_s


def test_gateways_that_share_an_engine_have_a_part_each_of_its_prefill() -> None:
    for sharers, found in ((1, None), (2, None), (4, Obstacle.PREFILL)):
        ledger = engine(8)
        ledger.observe(Gauges(0.0, running=0, waiting=0), 0.0)
        ledger.allowance = Grant(8, 100_000, sharers=sharers)
        start(ledger, make_request(prompt=400), started=False)
        assert obstacle(ledger, make_request(prompt=400)) is found, "the window has 2,048 tokens"


def test_a_request_needs_only_what_is_missing_when_others_have_ended() -> None:
    ledger = engine(8, kv=10_000)
    lease = start(ledger, make_request(prompt=3000, output_max=100, reserved=100, expected=100.0), started=False)
    lease.output_tokens = 50
    ledger.started(lease, 0.0)
    long = make_request(prompt=1000, output_max=1000, reserved=1000, expected=1000.0)
    needed = ledger.kv.needed_tokens(long, ledger.kv.use(0, 0.0), 0.0)
    assert 1000 <= needed <= 1100, "and not 2,000: when it is that long, the other one has ended"


def test_an_answer_that_came_whole_holds_nothing_when_it_has_ended() -> None:
    ledger = engine(8, kv=10_000)
    ended, running = (start(ledger, make_request(prompt=100, streamed=False, reserved=50)) for _ in range(2))
    ledger.estimate(0.1)
    ledger.remove(ended, 0.2)
    ledger.estimate(0.3)
    assert ledger.kv.use(0, 0.3).now == 100 + running.output_tokens + 8
    ledger.remove(running, 0.4)
    assert ledger.kv.use(0, 0.4).now == 0
    assert ledger.estimate(0.4) > 0.4, "there is nothing to estimate"


def test_what_other_gateways_hold_of_an_engine_is_no_surplus() -> None:
    for elsewhere, foreign in ((3000, 0), (1000, 1000)):
        ledger = engine(8, kv=10_000)
        ledger.allowance = Grant(8, 8000, sequences_elsewhere=2, kv_tokens_elsewhere=elsewhere)
        start(ledger, make_request(prompt=992, output_max=0, reserved=0))
        ledger.observe(Gauges(0.1, kv_usage=0.4, kv_capacity_tokens=10_000, block_size=16), 0.1)
        assert ledger.kv.limit_tokens() == 10_000 - foreign, "half of a surplus of 2,000"
