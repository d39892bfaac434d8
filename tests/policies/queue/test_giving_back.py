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
        giving_back.dispatched(make_request(of_batch("a"), id=id, streamed=False), "e")
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


def test_what_was_wasted_of_a_request_before_counts_with_it() -> None:
    tokens = {"x": 30, "y": 20, "z": 40, "w": 90}
    giving_back = made(tokens)
    again = make_request(of_batch("a"), id="y", streamed=False)
    giving_back.ended(again, ServiceTokens(10, 20), is_given_back=True)
    giving_back.dispatched(again, "e")
    assert giving_back.wasted_tokens == 30
    assert choose(giving_back, tokens | {"y": 15}) == "x"
