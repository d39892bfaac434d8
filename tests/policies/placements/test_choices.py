"""A placement says why it chose an engine, and is right about it."""

from __future__ import annotations

from policies.placements.least_loaded import LeastLoaded
from policies.placements.prefix import ByPrefix
from policies.placements.prefix_index import PrefixIndex
from policies.request import Placed
from tests.policies.making import Load, make_request

PROMPT = tuple(range(1, 9))


def by_prefix(**cached: int) -> ByPrefix:
    """Engines that hold so many blocks of the prompt."""
    prefixes = PrefixIndex()
    for engine, depth in cached.items():
        prefixes.insert(PROMPT[:depth], engine)
    return ByPrefix(prefixes=prefixes)


def test_the_only_engine_with_room_is_named_as_such() -> None:
    request = make_request(prompt=8000, prefix=PROMPT)
    assert by_prefix(b=8).choose(request, [Load("a")]) == ("a", Placed.ONLY)
    assert LeastLoaded().choose(request, [Load("a")]) == ("a", Placed.ONLY)


def test_the_engine_that_has_most_is_chosen_for_that() -> None:
    request = make_request(prompt=8000, prefix=PROMPT)
    assert by_prefix(b=8, c=2).choose(request, [Load("a"), Load("b", 2), Load("c")]) == ("b", Placed.CACHED)


def test_a_request_that_goes_elsewhere_than_its_prompt_is_spread() -> None:
    request = make_request(prompt=8000, prefix=PROMPT)
    assert by_prefix(b=8).choose(request, [Load("a"), Load("b", 60)]) == ("a", Placed.SPREAD)
    assert by_prefix(b=8, c=2).choose(request, [Load("a"), Load("c")]) == ("c", Placed.SPREAD), "b has no room"


def test_what_nobody_has_meets_and_what_says_nothing_goes_where_least_runs() -> None:
    engines = [Load("a"), Load("b", 1)]
    assert by_prefix().choose(make_request(prefix=PROMPT), engines).why is Placed.RENDEZVOUS
    assert by_prefix().choose(make_request(), engines) == ("a", Placed.LEAST_LOADED)
    assert LeastLoaded().choose(make_request(prefix=PROMPT), engines) == ("a", Placed.LEAST_LOADED)
