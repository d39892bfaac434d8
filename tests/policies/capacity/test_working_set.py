"""Which starts wait while the interactions under way fill the KV cache, and what ends their wait?"""

from __future__ import annotations

from math import inf, sqrt

import pytest

from policies.capacity.gauges import Gauges
from policies.capacity.obstacle import Obstacle
from policies.queue.bounds import QueueLimits
from policies.request import Claim, RejectReason, ServiceTokens, Wait, of_batch
from policies.tree.pool_tree import PoolTree
from tests.policies.agents import HOLD_S, K, Pool, call, full, working_set
from tests.policies.making import dispatched, make_request, pool_of, rejected


def test_a_start_waits_while_what_is_under_way_fills_the_cache_and_calls_inside_pass_it() -> None:
    pool = Pool()
    first = full(pool)
    assert pool.asks(call("a", "a3", 3000)) == []
    explained = pool.engine.explain("a3.0", pool.now)
    assert set(explained.blocked.obstacles.values()) == {Obstacle.WORKING_SET}
    assert "fill the KV cache" in explained.reason
    assert pool.answers(first, output=0) == [], "the context of an interaction in a tool is still held"
    inside = call("a", "a0", 3100, serial=2)
    assert pool.asks(inside) == [inside.id]
    assert pool.set.tenants() == {"a": 3000 + 3000 + 3100}


def test_a_context_counts_for_as_long_as_the_cache_takes_to_compute_and_nothing_but_time_must_happen() -> None:
    pool = Pool()
    full(pool)
    pool.asks(call("a", "a3", 3000))
    due_s = pool.engine.next_wakeup()
    assert due_s == pytest.approx(HOLD_S, abs=0.01)
    assert pool.after(HOLD_S - 0.1) == []
    assert pool.after(0.1) == ["a3.0"]


def test_a_tenant_that_holds_nothing_enters_without_room_one_in_each_time_that_the_cache_takes() -> None:
    tree = PoolTree()
    found = working_set(tree)
    full, *starts = [call(tenant, tenant, 9000) for tenant in "abc"]
    found.kinds.get_or_create(full).return_rate.learn(1.0)
    for request in (full, *starts):
        tree.arrived(request, 1.0)
        request.progress.wait = Wait(0.0, "", 0.0)
    found.dispatched(full, 0.0)
    entered_s = []
    for now in (0.0, HOLD_S, 2 * HOLD_S - 0.1, 2 * HOLD_S):
        found.expire(now)
        if found.has_room(starts[0]):
            found.dispatched(starts.pop(0), now)
            entered_s.append(now)
    assert entered_s == [HOLD_S, 2 * HOLD_S]


def test_an_interaction_that_is_over_counts_no_more() -> None:
    pool = Pool()
    full(pool)
    last = call("a", "a1", 3000, ends=True, serial=1)
    assert pool.asks(last) == [last.id]
    assert pool.asks(call("a", "a3", 3000)) == []
    assert pool.answers(last) == ["a3.0"]


def test_a_tenant_within_its_part_does_not_wait_for_one_that_fills_the_cache() -> None:
    pool = Pool()
    full(pool)
    assert pool.asks(call("a", "a3", 3000)) == []
    assert pool.asks(call("b", "b0", 3000)) == ["b0.0"], "half of the cache is its part"
    assert pool.asks(call("b", "b1", 3000)) == [], "and no more"


@pytest.mark.parametrize(
    ("received", "start", "starts"),
    [(15_000, 3000, ["b1.0"]), (45_000, 3000, []), (45_000, 6000, ["b1.0"])],
    ids=["within the window", "ahead", "ahead of a start beyond the part of its tenant"],
)
def test_a_tenant_that_received_more_than_one_that_waits_waits_as_well(
    received: int, start: int, starts: list[str]
) -> None:
    """The window of the order is what it may be ahead; its part of the cache is then no right."""
    pool = Pool()
    b0 = call("b", "b0", 100, ends=True)
    pool.asks(b0)
    full(pool)
    pool.asks(call("a", "a3", start))
    pool.engine.policy.charge(b0, ServiceTokens(received, 0), pool.now, final=False)
    assert pool.asks(call("b", "b1", 3000)) == starts


def test_nothing_waits_where_nothing_runs_or_returns_however_long_it_is() -> None:
    pool = Pool()
    assert pool.asks(call("a", "a0", 2 * K)) == ["a0.0"]


@pytest.mark.parametrize("policy", ["vtc", "wsc", "fcfs", "dlpm"])
def test_orders_that_let_nothing_pass_hold_nothing(policy: str) -> None:
    pool = Pool(policy=policy)
    assert full(pool)
    assert pool.asks(call("a", "a3", 900)) == ["a3.0"]
    assert pool.engine.working_set.has_room(call("a", "a4", 5000))


def test_nothing_waits_before_the_cache_is_known_and_without_a_rate_a_context_is_held_ten_seconds() -> None:
    engine = pool_of("one", policy="fairserve", slots=64)
    engine.backend_changed("one", Gauges(0.0, running=0, waiting=0), 0.0)
    assert engine.working_set.hold_s == 0.0
    engine.working_set.kinds.get_or_create(call("a", "a0", 3000)).return_rate.learn(1.0)
    for number in range(3):
        assert dispatched(engine.arrived(call("a", f"a{number}", 3000), 0.0))
        engine.progressed(f"a{number}.0", 1, 0.0)
    assert engine.working_set.has_room(call("a", "a3", 3000))
    engine.backend_changed("one", Gauges(1.0, running=3, waiting=0, kv_capacity_tokens=K), 1.0)
    assert not engine.working_set.has_room(call("a", "a3", 3000))
    assert engine.working_set.hold_s == 10.0


@pytest.mark.parametrize(("prompt", "expected"), [(1200, 6000), (100, 100)])
def test_a_start_is_expected_to_take_what_calls_usually_have_that_follow_starts_of_its_size(
    prompt: int, expected: int
) -> None:
    pool = Pool()
    for number in range(50):
        pool.serves(call("a", "a0", 6000 if number else 1500, serial=number))
    pool.after(2 * HOLD_S)
    one = call("a", "a1", prompt)
    assert pool.asks(one) == [one.id]
    assert pool.set.tokens == pytest.approx(expected, rel=0.05), "one of fifty contexts was not asked for again"


def test_a_short_call_beside_a_long_one_makes_their_context_no_smaller() -> None:
    pool = Pool()
    pool.serves(call("a", "usual", 3000))
    pool.after(2 * HOLD_S)
    for one in (call("a", "other", 6000), call("a", "other", 500, serial=1)):
        assert pool.asks(one) == [one.id]
    assert pool.set.tokens == 6000


def test_a_held_start_that_leaves_holds_nobody_up() -> None:
    pool = Pool()
    full(pool)
    pool.asks(call("a", "a3", 3000))
    small = make_request("a", id="small.0", user="other", prompt=500)
    assert pool.asks(small) == ["small.0"], "it has room, and the other one sleeps by itself"
    assert not pool.engine.cancelled("a3.0", pool.now)
    assert pool.engine.policy.order.backlog.starts == {}


def test_a_start_that_would_wait_too_long_is_told_at_once_for_how_long() -> None:
    pool = Pool(limits=QueueLimits(queue_wait_s_max=60.0, queue_requests_max=100))
    runs = full(pool)
    for number in range(8):
        assert pool.asks(call("a", f"s{number}", 9000, arrived_s=pool.now)) == []
    pool.answers(runs)
    pool.after(HOLD_S)
    for number in range(3):  # each has the cache for ten seconds, and then counts for as long as an idle one does
        pool.now += 10.0
        pool.answers(call("a", f"s{number}", 9000))
        assert pool.after(HOLD_S) == [f"s{number + 1}.0"]
    (refused,) = pool.engine.arrived(call("a", "late", 9000), pool.now)
    assert refused.reason is RejectReason.WORKING_SET
    assert refused.retry_after_s == pytest.approx((5 + sqrt(5)) * 11.0, rel=0.01), (
        "four wait before it, and turns took 5 and three times 15 seconds; one more was expected to take 5"
    )
    assert not rejected(pool.engine.arrived(call("b", "b0", 100), pool.now))


def test_a_rate_is_of_prompts_that_found_the_engine_free_and_of_which_the_cache_is_known() -> None:
    pool = Pool()
    ledger = pool.engine.backends["one"]
    seen = ledger.prefill_rate.seen
    full(pool)
    assert ledger.prefill_rate.seen == seen + 3
    for cached, more in ((None, 0), (0, 0), (3100, 1)):  # an engine that tells nothing of its cache may say 0
        seen = ledger.prefill_rate.seen
        pool.asks(inside := call("a", "a2", 3200, serial=cached or 7))
        pool.engine.finished(inside.id, ServiceTokens(3200, 5, cached), pool.now)
        assert ledger.prefill_rate.seen == seen + more


def test_weights_are_parts_of_the_cache() -> None:
    tree = PoolTree()
    found = working_set(tree)
    heavy, light = make_request("a", weight=4.0, prompt=9000), make_request("b", prompt=1000)
    found.kinds.get_or_create(heavy).return_rate.learn(1.0)
    for request in (heavy, light):
        tree.arrived(request, request.weight)
        found.queued(request, 0.0)
    found.dispatched(heavy, 0.0)
    assert found.has_room(light)
    found.dispatched(light, 0.0)
    for prompt, has_room in ((900, True), (1100, False)):
        start = make_request("b", id=f"next-{prompt}", prompt=prompt, claim=Claim("next", explicit=True))
        assert found.has_room(start) is has_room


def test_an_engine_that_was_never_busy_counts_as_fast_as_the_others_and_one_without_gauges_ends_the_rule() -> None:
    pool = Pool()
    for name in ("two", "three"):
        pool.engine.add_backend(name, max_num_seqs=64)
    pool.now += 1.0
    pool.engine.backend_changed("two", Gauges(pool.now, running=0, waiting=0, kv_capacity_tokens=2 * K), pool.now)
    assert pool.set.hold_s == 0.0, "nothing is known of the third"
    pool.now += 1.0
    pool.engine.backend_changed("three", False, pool.now)
    pool.scraped()
    assert pool.set.capacity_tokens == 3 * K
    assert pool.set.hold_s == pytest.approx(HOLD_S)


def test_an_interaction_whose_first_call_received_nothing_counts_no_more() -> None:
    pool = Pool()
    first = call("a", "first", 3000)
    assert pool.asks(first) == [first.id]
    assert pool.set.tokens == 3000
    pool.engine.cancelled(first.id, pool.now, ServiceTokens(0, 0))
    assert pool.set.tokens == 0


@pytest.mark.parametrize(
    ("interactive", "batch", "others", "own"),
    [(8000, 300, 1700, 1700), (8000, 4000, 1500, -2000), (9900, 100, K / 101, 400), (0, 0, inf, inf)],
)
def test_only_the_part_of_batch_counts_for_others_and_all_of_it_for_batch(
    interactive: int, batch: int, others: float, own: float
) -> None:
    tree = PoolTree()
    found = working_set(tree, batch_share=0.05)
    for tenant, weight in (("a", 1.0), ("d", 99.0)):
        tree.arrived(make_request(tenant), weight)
    tree.hold("a", interactive)
    tree.hold(of_batch("b"), batch)
    assert found.available(make_request("c")) == pytest.approx(others)
    assert found.available(make_request(of_batch("d"))) == own


def test_of_the_starts_of_a_tenant_that_sleep_those_that_came_earlier_go_before() -> None:
    pool = Pool()
    full(pool)
    starts = [call("a", f"s{number}", 9000, arrived_s=float(number)) for number in range(3)]
    assert [pool.asks(start) for start in starts] == [[]] * 3
    waits = [pool.engine.requests.expected(start, pool.now, comes=False) for start in starts]
    assert [wait.turns for wait in waits] == [1.0, 2.0, 3.0]
