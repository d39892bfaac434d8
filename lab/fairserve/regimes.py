"""When does throttling help, and what would its settings change? FairServe in three regimes (not in the paper).

A few abusers far beyond the limit are what throttling is for. Many abusers that each stay below it, and users who
behave and are too many, are not: then nobody is beyond a limit, and only the order is left.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from statistics import mean

from lab.experiment import Experiment, Figure, Findings, Inputs, Row, shown
from lab.fairserve.population import Population, workload
from lab.fairserve.sections import LIMIT, LIMITED, POPULATION
from lab.fairserve.study import Study, ends_calls, percent, protects_interactions, study
from lab.plots import Series
from policies.admission.engine import AdmissionEngine
from policies.capacity.overload import OverloadSettings

FEW = POPULATION
MANY = replace(POPULATION, abusers=60)
NONE = replace(POPULATION, abusers=0, abusive_rate=0.0, benign_rate=5.7)
REGIMES: Mapping[str, Population] = {"few abusers": FEW, "many abusers": MANY, "no abusers": NONE}
SEEDS = (POPULATION.seed, 1, 2)
"""Seeds of the frontier."""
OVERLOAD = ((0.95, 0.85), (0.9, 0.8), (0.85, 0.7), (0.7, 0.5), (0.5, 0.3))
"""Shares of the KV cache at which overload begins and ends. The first is the default."""
WINDOW_TOKENS = 65_536.0

Make = Callable[[], AdmissionEngine]
VARIANTS: Mapping[str, Make] = {
    f"FairServe, limit {LIMIT}": partial(protects_interactions, throttle=LIMITED),
    "overload 0.7 / 0.5": partial(protects_interactions, throttle=LIMITED, overload=OverloadSettings(0.7, 0.5)),
    f"window {WINDOW_TOKENS:,.0f}": partial(protects_interactions, throttle=LIMITED, window_tokens=WINDOW_TOKENS),
}
"""All with a number as in the paper."""


def served(population: Population, name: str, engine: AdmissionEngine) -> Study:
    """Return the study of this population under this engine."""
    return study(name, engine, workload(population), population.duration_s / 10, population.duration_s)


@dataclass(frozen=True, slots=True)
class ThresholdPoint:
    """FairServe with one threshold against VTC, on one workload. Shares of 1; throughput is a ratio."""

    throughput: float
    delayed: float
    delayed_inside: float
    refused: int


def _run(inputs: Inputs) -> Findings:
    rows: list[Row] = []
    for regime, population in REGIMES.items():
        vtc = served(population, "VTC", ends_calls("vtc"))
        studies = [vtc, *(served(population, name, make()) for name, make in VARIANTS.items())]
        rows += [row for one in studies for row in _shown(regime, one, vtc)]
    frontier = {bounds: _points(bounds) for bounds in OVERLOAD}
    rows += [row for bounds, points in frontier.items() for row in _threshold(bounds, points)]
    return Findings(rows, [_figure(frontier)], NOTES)


def _points(bounds: tuple[float, float]) -> list[ThresholdPoint]:
    """Return the points of this threshold on the workload of each seed."""
    points = []
    for seed in SEEDS:
        population = replace(FEW, seed=seed)
        engine = protects_interactions(throttle=LIMITED, overload=OverloadSettings(*bounds))
        one = served(population, "FairServe", engine)
        points.append(
            ThresholdPoint(sum(one.throughput()), one.delayed(), one.delayed(inside=True), one.benign_users_refused())
        )
    return points


def _shown(regime: str, one: Study, vtc: Study) -> list[Row]:
    waits = " / ".join(f"{one.mean_wait_s(inside=inside):.2f} s" for inside in (False, True))
    delayed = f"{percent(one.delayed())} / {percent(one.delayed(inside=True))}"
    abusers, refused = one.refusals()
    measures = (
        ("users delayed / delayed inside", delayed),
        ("mean wait of first calls / inside", waits),
        ("interactions cut, tokens wasted", f"{one.cut()}, {one.wasted_tokens():,}"),
        ("throughput / VTC's; refused, of abusers", f"{_rate(one) / _rate(vtc):.3f}; {refused:,}, {abusers:,}"),
    )
    return [shown(f"{regime}: {one.name}: {measure}", "", ours) for measure, ours in measures]


def _rate(one: Study) -> float:
    return sum(one.throughput())


def _threshold(bounds: tuple[float, float], points: Sequence[ThresholdPoint]) -> list[Row]:
    where = f"overload {bounds[0]:g} / {bounds[1]:g}, mean of {len(points)} seeds"
    delayed = [
        percent(mean(shares)) for shares in zip(*((one.delayed, one.delayed_inside) for one in points), strict=True)
    ]
    rate, refused = mean(one.throughput for one in points), sum(one.refused for one in points)
    return [
        shown(f"{where}: users delayed / delayed inside", "", " / ".join(delayed)),
        shown(f"{where}: tokens/s; benign users refused", "", f"{rate:,.0f}; {refused}"),
    ]


def _figure(frontier: Mapping[tuple[float, float], Sequence[ThresholdPoint]]) -> Figure:
    """Throughput that a lower threshold costs, and users that it spares."""

    def line(name: str, share: Callable[[ThresholdPoint], float]) -> Series:
        points = [
            (mean(one.throughput for one in found), 100 * mean(share(one) for one in found))
            for found in frontier.values()
        ]
        return Series(name, points, dots=True)

    series = [line("in any call", lambda one: one.delayed), line("inside", lambda one: one.delayed_inside)]
    title = f"Overload from {OVERLOAD[0][0]:g} (right) to {OVERLOAD[-1][0]:g} (left) of the KV cache"
    least = min(rate for one in series for rate, _ in one.points)
    return Figure("fairserve-overload", title, "tokens/s", "users delayed (%)", series, x_from=least)


NOTES = (
    (
        "Few abusers: the workload of sections 5.1 to 5.4. Many abusers: 60 that together ask for as much, each "
        "for about half of the limit. No abusers: users who ask for 1.2 times as much as the engine can do. "
        "Starts give up after 120 s."
    ),
    "Where nobody is beyond a limit, FairServe delays more users than VTC, because it serves what is begun: VTC "
    "gives up 42 and 17 interactions in the middle, FairServe none.",
    "Thresholds: 0.7 / 0.5 spares a fifth of the delayed users for 1.2 % of the tokens, 0.5 / 0.3 three fifths "
    "for 3.5 %. The default, 0.95 / 0.85, has the highest throughput; set 0.5 / 0.3 where waits matter more.",
)

FAIRSERVE_REGIMES = Experiment(
    "fairserve-regimes", "FairServe: what throttling does, and where (not in the paper)", _run
)
