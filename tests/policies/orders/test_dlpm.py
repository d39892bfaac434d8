"""DLPM finds what the cache holds, never lets it decide who is starved, and charges what was computed."""

from __future__ import annotations

import pickle
from collections.abc import Sequence
from dataclasses import replace
from itertools import count, pairwise
from math import inf
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from policies.admission.named import named_policy
from policies.admission.policy import Policy
from policies.capacity.obstacle import Blocked, Obstacle
from policies.orders.dlpm import Dlpm, DlpmParams
from policies.orders.order import Selection
from policies.placements.placement import EngineLoad
from policies.placements.prefix import ByPrefix
from policies.placements.prefix_index import PrefixIndex
from policies.request import Request, ServiceTokens
from tests.policies.caching import BLOCK, CachingServers, Questions, document
from tests.policies.making import Load, NoRoom, Room, lines_counted, make_request

_serial = count()


def prefixes_of(policy: Policy) -> PrefixIndex:
    """What the engines are taken to have cached."""
    assert policy.prefixes is not None
    return policy.prefixes


def ask(policy: Policy, tenant: str, text: tuple[int, ...], *, user: str = "", prompt: int | None = None) -> Request:
    """Queue a question of one block about a text."""
    prefix = (*text, hash(("question", next(_serial))))
    request = make_request(tenant, user=user, prefix=prefix, prompt=BLOCK * len(prefix) if prompt is None else prompt)
    policy.push(request, 0.0)
    return request


def pop(policy: Policy, view: Any = None) -> Request:
    selection = policy.pop(0.0, view or Room())
    assert isinstance(selection, Selection)
    policy.charge(selection.request, ServiceTokens(selection.request.prompt_tokens, 0), 0.0, final=False)
    return selection.request


def finish(policy: Policy, request: Request, cached: int | None, output: int = 0) -> None:
    policy.charge(request, ServiceTokens(request.prompt_tokens, output, cached), 0.0, final=True)


# --- order ---


def test_the_longest_cached_prefix_goes_first_then_who_came_first() -> None:
    policy = named_policy("dlpm")
    shared, longer, unknown = document(1, 5), document(1, 5) + document(2, 20), document(3, 50)
    pop_of_longer = ask(policy, "a", longer)
    assert pop(policy) is pop_of_longer
    third, fourth = ask(policy, "a", unknown), ask(policy, "b", unknown)
    second, first = ask(policy, "b", shared), ask(policy, "a", longer)
    assert [pop(policy) for _ in range(4)] == [first, second, third, fourth]


def test_the_longest_match_is_that_of_most_tokens() -> None:
    policy = named_policy("dlpm")
    for text in (1, 2):
        prefixes_of(policy).insert(document(text, 6 - 2 * (text == 1)), "b")
    dense, sparse = document(1, 4), document(2, 6)
    fewer = ask(policy, "a", sparse, prompt=70)
    more = ask(policy, "b", dense, prompt=500)
    assert [pop(policy), pop(policy)] == [more, fewer], "400 tokens in four blocks, 60 in six"


def test_who_comes_has_a_whole_round_to_use_what_it_has_loaded() -> None:
    policy = named_policy("dlpm", quantum=10 * BLOCK)
    known = document(1, 5)
    ask(policy, "a", known)
    pop(policy)  # six blocks: a has four left of this round
    other = ask(policy, "a", document(3, 5))
    first, second = (ask(policy, "b", known + document(2, 6)) for _ in range(2))
    assert [pop(policy) for _ in range(3)] == [first, second, other], "and not after a, when it may be gone"


def test_a_burst_about_several_documents_is_served_document_by_document() -> None:
    policy = named_policy("dlpm", quantum=inf)
    texts = [document(number, 30) for number in range(3)]
    for number in range(60):
        ask(policy, "ab"[number % 2], texts[number % 3])
    served = [pop(policy).prefix[0] for _ in range(60)]
    changes = sum(one != other for one, other in pairwise(served))
    assert changes == 2


def test_a_match_that_was_evicted_since_counts_no_more() -> None:
    policy = named_policy("dlpm")
    prefixes_of(policy).insert(document(1, 30), "b")
    prefixes_of(policy).insert(document(2, 10), "b")
    gone, here = ask(policy, "a", document(1, 30)), ask(policy, "b", document(2, 10))
    prefixes_of(policy).forget(document(1, 30), "b", 0)
    assert [pop(policy), pop(policy)] == [here, gone]


def test_what_comes_back_goes_first_in_its_flow_however_well_others_match() -> None:
    policy = named_policy("dlpm")
    returned = ask(policy, "a", document(1, 3))
    assert pop(policy) is returned
    finish(policy, returned, 0)
    prefixes_of(policy).insert(document(2, 30), "b")
    matched = ask(policy, "a", document(2, 30))
    policy.push(returned, 0.0, front=True)
    assert [pop(policy), pop(policy)] == [returned, matched]


def test_a_quantum_is_the_most_that_a_match_can_gain() -> None:
    policy = named_policy("dlpm", quantum=100.0)
    prefixes_of(policy).insert(document(1, 20), "b")
    for _ in range(50):
        ask(policy, "hot", document(1, 20))
        ask(policy, "cold", ())
    served = [pop(policy).flow.tenant for _ in range(60)]
    # Each costs one block: ten of the one who matches, then ten of the other.
    assert served == (["hot"] * 10 + ["cold"] * 10) * 3


# --- what does not fit ---


class Small(Room):
    """An engine that has room for requests of up to so many tokens."""

    def __init__(self, tokens: int) -> None:
        self.tokens = tokens

    def with_room(self, request: Request) -> Sequence[EngineLoad] | Blocked:
        return self.blocked_at(request, "b") or super().with_room(request)

    def blocked_at(self, request: Request, engine: str) -> Blocked | None:
        return None if request.prompt_tokens <= self.tokens else Blocked(request, {engine: Obstacle.KV})


def test_one_that_does_not_fit_is_overtaken_but_not_for_ever() -> None:
    policy = named_policy("dlpm", quantum=100.0)
    large = ask(policy, "large", (), prompt=1000)
    for _ in range(60):
        ask(policy, "small", ())
        ask(policy, "other", ())
    overtaking = []
    while isinstance(selection := policy.pop(0.0, Small(50)), Selection):
        policy.charge(selection.request, ServiceTokens(BLOCK, 0), 0.0, final=False)
        overtaking.append(selection.request.flow.tenant)
    assert selection is not None
    assert selection.request is large
    # What is left of this round and the next one: 20 requests of 10 tokens each.
    assert [overtaking.count(tenant) for tenant in ("small", "other")] == [20, 20]
    assert pop(policy) is large


def test_nothing_leaves_where_nothing_fits() -> None:
    policy = named_policy("dlpm")
    for number in range(20):
        ask(policy, f"t{number}", document(number, 3))
    assert isinstance(policy.pop(0.0, NoRoom()), Blocked)
    assert len(policy) == 20


class Two(Room):
    """Two engines, of which one is busy and one may be full."""

    def __init__(self, *, full: str = "") -> None:
        self.full = full

    def with_room(self, request: Request) -> Sequence[EngineLoad] | Blocked:
        return [load for load in (Load("busy", 1), Load("idle")) if load.name != self.full]

    def blocked_at(self, request: Request, engine: str) -> Blocked | None:
        return Blocked(request, {engine: Obstacle.SLOTS}) if engine == self.full else None

    def reserve(self, blocked: Blocked) -> str | None:
        return None

    def loads(self) -> dict[str, int]:
        return {"busy": 5, "idle": 0}


def test_of_several_backends_the_one_that_has_it_is_taken_if_it_has_room() -> None:
    policy = named_policy("dlpm")
    prefixes_of(policy).insert(document(1, 100), "busy")
    for full, expected in (("", "busy"), ("busy", "idle")):
        ask(policy, "a", document(1, 100))
        selection = policy.pop(0.0, Two(full=full))
        assert isinstance(selection, Selection)
        assert selection.backend == expected


# --- charges ---


def test_the_estimate_is_charged_at_dispatch_and_the_truth_at_the_end() -> None:
    policy = named_policy("dlpm")
    first = ask(policy, "a", document(1, 9))
    pop(policy)
    assert first.progress.charged == 100.0
    finish(policy, first, 0, output=5)
    assert first.progress.charged == 110.0
    again = ask(policy, "a", document(1, 9))
    pop(policy)
    assert again.progress.charged == 10.0
    finish(policy, again, 60, output=5)
    assert again.progress.charged == 50.0, "the engine had only 60 of the 90 tokens"


def test_an_answer_that_breaks_off_is_charged_by_the_estimate() -> None:
    policy = named_policy("dlpm")
    prefixes_of(policy).insert(document(1, 9), "b")
    broken = ask(policy, "a", document(1, 9))
    pop(policy)
    finish(policy, broken, None, output=3)
    assert broken.progress.charged == 16.0


def test_a_refused_dispatch_leaves_no_belief_behind() -> None:
    policy = named_policy("dlpm")
    prefixes_of(policy).insert(document(1, 4), "b")
    refused = ask(policy, "a", document(1, 9))
    pop(policy)
    policy.charge(refused, ServiceTokens(0, 0), 0.0, final=True)
    assert refused.progress.charged == 0.0
    assert prefixes_of(policy).depth(document(1, 9), "b") == 4


# --- cost ---


def test_a_pop_does_not_look_at_the_whole_queue() -> None:
    def lines_per_pop(queued: int) -> float:
        policy = named_policy("dlpm")
        for number in range(queued):
            ask(policy, "a", document(number % 7, 16))
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
            one, other = (ask(policy, f"t{number}", document(number, 5), user=user) for user in "ab")
            policy.remove(one, 0.0)
            assert pop(policy) is other
            finish(policy, other, 0)
            prefixes_of(policy).forget(other.prefix, "b", 0)
        backlog = policy.order.backlog
        assert backlog is not None
        assert backlog.remembered() <= 10
        assert len(prefixes_of(policy)) == 0
        return len(pickle.dumps(policy))

    assert kept(200) < kept(10) + 100, "a request takes far more"


# --- the bound ---

KEEPS_ALL = 1_000_000
questions = st.builds(
    Questions,
    weights=st.fixed_dictionaries({tenant: st.sampled_from([0.5, 1.0, 3.0]) for tenant in "abc"}),
    documents=st.integers(1, 4),
    blocks_max=st.integers(1, 20),
    output_max=st.integers(1, 20),
    slots=st.integers(1, 6),
    engines=st.just(1),
    cache_blocks=st.sampled_from([5, 20, 80, KEEPS_ALL]),
    seed=st.integers(0, 10_000),
)
QUANTUM = 100.0


def bound(traffic: Questions) -> float:
    """2 (U + Q), per weight. U: a prompt, all output that is dispatched, and its input wrongly taken to be cached."""
    believed = 0 if traffic.cache_blocks == KEEPS_ALL else traffic.slots * traffic.prompt_max
    most = traffic.prompt_max + believed + 2.0 * traffic.slots * traffic.output_max
    return 2 * (most / min(traffic.weights.values()) + QUANTUM)


@settings(max_examples=25)
@given(traffic=questions)
def test_backlogged_tenants_stay_within_the_bound_in_extend_service(traffic: Questions) -> None:
    assert CachingServers(named_policy("dlpm", quantum=QUANTUM), traffic).spread(150, "a", "c") <= bound(traffic)


@settings(max_examples=15)
@given(traffic=questions)
def test_a_backlogged_tenant_gets_no_less_than_one_that_comes_and_goes(traffic: Questions) -> None:
    """Theorem 4.2, with the bound taken over both directions of every interval in which c pauses."""
    traffic = replace(traffic, sometimes_idle="c")
    servers = CachingServers(named_policy("dlpm", quantum=QUANTUM), traffic)
    worst, least = 0.0, 0.0
    for now in range(150):
        servers.step(now)
        ahead = servers.received["c"] / traffic.weights["c"] - servers.received["a"] / traffic.weights["a"]
        least = min(least, ahead)
        worst = max(worst, ahead - least)
    assert worst <= 2 * bound(traffic)


def policy_of(order: type[Dlpm], quantum: float) -> Policy:
    """This order with the placement that goes with it."""
    prefixes = PrefixIndex()
    order_of_all = order(DlpmParams(quantum=quantum), prefixes=prefixes)
    return Policy(order_of_all, ByPrefix(prefixes=prefixes), prefixes=prefixes)


class Forgiving(Dlpm):
    """A mutant: debt ends with the queue, as in the printed algorithm when a client leaves the list."""

    def push(self, request: Request, now: float, *, front: bool = False) -> None:
        super().push(request, now, front=front)
        assert self.backlog is not None
        member = self.backlog.flow(request.flow)
        assert member is not None
        if member.queued == 1:
            tenants = self.backlog.tenants
            tenants.charged(member.tenant, min(0.0, tenants.floor() - member.tenant.counter))


class Free(Dlpm):
    """A mutant: nothing is charged until the end."""

    def charge(self, request: Request, service: ServiceTokens, now: float, *, final: bool) -> None:
        super().charge(request, service if final else ServiceTokens(0, 0, 0), now, final=final)


HARD = Questions({"a": 1.0, "b": 1.0, "c": 1.0}, 1, 20, 20, 4, 1, KEEPS_ALL, seed=1)


@pytest.mark.parametrize(
    ("mutant", "is_caught"),
    [
        (lambda: named_policy("dlpm", quantum=QUANTUM), False),
        (lambda: named_policy("dlpm", quantum=inf), True),  # nobody's deficit ever runs out
        (lambda: named_policy("dlpm", quantum=50 * QUANTUM), True),
    ],
)
def test_the_bound_is_one_that_mutants_break(mutant: Any, is_caught: bool) -> None:
    spreads = [CachingServers(mutant(), replace(HARD, seed=seed)).spread(600, "a", "c") for seed in range(5)]
    assert any(spread > bound(HARD) for spread in spreads) is is_caught


@pytest.mark.interpreted_only("extends a policy")
def test_debt_outlives_an_absence_and_a_mutant_that_forgives_it_is_caught() -> None:
    def served_to_the_spendthrift(policy: Policy) -> int:
        """It asks for one long answer at a time, and the other always waits."""
        for _ in range(400):
            ask(policy, "steady", ())
        count = 0
        ask(policy, "spendthrift", ())
        for _ in range(200):
            request = pop(policy)
            is_spendthrift = request.flow.tenant == "spendthrift"
            count += is_spendthrift
            finish(policy, request, 0, output=500 if is_spendthrift else 0)
            if is_spendthrift:
                ask(policy, "spendthrift", ())
        return count

    assert served_to_the_spendthrift(named_policy("dlpm", quantum=QUANTUM)) <= 4
    assert served_to_the_spendthrift(policy_of(Forgiving, QUANTUM)) > 4


@pytest.mark.interpreted_only("extends a policy")
def test_without_a_charge_at_dispatch_one_tenant_takes_every_slot() -> None:
    def first_eight(policy: Policy) -> int:
        for _ in range(20):
            ask(policy, "a", ())
        for _ in range(20):
            ask(policy, "b", ())
        return [pop(policy).flow.tenant for _ in range(8)].count("a")

    assert first_eight(named_policy("dlpm", quantum=10.0)) == 4
    assert first_eight(policy_of(Free, 10.0)) == 8


def test_locality_is_kept_where_a_fair_order_without_it_thrashes() -> None:
    traffic = Questions(dict.fromkeys("abcdef", 1.0), 1, 20, 3, 2, 1, 60, seed=3)

    def hits(policy: Any) -> float:
        servers = CachingServers(policy, traffic)
        for now in range(600):
            servers.step(now)
        return servers.cached / servers.prompts

    assert hits(named_policy("dlpm", quantum=2000.0)) > hits(named_policy("vtc", placement="least_loaded")) + 0.2
