"""Output lengths: a mean to charge, a high quantile to reserve, each learned from one's own answers first."""

from __future__ import annotations

import pickle

from hypothesis import given, settings
from hypothesis import strategies as st

from policies.capacity.output_lengths import WINDOW, OutputLengths
from policies.request import Request
from tests.policies.making import make_request


def of(app: str, output_max: int = 10_000) -> Request:
    return make_request(app=app, output_max=output_max)


CHAT, BATCH = of("chat"), of("batch")
ENOUGH = 8


def test_nothing_known_is_not_charged_ahead_and_the_configured_guess_is_reserved() -> None:
    lengths = OutputLengths(unknown_tokens=256)
    assert lengths.estimate(of("chat", 1000)) == (0.0, 256)
    assert lengths.estimate(of("chat", 10)) == (0.0, 10)


def test_the_pool_speaks_for_a_newcomer_and_each_app_for_itself() -> None:
    lengths = OutputLengths()
    for _ in range(ENOUGH):
        lengths.learn(CHAT, 100)
    assert lengths.estimate(BATCH)[1] == 100
    for _ in range(ENOUGH - 1):
        lengths.learn(BATCH, 20)
    assert lengths.estimate(BATCH)[1] == 100
    lengths.learn(BATCH, 20)
    assert (lengths.estimate(BATCH)[1], lengths.estimate(CHAT)[1]) == (20, 100)


@settings(max_examples=100)
@given(st.lists(st.integers(0, 500), min_size=ENOUGH, max_size=200))
def test_the_reserve_covers_nine_of_ten_of_the_last_answers(answers: list[int]) -> None:
    lengths = OutputLengths(quantile=0.9)
    for answer in answers:
        lengths.learn(CHAT, answer)
    last = answers[-WINDOW:]
    reserved = lengths.estimate(CHAT)[1]
    assert reserved in last
    assert sum(answer <= reserved for answer in last) >= 0.9 * len(last)
    assert sum(answer < reserved for answer in last) <= 0.9 * len(last)


@settings(max_examples=100)
@given(st.lists(st.integers(0, 500), min_size=ENOUGH, max_size=100))
def test_the_mean_is_the_moving_average_of_the_paper(answers: list[int]) -> None:
    lengths = OutputLengths()
    mean = float(answers[0])
    for answer in answers:
        mean = (4 * mean + answer) / 5
        lengths.learn(CHAT, answer)
    assert abs(lengths.estimate(CHAT)[0] - mean) < 1e-6


def test_populations_are_bounded_and_the_least_recently_used_goes_first() -> None:
    lengths = OutputLengths(populations_max=3)
    for _ in range(ENOUGH):
        lengths.learn(CHAT, 7)
    for number in range(2):
        lengths.learn(of(f"app{number}"), 500)
    lengths.learn(CHAT, 7)
    full = len(pickle.dumps(lengths))
    for number in range(2, 4):
        lengths.learn(of(f"app{number}"), 500)
    assert len(pickle.dumps(lengths)) <= 1.1 * full, "of so many apps three are remembered"
    assert lengths.estimate(CHAT)[1] == 7
