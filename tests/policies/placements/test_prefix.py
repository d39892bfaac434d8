"""Placement by prefix: where a request is done soonest, spread before one engine is overloaded, and why it is there."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from random import Random

import pytest

from policies.admission.named import named_policy
from policies.admission.policy import Policy
from policies.capacity.ledger import BackendLedger
from policies.capacity.obstacle import Blocked
from policies.orders.vtc import Vtc
from policies.placements import prefix as placement
from policies.placements.least_loaded import LeastLoaded
from policies.placements.placement import Placement
from policies.placements.prefix import ByPrefix
from policies.placements.prefix_index import PrefixIndex
from policies.request import PlacementReason, Request
from tests.policies.caching import BLOCK, document
from tests.policies.making import Engines, Room, ledger_of, make_request

THREE = ("e1", "e2", "e3")
PROMPT = document(1, 100)


def question(prefix: tuple[int, ...] = PROMPT) -> Request:
    return make_request(prompt=BLOCK * max(1, len(prefix)), prefix=prefix)


def engines(*running: int) -> list[BackendLedger]:
    return [ledger_of(f"e{n}", count) for n, count in enumerate(running, 1)]


def by_prefix(**cached: int) -> ByPrefix:
    """Engines that hold so many blocks of the prompt."""
    prefixes = PrefixIndex()
    for engine, depth in cached.items():
        prefixes.insert(PROMPT[:depth], engine)
    return ByPrefix(prefixes=prefixes)


@pytest.mark.parametrize(
    ("cached", "loads", "chosen"),
    [
        pytest.param(
            {"e2": 50, "e3": 100}, engines(0, 2, 2), ("e3", PlacementReason.CACHED), id="where most of it is cached"
        ),
        pytest.param(
            {"e2": 100}, [ledger_of("e1"), ledger_of("e2", 60)], ("e1", PlacementReason.SPREAD), id="spread by load"
        ),
        pytest.param(
            {"e2": 100, "e3": 20}, [ledger_of("e1"), ledger_of("e3")], ("e3", PlacementReason.SPREAD), id="full"
        ),
        # What is on its way there counts like its own prompt: eight times 50 blocks is what it saves.
        pytest.param(
            {"e1": 50, "e2": 100},
            [ledger_of("e1"), ledger_of("e2", prefill_tokens=(8 * 50 - 1) * BLOCK)],
            ("e2", PlacementReason.CACHED),
            id="beside a little less than it saves",
        ),
        pytest.param(
            {"e1": 50, "e2": 100},
            [ledger_of("e1"), ledger_of("e2", prefill_tokens=(8 * 50 + 1) * BLOCK)],
            ("e1", PlacementReason.SPREAD),
            id="beside a little more than it saves",
        ),
    ],
)  # fmt: skip
def test_a_prompt_goes_where_it_is_done_soonest(
    cached: dict[str, int], loads: list[BackendLedger], chosen: tuple[str, PlacementReason]
) -> None:
    assert by_prefix(**cached).choose(question(), loads) == chosen


def test_what_nobody_has_meets_and_what_says_nothing_goes_where_least_runs() -> None:
    assert by_prefix().choose(question(), engines(0, 1))[1] is PlacementReason.RENDEZVOUS
    assert by_prefix().choose(make_request(), engines(0, 1)) == ("e1", PlacementReason.LEAST_LOADED)
    assert LeastLoaded().choose(question(), engines(0, 1)) == ("e1", PlacementReason.LEAST_LOADED)


class OnlyX(Room):
    def find_room(self, request: Request, but: str | None = None) -> Sequence[BackendLedger] | Blocked:
        return (ledger_of("x"),)


@pytest.mark.parametrize(
    ("placement", "room", "expected"),
    [
        (by_prefix(b=100), OnlyX(), ("x", PlacementReason.ONLY)),
        (LeastLoaded(), OnlyX(), ("x", PlacementReason.ONLY)),
        (LeastLoaded(), Engines({"a": 1, "b": 0}), ("b", PlacementReason.LEAST_LOADED)),
    ],
)
def test_why_a_request_is_at_an_engine_is_noted(
    placement: Placement, room: Room, expected: tuple[str, PlacementReason]
) -> None:
    policy, request = Policy(Vtc(), placement), question()
    policy.push(request, 0.0)
    assert (policy.pop(0.0, room).backend, request.progress.placed) == expected


def test_one_that_goes_before_the_next_in_order_is_named_as_such() -> None:
    policy = named_policy("vtc")
    policy.prefixes.insert(PROMPT, "x")
    first, cached = (
        make_request("a", prompt=1000, prefix=document(2, 100)),
        make_request("b", prompt=1000, prefix=PROMPT),
    )
    for request in (first, cached):
        policy.push(request, 0.0)
    for expected, why in ((cached, PlacementReason.PASSED), (first, PlacementReason.ONLY)):
        assert policy.pop(0.0, OnlyX()).request is expected
        assert expected.progress.placed == why


def test_new_prompts_go_where_their_adapter_runs_within_the_bound() -> None:
    requests = [make_request(prefix=(number,), adapter="lora") for number in range(20)]
    for running, expected in ((1, {"b"}), (8, {"a"})):
        engines = [ledger_of("a"), ledger_of("b", running, adapters={"lora": running})]
        assert {by_prefix().choose(request, engines)[0] for request in requests} == expected


def test_a_hot_prefix_spreads_before_it_overloads_an_engine() -> None:
    """Every request begins alike, none ends: loads stay within the bound, and get even."""
    prefixes = PrefixIndex()
    where = ByPrefix(prefixes=prefixes)
    running = Counter(dict.fromkeys(THREE, 0))
    for n in range(120):
        prefix = (*document(1, 2000), n)
        name = where.choose(question(prefix), [ledger_of(each, running[each]) for each in THREE])[0]
        prefixes.insert(prefix, name)
        running[name] += 1
        assert max(running.values()) <= placement.IMBALANCE * (n + 1) / 3 + placement.SPARE + 1
    assert max(running.values()) <= 1.15 * 40


@pytest.mark.parametrize(
    ("running", "usual", "chosen"),
    [
        ((24, 13, 13), (13, 13, 13), "e1"),  # chance: it will pass
        ((24, 13, 13), (26, 13, 13), "e2"),  # it has been so for a while
        ((13, 13, 13), (26, 13, 13), "e1"),  # it has been so, and is over
        ((40, 13, 13), (13, 13, 13), "e2"),  # more than chance
        ((4, 0, 0), (4, 0, 0), "e1"),  # few requests may all be where their prompt is
        ((20, 20, 0), (20, 20, 0), "e3"),  # one that is new
    ],
)
def test_what_chance_brings_does_not_drive_a_conversation_from_its_cache(
    running: tuple[int, ...], usual: tuple[int, ...], chosen: str
) -> None:
    loads = [ledger_of(f"e{n}", now, usual=mean) for n, (now, mean) in enumerate(zip(running, usual, strict=True), 1)]
    assert by_prefix(e1=100).choose(question(), loads)[0] == chosen


def test_gateways_place_new_prompts_alike_without_asking() -> None:
    for n in range(100):
        one, _ = by_prefix().choose(question(document(n, 5)), engines(2, 2, 2))
        other, _ = by_prefix().choose(question((*document(n, 5), 7)), list(reversed(engines(3, 3, 3))))
        assert one == other, "prompts that begin alike meet, whatever follows"


def test_an_engine_more_or_less_moves_only_its_own_prompts() -> None:
    where = by_prefix()
    before = {n: where.choose(question(document(n, 5)), engines(0, 0, 0))[0] for n in range(300)}
    after = {n: where.choose(question(document(n, 5)), engines(0, 0, 0, 0))[0] for n in range(300)}
    moved = {n for n in before if before[n] != after[n]}
    assert all(after[n] == "e4" for n in moved)
    assert 40 < len(moved) < 110
    assert all(60 < count < 140 for count in Counter(before.values()).values())


def test_an_engine_of_another_size_is_filled_by_its_size() -> None:
    where = by_prefix()
    running = Counter({"large": 0, "small": 0})
    slots = {"large": 32, "small": 6}
    for _ in range(30):
        loads = [ledger_of(name, running[name], slots=slots[name]) for name in slots]
        running[where.choose(make_request(prompt=10), loads)[0]] += 1
    assert 4 <= running["small"] <= 6


def test_an_index_that_is_wrong_about_everything_balances_like_least_loaded() -> None:
    """Engines report that nothing was found, again and again: the load stays even, and the index forgets."""
    prefixes = PrefixIndex()
    where = ByPrefix(prefixes=prefixes)
    random, running = Random(1), Counter(dict.fromkeys(THREE, 0))
    ends: list[str] = []
    for _ in range(3000):
        text = (*document(random.randrange(40), 30), random.randrange(10**9))
        name = where.choose(question(text), [ledger_of(each, running[each]) for each in THREE])[0]
        prefixes.insert(text, name)
        prefixes.learn_cache_size(name, 1, 1)  # it does report, so a zero is a miss
        prefixes.learn_cache_size(name, prefixes.depth(text, name), 0)
        running[name] += 1
        ends.append(name)
        if len(ends) > 30:
            running[ends.pop(random.randrange(len(ends)))] -= 1
        assert max(running.values()) <= placement.IMBALANCE * (sum(running.values()) + 1) / 3 + placement.SPARE + 1
    assert len(prefixes) <= 3 * 1000


@pytest.mark.parametrize(("cached", "expected"), [((0, 60, 90), 2), ((60, 90, 0), 0)], ids=["the longest", "the head"])
def test_which_cached_prompt_goes_first(cached: Sequence[int], expected: int) -> None:
    """The head's, if half of it is cached, and else the one of which most is."""
    policy = named_policy("vtc")
    policy.prefixes.insert(PROMPT, "x")
    requests = [
        make_request(tenant, prompt=1000, prefix=PROMPT[:blocks] + document(number, 100 - blocks))
        for number, (tenant, blocks) in enumerate(zip("abc", cached, strict=True), 2)
    ]
    for request in requests:
        policy.push(request, 0.0)
    assert policy.pop(0.0, OnlyX()).request is requests[expected]
