"""Which interactions are parked when contexts have outgrown the KV cache, and what becomes of their next calls?"""

from __future__ import annotations

import pytest

from policies.queue.bounds import QueueLimits
from policies.request import Claim, Interaction, Request, ServiceTokens
from policies.tree.pool_tree import PoolTree
from tests.policies.agents import HOLD_S, K, Pool, call, full, working_set
from tests.policies.making import make_request


def outgrown(**limits: float) -> tuple[Pool, Request]:
    """Contexts of one tenant that have outgrown the cache, and the call that is under way: `a1` began last."""
    pool = Pool(limits=QueueLimits(**limits) if limits else None)
    pool.answers(full(pool), output=0)
    grown = call("a", "a0", 5200, serial=2)
    assert pool.asks(grown) == [grown.id]
    assert pool.set.tokens > 1.1 * K
    pool.now += 0.5
    pool.scraped()
    return pool, grown


def test_beyond_a_tenth_over_the_cache_the_newest_idle_interaction_waits_like_a_start_once() -> None:
    pool, grown = outgrown()
    assert pool.set.tenants() == {"a": 5200 + 3000}, "the newest, a1, is parked"
    oldest, newest = call("a", "a2", 3000, serial=1), call("a", "a1", 3000, serial=1)
    assert pool.asks(oldest) == [oldest.id]
    assert pool.asks(newest) == []
    assert pool.answers(oldest, output=0) == []
    assert pool.answers(grown, output=0) == []
    assert pool.after(HOLD_S) == [newest.id]
    assert pool.answers(newest) == []
    again = call("a", "a1", 3020, serial=2)
    assert pool.asks(again) == [again.id]


def test_the_newest_is_the_one_that_began_last_whichever_call_ended_last() -> None:
    pool = Pool()
    grown = full(pool)
    for serial, interaction in enumerate(("a1", "a2"), 1):  # a1 began last, after a2
        pool.serves(call("a", interaction, 3000, serial=serial), output=0)
    pool.answers(grown, output=0)
    assert pool.asks(call("a", "a0", 5200, serial=2))
    pool.now += 0.5
    pool.scraped()
    assert pool.asks(call("a", "a1", 3000, serial=7)) == []


def test_what_was_parked_for_as_long_as_the_cache_takes_to_compute_is_parked_no_more() -> None:
    pool, _ = outgrown()
    pool.after(1.5 * HOLD_S)
    pool.serves(call("b", "b0", 4500), output=0)
    pool.now += 0.5
    pool.scraped()
    again = call("a", "a1", 3000, serial=1)
    assert pool.asks(again) == [again.id], "it goes on with an interaction, though the cache is full"


@pytest.mark.parametrize(("inside_s", "parked"), [(60.0, 0), (61.0, 3000)])
def test_nothing_is_parked_where_a_call_inside_is_refused_as_soon_as_a_start(inside_s: float, parked: int) -> None:
    pool, _ = outgrown(queue_wait_s_max=60.0, queue_wait_s_max_inside=inside_s)
    assert pool.set.tenants() == {"a": 5200 + 6000 - parked}
    newest = call("a", "a1", 3000, serial=1)
    assert pool.asks(newest) == ([] if parked else [newest.id])


def test_what_is_parked_is_of_the_tenant_that_holds_most_for_its_weight() -> None:
    tree, requests = PoolTree(), []
    found = working_set(tree)
    for tenant, weight, prompt in (("a", 4.0, 6000), ("b", 1.0, 3000), ("b", 1.0, 100), ("c", 1.0, 2000)):
        request = make_request(tenant, weight=weight, prompt=prompt, claim=Claim(f"{tenant}{prompt}", explicit=True))
        tree.arrived(request, weight)
        found.kinds.get_or_create(request).return_rate.learn(1.0)
        interaction = request.progress.interaction = Interaction(tenant, ("", "", request.claim.id), 0.0)
        interaction.tokens = 1
        found.queued(request, 0.0)
        found.dispatched(request, 0.0)
        requests.append(request)
    for request in requests:
        found.left(request, ServiceTokens(request.prompt_tokens, 1000), 1.0)
    assert found.tenants() == {"a": 7000, "b": 4000 + 1100, "c": 3000}, "prompts and answers"
    found.measure(Pool().engine.backends.values(), 1.0)
    assert found.tenants() == {"a": 7000, "c": 3000}, "first the short one of b, then its 4,000"
