"""A day of 34 applications in small: interactions drawn from what FairServe publishes of its (private) trace.

Published, and kept: 34 applications and more than 1,000 users (section 5); the share of requests in interactions of 1,
2 to 10, ... calls and their mean tokens (table 2); prompts and answers of applications 14, 7 and 12 (table 4); users
whose request rates lie orders of magnitude apart (figure 2); a few abusers far beyond all others, in three
applications (figure 6a). Tokens are not scaled: the engine that is simulated needs a model length of 32,768.

Assumed, since nothing is printed: how the other applications spread around the mean, how lengths vary within one, the
share of system prompts, the time that tools take, and the swing of the load within a run. Rates are given by the
caller, because the trace's engines are unknown.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from random import Random
from typing import NamedTuple

from lab.fairserve.interaction_clients import PlannedCall, PlannedInteraction
from policies.request import Flow


class Graphs(NamedTuple):
    """Interactions of a range of sizes (table 2): their share of all requests, and mean tokens over all their calls."""

    calls_min: int
    calls_max: int
    requests_share: float
    prompt_tokens: float
    output_tokens: float

    @property
    def interactions_share(self) -> float:
        """Relative number of interactions, not requests."""
        return self.requests_share / ((self.calls_min + self.calls_max) / 2)


GRAPHS = (
    Graphs(1, 1, 0.7322, 4994.65, 136.86),
    Graphs(2, 10, 0.2609, 21352.13, 241.19),
    Graphs(11, 20, 0.0050, 51200.13, 3258.75),
    Graphs(21, 30, 0.0011, 65924.80, 9217.13),
    Graphs(31, 40, 0.00005, 94096.51, 13582.78),  # printed as "<0.01 %"
    Graphs(41, 50, 0.00005, 161158.58, 12874.49),
    Graphs(51, 60, 0.00005, 543559.74, 22102.99),  # printed as "> 50"
)
RARE_MIN = 2
"""Interactions of every size that a run has at least: the long ones would otherwise be missing from a short run."""
APPS = 34
TABLE_4 = {14: (6370.0, 102.0, 269), 7: (14854.0, 74.0, 139), 12: (999.0, 32.0, 448)}
"""Application: mean prompt and output tokens of a request, requests."""
ABUSED_APPS = (14, 7, 12)
ABUSER = "abuser"
Weighted = Sequence[tuple[float, float]]
"""Weights and values."""
TOKENS_MAX = 32_000


@dataclass(frozen=True, slots=True)
class _App:
    """How an application differs from the mean: factors on prompt and output lengths."""

    name: str
    popularity: float
    prompt_factor: float
    output_factor: float
    system_share: float


@dataclass(frozen=True, slots=True)
class Population:
    """The senders and their rates, in requests (calls) per second over all; `duration_s` in seconds."""

    users: int = 1010
    abusers: int = 3
    benign_rate: float = 2.6
    abusive_rate: float = 6.0
    duration_s: float = 900.0
    swing: float = 0.5
    """How far the benign rate swings around its mean, as a share of it."""
    swing_s: float = 300.0
    """Period of the swing."""
    seed: int = 20_24


def is_abuser(flow: Flow) -> bool:
    """Is it one of those who flood?"""
    return flow.tenant.startswith(ABUSER)


def workload(population: Population) -> list[PlannedInteraction]:
    """All interactions of a run. A user is a tenant of weight 1: what the paper calls a user shares the engine."""
    rng = Random(population.seed)
    apps = _apps(rng)
    calls_per_interaction = 1.0 / sum(graphs.interactions_share for graphs in GRAPHS)
    interactions = _benign(population, apps, population.benign_rate / calls_per_interaction, rng)
    interactions += _abusive(population, apps, population.abusive_rate / calls_per_interaction, rng)
    return interactions


def case_study(*, duration_s: float, users: int, seed: int) -> list[PlannedInteraction]:
    """Table 4: so many users of each of three applications, who send as many requests as are printed, evenly spread.

    Requests have the printed mean lengths whether or not they stand alone; as many as in table 2 belong to interactions
    of 2 to 10 calls.
    """
    rng = Random(seed)
    single, several = GRAPHS[:2]
    several = several._replace(
        prompt_tokens=single.prompt_tokens * (several.calls_min + several.calls_max) / 2,
        output_tokens=single.output_tokens * (several.calls_min + several.calls_max) / 2,
    )
    interactions: list[PlannedInteraction] = []
    for app in _apps(rng)[: len(TABLE_4)]:
        left = TABLE_4[int(app.name.removeprefix("app"))][2]
        while left:
            graphs = rng.choices((single, several), [one.interactions_share for one in (single, several)])[0]
            calls = _calls(app, graphs, rng)[:left]
            left -= len(calls)
            flow = Flow(f"{app.name}-user{rng.randrange(users)}", app.name)
            interactions.append(PlannedInteraction(f"c{len(interactions)}", flow, rng.uniform(0.0, duration_s), calls))
    return interactions


def _apps(rng: Random) -> list[_App]:
    """The three of table 4 as printed, the others spread around the mean that table 2 leaves for them."""
    single = GRAPHS[0]
    mean_requests = sum(requests for _, _, requests in TABLE_4.values()) / len(TABLE_4)
    apps = {
        number: _App(
            f"app{number}", rng.lognormvariate(0.0, 1.0), rng.lognormvariate(0.0, 0.8), rng.lognormvariate(0.0, 0.4),
            system_share=rng.uniform(0.1, 0.7),
        )
        for number in range(1, APPS + 1)
    }  # fmt: skip
    for number, (prompt, output, requests) in TABLE_4.items():
        apps[number] = replace(
            apps[number], popularity=requests / mean_requests,
            prompt_factor=prompt / single.prompt_tokens, output_factor=output / single.output_tokens,
        )  # fmt: skip
    given = [apps[number] for number in TABLE_4]
    free = [app for number, app in apps.items() if number not in TABLE_4]
    prompts = _left(*([(one.popularity, one.prompt_factor) for one in some] for some in (given, free)))
    outputs = _left(*([(one.popularity, one.output_factor) for one in some] for some in (given, free)))
    return given + [
        replace(app, prompt_factor=app.prompt_factor * prompts, output_factor=app.output_factor * outputs)
        for app in free
    ]


def _left(given: Weighted, free: Weighted) -> float:
    """Return the factor of the free values that makes the weighted mean of all 1."""
    total = sum(weight for weight, _ in [*given, *free])
    return (total - sum(weight * value for weight, value in given)) / sum(weight * value for weight, value in free)


def _benign(population: Population, apps: Sequence[_App], rate: float, rng: Random) -> list[PlannedInteraction]:
    """Users of one or two applications each, at rates orders of magnitude apart; everyone comes at least once."""
    weights = list(accumulate(app.popularity for app in apps))
    usual_apps = [rng.choices(apps, cum_weights=weights, k=2) for _ in range(population.users)]
    activity = list(accumulate(rng.lognormvariate(0.0, 1.5) for _ in range(population.users)))
    number = max(population.users, round(rate * population.duration_s))
    who = list(range(population.users))
    who += rng.choices(range(population.users), cum_weights=activity, k=number - population.users)
    sizes = _sizes(number, rng)
    interactions = []
    for serial, (user, graphs) in enumerate(zip(who, sizes, strict=True)):
        app = usual_apps[user][rng.random() < 0.15]
        flow = Flow(f"user{user:04}", app.name)
        interactions.append(
            PlannedInteraction(
                f"b{serial}", flow, _starts_s(population, rng), _calls(app, graphs, rng), output_tokens_max=4096
            )
        )
    return interactions


def _abusive(population: Population, apps: Sequence[_App], rate: float, rng: Random) -> list[PlannedInteraction]:
    """A few who send without regard to answers, the sizes that their application has anyway."""
    by_name = {app.name: app for app in apps}
    number = round(rate * population.duration_s) if population.abusers else 0
    sizes = rng.choices(GRAPHS, [graphs.interactions_share for graphs in GRAPHS], k=number)
    interactions = []
    for serial, graphs in enumerate(sizes):
        abuser = serial % population.abusers
        app = by_name[f"app{ABUSED_APPS[abuser % len(ABUSED_APPS)]}"]
        flow = Flow(f"{ABUSER}{abuser}", app.name)
        starts_s = rng.uniform(0.1, 1.0) * population.duration_s
        interactions.append(
            PlannedInteraction(f"a{serial}", flow, starts_s, _calls(app, graphs, rng), output_tokens_max=4096)
        )
    return interactions


def _sizes(number: int, rng: Random) -> list[Graphs]:
    """As table 2 has them, with a few of each."""
    rare = [graphs for graphs in GRAPHS for _ in range(RARE_MIN)]
    drawn = rng.choices(GRAPHS, [graphs.interactions_share for graphs in GRAPHS], k=max(0, number - len(rare)))
    sizes = [*rare, *drawn][:number]
    rng.shuffle(sizes)
    return sizes


def _starts_s(population: Population, rng: Random) -> float:
    """A time at which the load, which swings like a sine, is as high as that time is likely."""
    while True:
        at = rng.uniform(0.0, population.duration_s)
        load = 1.0 + population.swing * math.sin(2 * math.pi * at / population.swing_s)
        if rng.uniform(0.0, 1.0 + population.swing) < load:
            return at


def _calls(app: _App, graphs: Graphs, rng: Random) -> tuple[PlannedCall, ...]:
    """The calls of one interaction. Prompts grow along it, as what was said before comes with every call."""
    count = rng.randint(graphs.calls_min, graphs.calls_max)
    mean = (graphs.calls_min + graphs.calls_max) / 2
    calls = []
    for stage in range(1, count + 1):
        growth = 1.0 if count == 1 else 0.6 + 0.8 * (stage - 1) / (count - 1)
        prompt = graphs.prompt_tokens / mean * app.prompt_factor * growth * _spread(0.3, rng)
        output = graphs.output_tokens / mean * app.output_factor * _spread(0.5, rng)
        prompt_tokens = min(max(8, round(prompt)), TOKENS_MAX)
        output_tokens = min(max(1, round(output)), 4096, TOKENS_MAX - prompt_tokens + 512)
        calls.append(
            PlannedCall(prompt_tokens, output_tokens, round(prompt_tokens * app.system_share), rng.uniform(0.1, 1.0))
        )
    return tuple(calls)


def _spread(sigma: float, rng: Random) -> float:
    """A factor of mean 1."""
    return rng.lognormvariate(-sigma * sigma / 2, sigma)
