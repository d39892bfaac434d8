"""Placement by prefix: where a request is done soonest, spread before one engine is overloaded."""

from __future__ import annotations

from collections import Counter
from random import Random

import pytest

from policies.placements import prefix as placement
from policies.placements.prefix import ByPrefix
from policies.placements.prefix_index import PrefixIndex
from policies.request import Request
from tests.policies.caching import BLOCK, document
from tests.policies.making import Load, make_request

THREE = ("e1", "e2", "e3")


def question(prefix: tuple[int, ...]) -> Request:
    return make_request(prompt=BLOCK * max(1, len(prefix)), prefix=prefix)


def engines(*running: int) -> list[Load]:
    return [Load(f"e{n}", count) for n, count in enumerate(running, 1)]


def test_a_prompt_goes_where_most_of_it_is_cached() -> None:
    prefixes = PrefixIndex()
    prefixes.insert(document(1, 50), "e2")
    prefixes.insert(document(1, 100), "e3")
    assert ByPrefix(prefixes=prefixes).choose(question(document(1, 100)), engines(0, 0, 0))[0] == "e3"


def test_of_engines_that_have_it_alike_the_less_loaded_one_is_taken() -> None:
    prefixes = PrefixIndex()
    for name in THREE:
        prefixes.insert(document(1, 100), name)
    assert ByPrefix(prefixes=prefixes).choose(question(document(1, 100)), engines(3, 1, 2))[0] == "e2"


def test_what_is_on_its_way_before_it_counts_like_its_own_prompt() -> None:
    prefixes = PrefixIndex()
    prefixes.insert(document(1, 50), "e1")
    prefixes.insert(document(1, 100), "e2")
    more = 8 * 50 * BLOCK  # what it saves there
    busy = [Load("e1"), Load("e2", prefill_tokens=more - BLOCK)]
    busier = [Load("e1"), Load("e2", prefill_tokens=more + BLOCK)]
    choose = ByPrefix(prefixes=prefixes).choose
    assert choose(question(document(1, 100)), busy)[0] == "e2"
    assert choose(question(document(1, 100)), busier)[0] == "e1"


def test_a_hot_prefix_spreads_before_it_overloads_an_engine() -> None:
    """Every request begins alike, none ends: loads stay within the bound, and get even."""
    prefixes = PrefixIndex()
    where = ByPrefix(prefixes=prefixes)
    running = Counter(dict.fromkeys(THREE, 0))
    for n in range(120):
        prefix = (*document(1, 2000), n)
        name = where.choose(question(prefix), [Load(each, running[each]) for each in THREE])[0]
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
    prefixes = PrefixIndex()
    prefixes.insert(document(1, 100), "e1")
    loads = [Load(f"e{n}", now, usual=mean) for n, (now, mean) in enumerate(zip(running, usual, strict=True), 1)]
    assert ByPrefix(prefixes=prefixes).choose(question(document(1, 100)), loads)[0] == chosen


def test_gateways_place_new_prompts_alike_without_asking() -> None:
    one, other = ByPrefix(prefixes=PrefixIndex()), ByPrefix(prefixes=PrefixIndex())
    for n in range(100):
        assert (
            one.choose(question(document(n, 5)), engines(2, 2, 2))[0]
            == other.choose(question((*document(n, 5), 7)), list(reversed(engines(3, 3, 3))))[0]
        ), "prompts that begin alike meet, whatever follows"


def test_an_engine_more_or_less_moves_only_its_own_prompts() -> None:
    where = ByPrefix(prefixes=PrefixIndex())
    before = {n: where.choose(question(document(n, 5)), engines(0, 0, 0))[0] for n in range(300)}
    after = {n: where.choose(question(document(n, 5)), engines(0, 0, 0, 0))[0] for n in range(300)}
    moved = {n for n in before if before[n] != after[n]}
    assert all(after[n] == "e4" for n in moved)
    assert 40 < len(moved) < 110
    assert all(60 < count < 140 for count in Counter(before.values()).values())


def test_new_prompts_that_begin_alike_by_design_do_not_pile_up() -> None:
    """Rendezvous by the first block would send all to one engine; load has the last word."""
    where = ByPrefix(prefixes=PrefixIndex())
    running = Counter(dict.fromkeys(THREE, 0))
    for n in range(90):
        name = where.choose(question((1, n, n)), [Load(each, running[each]) for each in THREE])[0]
        running[name] += 1
    assert max(running.values()) <= 1.3 * 30


def test_an_engine_of_another_size_is_filled_by_its_size() -> None:
    where = ByPrefix(prefixes=PrefixIndex())
    running = Counter({"large": 0, "small": 0})
    slots = {"large": 32, "small": 6}
    for _ in range(30):
        loads = [Load(name, running[name], slots=slots[name]) for name in slots]
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
        name = where.choose(question(text), [Load(each, running[each]) for each in THREE])[0]
        prefixes.insert(text, name)
        prefixes.learn_cache_size(name, 1, 1)  # it does report, so a zero is a miss
        prefixes.learn_cache_size(name, prefixes.depth(text, name), 0)
        running[name] += 1
        ends.append(name)
        if len(ends) > 30:
            running[ends.pop(random.randrange(len(ends)))] -= 1
        assert max(running.values()) <= placement.IMBALANCE * (sum(running.values()) + 1) / 3 + placement.SPARE + 1
    assert len(prefixes) <= 3 * 1000
