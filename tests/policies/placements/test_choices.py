"""A placement says why it chose an engine, and is right about it."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from policies.admission.named import named_policy
from policies.admission.policy import Policy
from policies.capacity.obstacle import Blocked
from policies.orders.order import Selection
from policies.orders.vtc import Vtc
from policies.placements.least_loaded import LeastLoaded
from policies.placements.placement import EngineLoad, Placement
from policies.placements.prefix import ByPrefix
from policies.placements.prefix_index import PrefixIndex
from policies.request import Placed, Request
from tests.policies.making import Engines, Load, Room, make_request

PROMPT = tuple(range(1, 9))


def by_prefix(**cached: int) -> ByPrefix:
    """Engines that hold so many blocks of the prompt."""
    prefixes = PrefixIndex()
    for engine, depth in cached.items():
        prefixes.insert(PROMPT[:depth], engine)
    return ByPrefix(prefixes=prefixes)


class OnlyX(Room):
    def with_room(self, request: Request, but: str | None = None) -> Sequence[EngineLoad] | Blocked:
        return (Load("x"),)


@pytest.mark.parametrize("placement", [by_prefix(b=8), LeastLoaded()])
def test_the_only_engine_with_room_is_named_as_such(placement: Placement) -> None:
    policy, request = Policy(Vtc(), placement), make_request(prompt=8000, prefix=PROMPT)
    policy.push(request, 0.0)
    selection = policy.pop(0.0, OnlyX())
    assert isinstance(selection, Selection)
    assert (selection.backend, request.progress.placed) == ("x", Placed.ONLY)


def test_the_placement_chooses_between_two_engines_with_room() -> None:
    policy, request = Policy(Vtc(), LeastLoaded()), make_request()
    policy.push(request, 0.0)
    selection = policy.pop(0.0, Engines({"a": 1, "b": 0}))
    assert isinstance(selection, Selection)
    assert (selection.backend, request.progress.placed) == ("b", Placed.LEAST_LOADED)


def test_the_engine_that_has_most_is_chosen_for_that() -> None:
    request = make_request(prompt=8000, prefix=PROMPT)
    assert by_prefix(b=8, c=2).choose(request, [Load("a"), Load("b", 2), Load("c")]) == ("b", Placed.CACHED)


def test_a_request_that_goes_elsewhere_than_its_prompt_is_spread() -> None:
    request = make_request(prompt=8000, prefix=PROMPT)
    assert by_prefix(b=8).choose(request, [Load("a"), Load("b", 60)]) == ("a", Placed.SPREAD)
    assert by_prefix(b=8, c=2).choose(request, [Load("a"), Load("c")]) == ("c", Placed.SPREAD), "b has no room"


def test_what_nobody_has_meets_and_what_says_nothing_goes_where_least_runs() -> None:
    engines = [Load("a"), Load("b", 1)]
    assert by_prefix().choose(make_request(prefix=PROMPT), engines)[1] is Placed.RENDEZVOUS
    assert by_prefix().choose(make_request(), engines) == ("a", Placed.LEAST_LOADED)
    assert LeastLoaded().choose(make_request(prefix=PROMPT), engines) == ("a", Placed.LEAST_LOADED)


def test_new_prompts_go_where_their_adapter_runs_within_the_bound() -> None:
    requests = [make_request(prefix=(number,), adapter="lora") for number in range(20)]
    for running, expected in ((1, {"b"}), (8, {"a"})):
        engines = [Load("a"), Load("b", running, adapters={"lora": running})]
        assert {by_prefix().choose(request, engines)[0] for request in requests} == expected


def test_one_that_goes_before_the_next_in_order_is_named_as_such() -> None:
    policy = named_policy("vtc")
    policy.prefixes.insert(PROMPT, "x")
    first = make_request("a", prompt=8000, prefix=tuple(range(11, 19)))
    cached = make_request("b", prompt=8000, prefix=PROMPT)
    for request in (first, cached):
        policy.push(request, 0.0)
    for expected, why in ((cached, Placed.PASSED), (first, Placed.ONLY)):
        selection = policy.pop(0.0, OnlyX())
        assert isinstance(selection, Selection)
        assert (selection.request, selection.request.progress.placed) == (expected, why)
