"""The forecast of a KV cache: kept request by request, it says what one made anew would say."""

from __future__ import annotations

import random
from collections.abc import Iterable
from math import sqrt
from operator import attrgetter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from policies.capacity.kv_forecast import (
    CATCHING_UP,
    LATE,
    LOOKS,
    TOLERATED,
    Growth,
    KvForecast,
    remaining_output,
    stable_for,
)


def forecast(requests: Iterable[Growth]) -> KvForecast:
    made = KvForecast()
    for request in requests:
        made.add(request)
    return made


def exact_peak(requests: list[Growth], candidate: Growth, delay: float) -> float:
    """The largest occupancy ahead, where ends begin and end and sometimes between: the mean plus one deviation."""

    def level(step: float) -> float:
        mean, variance = 0.0, 0.0
        for request in (*requests, candidate):
            share = request.share_at(step)
            around = request.held if request is candidate else request.held + request.sequences * request.grows / 2
            mean += share * (request.held + request.sequences * step)
            variance += share * (1.0 - share) * around**2
        return mean + sqrt(variance)

    changes = [step for each in requests for step in (each.grows, each.grows + each.spread)]
    looks = [max(changes, default=0.0) / 2**look for look in range(1, LOOKS + 1)]
    return max(level(step) for step in (*changes, *looks, candidate.grows) if step >= delay or step == candidate.grows)


def is_exactly_level(requests: list[Growth], candidate: Growth, capacity_tokens: float) -> bool:
    """Within the last k steps, for every k, no more work was begun than a full cache gets through in k steps.

    On top come the candidate itself, part of what is missing in a cache that has become empty, and as many steps as
    ends differ by.
    """
    work = candidate.work()
    level = sum(request.work() / max(request.whole, 1.0) for request in requests) / capacity_tokens
    missing = max(0.0, 1.0 - TOLERATED - level)
    ahead = work / capacity_tokens + candidate.whole * CATCHING_UP * missing + candidate.spread
    for request in sorted(requests, key=attrgetter("age")):
        if work > capacity_tokens * (request.age + ahead):
            return False
        work += request.work()
    return True


@settings(max_examples=200)
@given(
    leases=st.lists(
        st.tuples(st.integers(1, 300), st.integers(0, 80), st.integers(0, 60), st.integers(1, 3)), max_size=8
    ),
    prompt=st.integers(1, 300),
    grows=st.integers(0, 80),
    sequences=st.integers(1, 3),
    delay=st.integers(0, 20),
)
def test_the_peak_is_that_of_growing_everything_token_by_token(
    leases: list[tuple[int, int, int, int]], prompt: int, grows: int, sequences: int, delay: int
) -> None:
    candidate = Growth(float(grows), float(prompt), sequences, float(grows), 0.0)
    others = [
        Growth(float(more), float(held + done * n), n, float(more + done), float(done))
        for held, more, done, n in leases
    ]
    everybody = [candidate, *(other for other in others if other.grows >= delay)]
    moments = range(142)
    expected = max(
        sum(each.held + moment * each.sequences for each in everybody if each.grows >= moment) for moment in moments
    )
    assert forecast(others).peak_with(candidate, delay) == pytest.approx(expected)


@pytest.mark.parametrize(
    ("expected", "reserved", "done", "least", "width"),
    [
        (100, 100, 0, 100, 0),  # all alike
        (100, 100, 40, 60, 0),
        (100, 230, 0, 0, 200),  # they end at random
        (100, 230, 150, 0, 200),  # and whoever has come so far has as much to go
        (100, 165, 20, 30, 100),
        (100, 100, 400, 0, 200),  # longer than its like: a quarter more in the mean
        (100, 230, 900, 0, 100),  # but not beyond the most that it may take
        (100, 230, 1000, 0, 0),
        (100, 100, 1001, 0, 0),
    ],
)
def test_what_is_still_to_come(expected: float, reserved: float, done: float, least: float, width: float) -> None:
    assert remaining_output(expected, reserved, 1000, done) == pytest.approx((least, width), abs=0.5)


@pytest.mark.parametrize(("expected", "reserved", "lasting"), [(200, 200, 24.9), (260, 300, 24.9), (150, 260, 8.0)])
def test_an_answer_that_ends_at_the_most_it_may_take_is_noted_seldom(
    expected: float, reserved: float, lasting: float
) -> None:
    """Its end does not move while it grows."""
    ahead = remaining_output(expected, reserved, 200, 1)
    assert stable_for(ahead, expected, reserved, 200, 1, 1.0) == pytest.approx(lasting, abs=0.1)
    for done in range(1, 1 + int(lasting)):
        least, width = remaining_output(expected, reserved, 200, done)
        assert done + least + width == pytest.approx(200)
        assert done + least == pytest.approx(1 + ahead[0])


def test_starts_are_level_when_spread_and_not_when_together() -> None:
    capacity = 20 * 390.0
    fresh = Growth(200.0, 290.0, 1, 200.0, 0.0)
    spread = [Growth(200.0 - 10 * step, 290.0 + 10 * step, 1, 200.0, 10.0 * step) for step in range(1, 19)]
    together = [fresh] * 16
    assert forecast(spread).keeps_pace(fresh, capacity)
    assert not forecast(together).keeps_pace(fresh, capacity)
    assert forecast([]).keeps_pace(fresh, capacity)
    assert forecast(together).keeps_pace(Growth(100.0, 290.0, 1, 200.0, 0.0, 200.0), capacity), "nor end together"


class Sequence:
    """A request that runs."""

    def __init__(self, prompt: int, expected: float, reserved: float, each: int, age: float) -> None:
        self.prompt, self.expected, self.reserved, self.each, self.age = prompt, expected, reserved, each, age
        self.done = 0

    def growth(self) -> Growth:
        ahead = remaining_output(self.expected, self.reserved, 2000, self.done)
        grows, spread = ahead
        held = self.prompt + self.each * (self.done + 8)
        same = stable_for(ahead, self.expected, self.reserved, 2000, self.done, 1.0)
        return Growth(grows, held, self.each, self.done + grows + spread / 2, self.done + self.age, spread, same)


class Engine:
    """Requests that come, grow by a token in each step, and go; and the forecast that is kept of them."""

    def __init__(self, seed: int, kinds: list[tuple[float, float]]) -> None:
        self.rng, self.kinds = random.Random(seed), kinds
        self.forecast = KvForecast()
        self.running: dict[Sequence, Growth] = {}

    def note(self, sequence: Sequence) -> None:
        if sequence in self.running:
            self.forecast.remove(self.running[sequence])
        self.running[sequence] = sequence.growth()
        self.forecast.add(self.running[sequence])

    def new(self) -> Sequence:
        expected, reserved = self.rng.choice(self.kinds)
        return Sequence(self.rng.randrange(20, 600), expected, reserved, self.rng.choice((1, 1, 1, 2)), 0.0)

    def step(self, most: int) -> None:
        self.forecast.clock += 1.0
        for sequence in self.running:
            sequence.done += 1
        due = {id(growth) for growth in self.forecast.due()}
        for sequence, growth in list(self.running.items()):
            if id(growth) in due:
                self.note(sequence)
            mean = (sequence.reserved - sequence.expected) / LATE
            if sequence.done > sequence.expected - mean and self.rng.random() < 1 / max(mean, 1.0):
                self.forecast.remove(self.running.pop(sequence))
        if len(self.running) < most and self.rng.random() < 0.7:
            self.note(self.new())


KINDS = {
    "alike": [(300.0, 300.0)],
    "at random": [(300.0, 690.0)],
    "some of each": [(300.0, 690.0), (80.0, 100.0), (400.0, 460.0), (20.0, 40.0)],
}


@pytest.mark.parametrize("kinds", KINDS)
@pytest.mark.parametrize("most", [3, 20, 150])
def test_what_is_kept_is_what_would_be_made_anew(kinds: str, most: int) -> None:
    engine, peaks, lead = Engine(most, KINDS[kinds]), [], 0
    for number in range(900):
        engine.step(most)
        if number % 50 == 49:
            candidate, requests = engine.new().growth(), [sequence.growth() for sequence in engine.running]
            peaks.append(engine.forecast.peak_with(candidate, 3.0) / exact_peak(requests, candidate, 3.0))
            held = sum(request.held for request in requests)
            assert engine.forecast.held() == pytest.approx(held)
            for part in (0.6, 0.8, 0.9, 1.0, 1.1, 1.3, 2.0):
                is_level = engine.forecast.keeps_pace(candidate, part * held)
                lead += is_level != is_exactly_level(requests, candidate, part * held)
    assert min(peaks) > 0.985, peaks
    assert max(peaks) < 1.03, peaks
    assert 0.995 < sum(peaks) / len(peaks) < 1.01
    assert lead <= 0.03 * 18 * 7, "is a start early?"


def test_a_forecast_that_has_forgotten_everything_is_as_new() -> None:
    engine = Engine(1, KINDS["some of each"])
    for _ in range(500):
        engine.step(100)
    for growth in engine.running.values():
        engine.forecast.remove(growth)
    assert engine.forecast.held() == 0.0
    assert not engine.forecast.due()
    candidate = engine.new().growth()
    assert engine.forecast.peak_with(candidate) == KvForecast().peak_with(candidate)
    assert engine.forecast.keeps_pace(candidate, 1000.0)


def test_a_question_that_was_refused_is_refused_again_until_something_ends() -> None:
    engine = Engine(2, KINDS["some of each"])
    for _ in range(500):
        engine.step(100)
    candidate = engine.new().growth()
    limit = engine.forecast.peak_with(candidate) - 1.0
    for _ in range(2):
        assert engine.forecast.peak_with(candidate, 0.0, limit) > limit
    for growth in list(engine.running.values())[:20]:
        engine.forecast.remove(growth)
    assert engine.forecast.peak_with(candidate, 0.0, limit) <= limit
