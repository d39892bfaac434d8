"""The traffic of "Fairness in Serving LLMs" (OSDI'24, sections 5 and B): a client is a tenant, rates are per minute.

Evenly spaced arrivals begin with a random phase, as in the paper's artifact; without it, two clients would always meet
at the same point of a batch.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import sqrt
from random import Random

from policies.request import Flow
from simulation.run import Arrival

SEED = 42
Tokens = tuple[int, int]
"""Input and output tokens of each request."""
EVEN: Tokens = (256, 256)


def overload(
    rates: Sequence[float],
    duration_s: float = 600.0,
    *,
    tokens: Tokens = EVEN,
    weights: Sequence[float] | None = None,
    seed: int = SEED,
) -> list[Arrival]:
    """Every client sends evenly at its rate: figures 3, 4, 15, 16 and 19."""
    random = Random(seed)
    streams = [_even(rate, 0.0, duration_s, random) for rate in rates]
    return _arrivals(streams, [tokens] * len(rates), weights)


def on_off(on_rate: float, steady_rate: float, duration_s: float = 600.0, *, seed: int = SEED) -> list[Arrival]:
    """Client 0 sends for a minute and pauses for one; client 1 always sends: figures 5 and 6."""
    random = Random(seed)
    pausing = [time for time in _even(on_rate, 0.0, duration_s, random) if time % 120 < 60]
    return _arrivals([pausing, _even(steady_rate, 0.0, duration_s, random)], [EVEN, EVEN])


def poisson_short_long(
    rates: Sequence[float], tokens: Sequence[Tokens], duration_s: float = 600.0, *, seed: int = SEED
) -> list[Arrival]:
    """Return one Poisson stream; each client has its share of it: figures 7 and 8."""
    random = Random(seed)
    streams: list[list[float]] = [[] for _ in rates]
    time = random.expovariate(sum(rates) / 60)
    while time < duration_s:
        random.choices(streams, rates)[0].append(time)
        time += random.expovariate(sum(rates) / 60)
    return _arrivals(streams, tokens)


def increase(
    steady_rate: float, first_rate: float, last_rate: float, duration_s: float = 600.0, *, seed: int = SEED
) -> list[Arrival]:
    """Client 0 sends evenly, client 1 ever faster: figure 9."""
    random = Random(seed)
    steady = _even(steady_rate, 0.0, duration_s, random)
    a, b = (last_rate - first_rate) / duration_s / 120, first_rate / 60
    faster, count = [], random.random()
    # The k-th request comes when the integral of the rate, a t^2 + b t, has reached k and the phase.
    while (time := (sqrt(b * b + 4 * a * count) - b) / (2 * a)) < duration_s:
        faster.append(time)
        count += 1
    return _arrivals([steady, faster], [EVEN, EVEN])


def shift(*, seed: int = SEED) -> list[Arrival]:
    """Five minutes of one client pausing, five of both asking for too much, five of one asking little: figure 10."""
    random = Random(seed)
    pausing = [time for time in _even(30, 0.0, 300.0, random) if time % 120 < 60]
    first = pausing + _even(60, 300.0, 600.0, random) + _even(30, 600.0, 900.0, random)
    second = _even(120, 0.0, 300.0, random) + _even(60, 300.0, 600.0, random) + _even(90, 600.0, 900.0, random)
    return _arrivals([first, second], [EVEN, EVEN])


def _even(rate: float, begin_s: float, end_s: float, random: Random) -> list[float]:
    interval_s = 60 / rate
    times, time = [], begin_s + interval_s * random.random()
    while time < end_s:
        times.append(time)
        time += interval_s
    return times


def _arrivals(
    streams: Sequence[Sequence[float]], tokens: Sequence[Tokens], weights: Sequence[float] | None = None
) -> list[Arrival]:
    weight_of: Callable[[int], float] = (lambda client: 1.0) if weights is None else weights.__getitem__
    requests = sorted((time, client) for client, times in enumerate(streams) for time in times)
    return [
        Arrival(str(number), Flow(str(client)), time, *tokens[client], weight=weight_of(client))
        for number, (time, client) in enumerate(requests)
    ]
