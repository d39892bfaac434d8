"""Which running request is preempted? One that goes on all the same keeps no other from it."""

from __future__ import annotations

from policies.request import ServiceTokens, of_batch
from policies.tree.preemption import Preemption, over_part
from tests.policies.making import make_request


def choose(preemption: Preemption, tokens: dict[str, int], *, share: float = 0.05) -> str | None:
    return preemption.choose(["e"], len(tokens), share, lambda id: ServiceTokens(10, tokens[id]), lambda id: False)


def made(tokens: dict[str, int]) -> Preemption:
    preemption = Preemption()
    for id in tokens:
        preemption.dispatched(make_request(of_batch("a"), id=id, streamed=False, reserved=100), "e")
    return preemption


def test_the_one_that_has_received_least_and_then_the_next() -> None:
    tokens = {"x": 30, "y": 20, "z": 40, "w": 90}
    preemption = made(tokens)
    assert choose(preemption, tokens) == "y"
    assert choose(preemption, tokens) == "x", "y goes on: its client has seen something of it"


def test_the_guaranteed_part_of_what_runs_stays() -> None:
    tokens = {"x": 30, "y": 20, "z": 40, "w": 90}
    preemption = made(tokens)
    assert [choose(preemption, tokens, share=0.5) for _ in range(3)] == ["y", "x", None]


def test_nothing_is_preempted_that_would_waste_more_than_may_be_wasted() -> None:
    for tokens, chosen in (({"y": 20, "z": 11}, None), ({"y": 20, "z": 10}, "z")):
        preemption = made(dict.fromkeys("xyz", 0))
        preemption.ended(make_request(of_batch("a"), id="x"), ServiceTokens(10, 300), is_preempted=True)
        assert choose(preemption, tokens) == chosen, "20 are left of three times 110"


def test_of_those_that_have_received_as_little_the_one_that_was_preempted_less_often() -> None:
    tokens = {"x": 30, "y": 20, "z": 40, "w": 90}
    preemption = made(tokens)
    again = make_request(of_batch("a"), id="x", streamed=False, reserved=100)
    preemption.ended(again, ServiceTokens(10, 30), is_preempted=True)
    preemption.dispatched(again, "e")
    assert preemption.wasted_tokens == 40
    assert choose(preemption, tokens | {"x": 20}) == "y"


def test_what_an_engine_has_cached_of_a_preempted_request_was_not_wasted() -> None:
    preemption, one = Preemption(), make_request(of_batch("a"), streamed=False, reserved=100)
    for cached, is_preempted in ((None, True), (None, True), (8, False)):
        preemption.dispatched(one, "e")
        preemption.ended(one, ServiceTokens(10, 90, cached), is_preempted=is_preempted)
    assert preemption.wasted_tokens == 2 * 100 - 2 * 8


def test_when_all_is_wasted_that_may_be_what_was_preempted_stays_free_until_more_has_been_received() -> None:
    preemption = made(dict.fromkeys("xy", 0))
    one = make_request(of_batch("a"), id="x", streamed=False, reserved=100)
    assert preemption.may_waste(one, 0.05)
    preemption.ended(one, ServiceTokens(10, 90), is_preempted=True)
    preemption.dispatched(one, "e")
    preemption.ended(one, ServiceTokens(10, 90), is_preempted=True)
    assert not preemption.may_waste(one, 0.05), "110 each, and two at once"
    assert preemption.is_kept_free(one, "e")
    assert not preemption.is_kept_free(one, "other")
    preemption.ended(make_request(of_batch("a"), id="y"), ServiceTokens(10, 0), is_preempted=False)
    assert not preemption.is_kept_free(one, "e"), "y ran then, and another one may"
    preemption.dispatched(one, "e")
    preemption.ended(one, ServiceTokens(10, 2100), is_preempted=False)
    assert preemption.may_waste(one, 0.05), "a twentieth of 2,110"


def test_the_tenant_with_most_running_for_its_weight_loses_one() -> None:
    preemption = Preemption()
    for tenant, weight, ids in (("a", 1.0, "xyz"), ("b", 1.0, "w"), ("c", 4.0, "klmn")):
        for id in ids:
            preemption.dispatched(
                make_request(of_batch(tenant), id=id, weight=weight, streamed=False, reserved=100), "e"
            )
    tokens = {id: received for received, id in enumerate("wklmnyxz")}
    assert choose(preemption, tokens) == "y", "the least of the three of a, though w has received less"


def test_batch_goes_first_while_it_is_over_its_part_and_else_the_most_for_its_weight() -> None:
    used = {"b": 30.0, of_batch("a"): 20.0, of_batch("c"): 10.0}
    for is_batch_over, first in ((True, of_batch("a")), (False, "b")):
        ranks = {leaf: over_part(leaf, held, 1.0, is_batch_over=is_batch_over) for leaf, held in used.items()}
        assert min(ranks, key=ranks.__getitem__) == first


def test_room_that_was_freed_at_an_engine_is_kept_until_more_runs_there() -> None:
    preemption = made(dict.fromkeys("xy", 0))
    one = make_request(of_batch("a"), id="x", streamed=False, reserved=100)
    preemption.ended(one, ServiceTokens(10, 0), is_preempted=True)
    assert preemption.is_kept_free(one, "e")
    preemption.dispatched(one, "e")
    assert not preemption.is_kept_free(make_request(of_batch("a")), "e")


def test_a_start_adds_what_is_expected_of_it_to_what_may_be_wasted() -> None:
    preemption = made({"x": 0})
    one, other = (make_request(of_batch("a"), id=id, streamed=False, reserved=100) for id in "xy")
    preemption.ended(one, ServiceTokens(10, 100), is_preempted=True)
    preemption.dispatched(one, "e")
    assert not preemption.may_waste(one, 0.05), "all 110 are wasted"
    assert preemption.may_stop_at_once(other, 1, 0.05), "two at once have 220"
