"""DLPM finds what the cache holds, never lets it decide who is starved, and charges what was computed."""

from __future__ import annotations

import pickle
from collections.abc import Sequence
from itertools import pairwise
from math import inf

import pytest

from policies.admission.named import named_policy
from policies.admission.policy import Policy
from policies.capacity.ledger import BackendLedger
from policies.capacity.obstacle import Blocked, Obstacle
from policies.orders.order import Selection
from policies.request import Request, ServiceTokens
from tests.policies.caching import BLOCK, ask, document
from tests.policies.making import Room, lines_counted
from tests.policies.orders.claims import pop


def finish(policy: Policy, request: Request, cached: int | None, output: int = 0) -> None:
    policy.charge(request, ServiceTokens(request.prompt_tokens, output, cached), 0.0, final=True)


# --- order ---


def test_the_longest_cached_prefix_goes_first_then_who_came_first() -> None:
    policy = named_policy("dlpm")
    shared, longer, unknown = document(1, 5), document(1, 5) + document(2, 20), document(3, 50)
    pop_of_longer = ask(policy, longer, "a")
    assert pop(policy) is pop_of_longer
    third, fourth = ask(policy, unknown, "a"), ask(policy, unknown, "b")
    second, first = ask(policy, shared, "b"), ask(policy, longer, "a")
    assert [pop(policy) for _ in range(4)] == [first, second, third, fourth]


def test_the_longest_match_is_that_of_most_tokens() -> None:
    policy = named_policy("dlpm")
    for text in (1, 2):
        policy.prefixes.insert(document(text, 6 - 2 * (text == 1)), "b")
    dense, sparse = document(1, 4), document(2, 6)
    fewer = ask(policy, sparse, "a", prompt=70)
    more = ask(policy, dense, "b", prompt=500)
    assert [pop(policy), pop(policy)] == [more, fewer], "400 tokens in four blocks, 60 in six"


def test_who_comes_has_a_whole_round_to_use_what_it_has_loaded() -> None:
    policy = named_policy("dlpm", quantum=10 * BLOCK)
    known = document(1, 5)
    ask(policy, known, "a")
    pop(policy)  # six blocks: a has four left of this round
    other = ask(policy, document(3, 5), "a")
    first, second = (ask(policy, known + document(2, 6), "b") for _ in range(2))
    assert [pop(policy) for _ in range(3)] == [first, second, other], "and not after a, when it may be gone"


def test_a_burst_about_several_documents_is_served_document_by_document() -> None:
    policy = named_policy("dlpm", quantum=inf)
    texts = [document(number, 30) for number in range(3)]
    for number in range(60):
        ask(policy, texts[number % 3], "ab"[number % 2])
    served = [pop(policy).prefix[0] for _ in range(60)]
    changes = sum(one != other for one, other in pairwise(served))
    assert changes == 2


def test_a_match_that_was_evicted_since_counts_no_more() -> None:
    policy = named_policy("dlpm")
    policy.prefixes.insert(document(1, 30), "b")
    policy.prefixes.insert(document(2, 10), "b")
    gone, here = ask(policy, document(1, 30), "a"), ask(policy, document(2, 10), "b")
    policy.prefixes.forget(document(1, 30), "b", 0)
    assert [pop(policy), pop(policy)] == [here, gone]


def test_what_comes_back_goes_first_in_its_flow_however_well_others_match() -> None:
    policy = named_policy("dlpm")
    returned = ask(policy, document(1, 3), "a")
    assert pop(policy) is returned
    finish(policy, returned, 0)
    policy.prefixes.insert(document(2, 30), "b")
    matched = ask(policy, document(2, 30), "a")
    policy.push(returned, 0.0, front=True)
    assert [pop(policy), pop(policy)] == [returned, matched]


def test_a_quantum_is_the_most_that_a_match_can_gain() -> None:
    policy = named_policy("dlpm", quantum=100.0)
    policy.prefixes.insert(document(1, 20), "b")
    for _ in range(50):
        ask(policy, document(1, 20), "hot")
        ask(policy, (), "cold")
    served = [pop(policy).flow.tenant for _ in range(60)]
    # Each costs one block: ten of the one who matches, then ten of the other.
    assert served == (["hot"] * 10 + ["cold"] * 10) * 3


# --- what does not fit ---


class Small(Room):
    """An engine that has room for requests of up to so many tokens."""

    def __init__(self, tokens: int) -> None:
        self.tokens = tokens

    def find_room(self, request: Request, but: str | None = None) -> Sequence[BackendLedger] | Blocked:
        return self.blocked_at(request, "b") or super().find_room(request)

    def blocked_at(self, request: Request, engine: str) -> Blocked | None:
        return None if request.prompt_tokens <= self.tokens else Blocked(request, {engine: Obstacle.KV})


def test_one_that_does_not_fit_is_overtaken_but_not_for_ever() -> None:
    policy = named_policy("dlpm", quantum=100.0)
    large = ask(policy, (), "large", prompt=1000)
    for _ in range(60):
        ask(policy, (), "small")
        ask(policy, (), "other")
    overtaking = []
    while isinstance(selection := policy.pop(0.0, Small(50)), Selection):
        policy.charge(selection.request, ServiceTokens(BLOCK, 0), 0.0, final=False)
        overtaking.append(selection.request.flow.tenant)
    assert selection.request is large
    # What is left of this round and the next one: 20 requests of 10 tokens each.
    assert [overtaking.count(tenant) for tenant in ("small", "other")] == [20, 20]
    assert pop(policy) is large


# --- charges ---


@pytest.mark.parametrize(
    ("known", "at_dispatch", "service", "charged"),
    [
        pytest.param(0, 100.0, ServiceTokens(100, 5, 0), 110.0, id="nothing cached"),
        pytest.param(9, 10.0, ServiceTokens(100, 5, 60), 50.0, id="60 of the 90 tokens that were expected"),
        pytest.param(9, 10.0, ServiceTokens(100, 3), 16.0, id="an answer that breaks off, by the estimate"),
        pytest.param(4, 60.0, ServiceTokens(0, 0), 0.0, id="refused"),
    ],
)
def test_the_estimate_is_charged_at_dispatch_and_the_truth_at_the_end(
    known: int, at_dispatch: float, service: ServiceTokens, charged: float
) -> None:
    policy = named_policy("dlpm")
    policy.prefixes.insert(document(1, known), "b")
    request = ask(policy, document(1, 9), "a")
    pop(policy)
    assert request.progress.charged == at_dispatch
    policy.charge(request, service, 0.0, final=True)
    assert request.progress.charged == charged
    believed = 9 if service.prompt else known
    assert policy.prefixes.depth(document(1, 9), "b") == believed, "a refused dispatch leaves no belief behind"


# --- cost ---


def test_a_pop_does_not_look_at_the_whole_queue() -> None:
    def lines_per_pop(queued: int) -> float:
        policy = named_policy("dlpm")
        for number in range(queued):
            ask(policy, document(number % 7, 16), "a")
        with lines_counted() as lines:
            for _ in range(50):
                pop(policy)
        return lines[0] / 50

    assert lines_per_pop(3000) <= 2 * lines_per_pop(100)


def test_nothing_is_kept_of_requests_that_have_gone() -> None:
    def kept(requests: int) -> int:
        """Bytes of the policy, pickled, after so many, with an engine that holds nothing of them any more."""
        policy = named_policy("dlpm", flows_max=10)
        for number in range(requests):
            one, other = (ask(policy, document(number, 5), f"t{number}", user=user) for user in "ab")
            policy.remove(one, 0.0)
            assert pop(policy) is other
            finish(policy, other, 0)
            policy.prefixes.forget(other.prefix, "b", 0)
        backlog = policy.order.backlog
        assert backlog.remembered() <= 10
        assert len(policy.prefixes) == 0
        return len(pickle.dumps(policy))

    assert kept(200) < kept(10) + 100, "a request takes far more"
