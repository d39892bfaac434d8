"""The index knows what engines hold, forgets in time, and is told by them when it is wrong."""

from __future__ import annotations

from collections import OrderedDict
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from policies.placements.prefix_index import (
    PrefixIndex,
    blocks_of_tokens,
    tokens_of_blocks,
)

chains = st.lists(st.integers(0, 2), min_size=1, max_size=6).map(
    lambda path: tuple(hash(tuple(path[: depth + 1])) for depth in range(len(path)))
)


@settings(max_examples=200)
@given(sent=st.lists(st.tuples(chains, st.sampled_from("ab")), max_size=30), asked=chains)
def test_a_match_is_the_longest_beginning_that_was_sent_there(
    sent: list[tuple[tuple[int, ...], str]], asked: tuple[int, ...]
) -> None:
    index = PrefixIndex()
    for chain, backend in sent:
        index.insert(chain, backend)
    for backend in "ab":
        known = {block for chain, where in sent if where == backend for block in chain}
        longest = next((depth for depth, block in enumerate(asked) if block not in known), len(asked))
        assert index.depth(asked, backend) == longest
        assert index.depths(asked).get(backend, 0) == longest


@settings(max_examples=200)
@given(sent=st.lists(chains, max_size=40), blocks_max=st.integers(1, 12))
def test_it_stays_within_its_bound_and_ends_of_chains_go_first(sent: list[tuple[int, ...]], blocks_max: int) -> None:
    index = PrefixIndex(blocks_max=blocks_max)
    for chain in sent:
        index.insert(chain, "a")
        assert len(index) <= blocks_max
        assert index.depth(chain, "a") == min(len(chain), blocks_max), "what came last is known best"
        for other in sent:
            depth = index.depth(other, "a")
            assert index.depths(other) == ({"a": depth} if depth else {}), "of what was evicted nothing is held"
            flags = [index.depth(other[: depth + 1], "a") == depth + 1 for depth in range(len(other))]
            assert flags == sorted(flags, reverse=True), "a block is known only while those before it are"


def test_what_never_reached_the_engine_is_forgotten() -> None:
    index = PrefixIndex()
    index.insert((1, 2), "a")
    before = index.depth((1, 2, 3, 4), "a")
    index.insert((1, 2, 3, 4), "a")
    index.forget((1, 2, 3, 4), "a", before)
    assert index.depth((1, 2, 3, 4), "a") == 2
    index.forget((9,), "unknown", 0)
    index.learn_cache_size("unknown", 5, 1)
    assert len(index) == 2


def test_many_engines_share_what_may_be_remembered() -> None:
    index = PrefixIndex(blocks_max=1000)
    for number in range(4000):
        for engine in "abcd"[: 1 + number // 1000]:
            index.insert((number,), engine)
        assert len(index) <= 1000
    assert len(index) == 1000
    assert [index.depth((3750,), engine) for engine in "abcd"] == [1] * 4
    index.set(100)
    assert len(index) == 100


def test_an_engine_whose_counter_goes_back_holds_nothing() -> None:
    index = PrefixIndex()
    for engine in "ab":
        index.insert((1, 2, 3), engine)
    for counted in (None, 0, 500, 500, 700):
        index.counted("a", counted)
        assert index.depth((1, 2, 3), "a") == 3
    version = index.version
    index.counted("a", 20)
    assert index.depths((1, 2, 3)) == {"b": 3}
    assert index.version > version
    index.insert((1, 2), "a")
    index.counted("a", 30)
    assert index.depth((1, 2), "a") == 2, "the new process is believed"
    index.counted("a", None)
    assert index.depth((1, 2), "a") == 0, "it counted, and does no more: it has not begun to"
    index.counted("unknown", 7)


class Cache:
    """An engine's cache of whole documents, with a rule of eviction of its own."""

    def __init__(self, documents_max: int, *, drops_oldest: bool) -> None:
        self.documents: OrderedDict[int, None] = OrderedDict()
        self.documents_max = documents_max
        self.drops_oldest = drops_oldest
        self.random = Random(5)

    def ask(self, document: int) -> bool:
        found = document in self.documents
        self.documents[document] = None
        self.documents.move_to_end(document)
        if len(self.documents) > self.documents_max:
            victims = list(self.documents)[:-1]
            del self.documents[victims[0] if self.drops_oldest else self.random.choice(victims)]
        return found


@pytest.mark.parametrize("drops_oldest", [True, False])
def test_reports_teach_it_how_much_an_engine_keeps(drops_oldest: bool) -> None:
    blocks, cache, index = 50, Cache(20, drops_oldest=drops_oldest), PrefixIndex()
    random = Random(3)
    wrong = [0, 0]
    for number in range(6000):
        document = min(int(random.expovariate(1 / 15)), 99)
        chain = tuple(range(1000 * document, 1000 * document + blocks))
        expected = index.depth(chain, "a")
        index.insert(chain, "a")
        found = blocks if cache.ask(document) else 0
        wrong[number >= 3000] += found != expected
        index.learn_cache_size("a", expected, found)
    assert 5 * blocks <= len(index) <= 30 * blocks, "twenty documents fit"
    assert wrong[1] / 3000 < (0.2 if drops_oldest else 0.33), "an index that believes everything is wrong at 0.41"


def test_an_engine_that_never_reports_is_not_believed_to_miss() -> None:
    index = PrefixIndex()
    chains = [tuple(range(1000 * number, 1000 * number + 100)) for number in range(20)]
    for chain in chains:
        index.insert(chain, "a")
        index.learn_cache_size("a", 0, 0)
    index.learn_cache_size("a", 100, 0)
    assert len(index) == 2000
    index.learn_cache_size("a", 100, 100)  # it does report after all
    index.learn_cache_size("a", 100, 0)
    assert len(index) == 1900, "a twentieth less"
    for _ in range(100):
        index.learn_cache_size("a", 100, 0)
    assert len(index) == 256, "one long prompt"


def test_blocks_and_tokens_translate_within_the_prompt() -> None:
    prefix = tuple(range(8))
    assert tokens_of_blocks(0, prefix, 1000) == 0
    assert tokens_of_blocks(4, prefix, 1000) == 500
    assert tokens_of_blocks(8, prefix, 1000) == 999, "the last token is always computed"
    assert tokens_of_blocks(0, (), 0) == tokens_of_blocks(4, prefix, 0) == 0
    assert [blocks_of_tokens(tokens, prefix, 1000) for tokens in (0, 1, 125, 126, 500, 992, 5000)] == [
        0, 1, 1, 2, 4, 8, 8,
    ]  # fmt: skip
    assert blocks_of_tokens(5, prefix, 0) == 0


def test_what_was_missed_is_taken_off_the_size_of_a_cache() -> None:
    index = PrefixIndex()
    for first in range(0, 2000, 100):
        index.insert(tuple(range(first, first + 100)), "b")
    index.learn_cache_size("b", 100, 100)
    index.learn_cache_size("b", 700, 100)
    assert len(index) == 2000 - 600
