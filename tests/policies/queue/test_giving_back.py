"""Which running request is given back? One that goes on all the same keeps no other from it."""

from __future__ import annotations

from policies.queue.giving_back import GivingBack
from policies.request import ServiceTokens, of_batch
from tests.policies.making import make_request


def choose(giving_back: GivingBack, tokens: dict[str, int], *, share: float = 0.05) -> str | None:
    return giving_back.choose(["e"], len(tokens), share, lambda id: ServiceTokens(10, tokens[id]), lambda id: False)


def made(tokens: dict[str, int]) -> GivingBack:
    giving_back = GivingBack()
    for id in tokens:
        giving_back.dispatched(make_request(of_batch("a"), id=id, streamed=False, reserved=100), "e")
    return giving_back


def test_the_one_that_has_received_least_and_then_the_next() -> None:
    tokens = {"x": 30, "y": 20, "z": 40, "w": 90}
    giving_back = made(tokens)
    assert choose(giving_back, tokens) == "y"
    assert choose(giving_back, tokens) == "x", "y goes on: its client has seen something of it"


def test_the_guaranteed_part_of_what_runs_stays() -> None:
    tokens = {"x": 30, "y": 20, "z": 40, "w": 90}
    giving_back = made(tokens)
    assert [choose(giving_back, tokens, share=0.5) for _ in range(3)] == ["y", "x", None]


def test_of_those_that_have_received_as_little_the_one_that_was_given_back_less_often() -> None:
    tokens = {"x": 30, "y": 20, "z": 40, "w": 90}
    giving_back = made(tokens)
    again = make_request(of_batch("a"), id="x", streamed=False, reserved=100)
    giving_back.ended(again, ServiceTokens(10, 30), is_given_back=True)
    giving_back.dispatched(again, "e")
    assert giving_back.wasted_tokens == 40
    assert choose(giving_back, tokens | {"x": 20}) == "y"


def test_when_all_is_wasted_that_may_be_what_was_given_back_stays_free_until_more_has_been_received() -> None:
    giving_back = made(dict.fromkeys("xy", 0))
    one = make_request(of_batch("a"), id="x", streamed=False, reserved=100)
    assert giving_back.may_waste(one, 0.05)
    giving_back.ended(one, ServiceTokens(10, 90), is_given_back=True)
    giving_back.dispatched(one, "e")
    giving_back.ended(one, ServiceTokens(10, 90), is_given_back=True)
    assert not giving_back.may_waste(one, 0.05), "110 each, and two at once"
    assert giving_back.is_kept_free(one, "e")
    assert not giving_back.is_kept_free(one, "other")
    giving_back.dispatched(one, "e")
    giving_back.ended(one, ServiceTokens(10, 2100), is_given_back=False)
    assert not giving_back.is_kept_free(one, "e"), "two ran"
    assert giving_back.may_waste(one, 0.05), "a twentieth of 2,110"
