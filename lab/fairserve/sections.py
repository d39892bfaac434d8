"""FairServe against flat limits, VTC and its own scheduler alone, on a day of 34 applications in small.

The trace behind the paper is private, so only directions can be reproduced: who is refused, what is cut and wasted, who
waits. `lab.fairserve.population` says what of the workload is published and what is assumed.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, replace
from functools import partial

from lab.experiment import Experiment, Figure, Findings, Inputs, Row, holds, shown
from lab.fairserve.population import Population, workload
from lab.fairserve.study import (
    Study,
    ends_calls,
    flat_limit,
    percent,
    protects_interactions,
    study,
)
from lab.plots import Series
from policies.admission.engine import AdmissionEngine
from policies.limits.throttle import Ceilings, ThrottleSettings
from simulation.statistics import percentile

POPULATION = Population()
SEEDS = (1, 2, 3, 4)
"""Seeds of further populations, which see VTC and FairServe only."""
SHOWN_APPS = (14, 7, 12)
"""Applications of the paper's table 4."""
LIMIT = 10
"""Interactions that a user may start within a minute, under overload.

A little above what any benign user starts within one: the paper sets its limits by history, and does not print them.
"""
LIMITED = ThrottleSettings(user=Ceilings(starts=LIMIT))
RPM_LIMITS = (10, 30, 60)
"""Requests of a user within a minute: at 10 the engine has room, at 60 it has none."""

POLICIES: Mapping[str, Callable[[], AdmissionEngine]] = {
    **{f"RPM({limit})": partial(flat_limit, limit) for limit in RPM_LIMITS},
    "VTC": partial(ends_calls, "vtc"),
    "FS (W)": partial(ends_calls, "wsc", across_tenants=True),
    "FS (W+I)": partial(protects_interactions, across_tenants=True, throttle=LIMITED),
    "FairServe": partial(protects_interactions, throttle=LIMITED),
}


def compare(population: Population, only: Collection[str] = tuple(POLICIES)) -> dict[str, Study]:
    """The same workload under every policy, or under those of these names."""
    planned = workload(population)
    return {
        name: study(name, engine(), planned, population.duration_s / 10, population.duration_s)
        for name, engine in POLICIES.items()
        if name in only
    }


@dataclass(frozen=True, slots=True)
class Seed:
    """The results of VTC and FairServe on one workload: shares of users that are delayed, cuts, refusals."""

    delayed: float
    delayed_inside: float
    delayed_vtc: float
    delayed_inside_vtc: float
    cut: int
    cut_vtc: int
    wasted_vtc: int
    benign_refused: int
    throughput: float
    """FairServe's over VTC's."""

    @classmethod
    def of(cls, studies: Mapping[str, Study]) -> Seed:
        vtc, fair = studies["VTC"], studies["FairServe"]
        return cls(
            fair.delayed(), fair.delayed(inside=True), vtc.delayed(), vtc.delayed(inside=True),
            fair.cut(), vtc.cut(), vtc.wasted_tokens(), fair.benign_users_refused(),
            sum(fair.throughput()) / sum(vtc.throughput()),
        )  # fmt: skip


def seeds(first: Mapping[str, Study]) -> list[Seed]:
    """The first workload, which has been studied, and those of `SEEDS`."""
    others = [Seed.of(compare(replace(POPULATION, seed=seed), ("VTC", "FairServe"))) for seed in SEEDS]
    return [Seed.of(first), *others]


def _run(inputs: Inputs) -> Findings:
    studies = compare(POPULATION)
    return Findings(rows(studies, seeds(studies)), _waits_figures(studies.values()), NOTES)


def rows(studies: Mapping[str, Study], found: Collection[Seed]) -> list[Row]:
    """Return the rows: requirements of FairServe against the others, table 3, and what else the paper prints."""
    vtc, fair = studies["VTC"], studies["FairServe"]
    flat = [studies[f"RPM({limit})"] for limit in RPM_LIMITS]
    (abusers, refused) = fair.refusals()
    cut, refused_share = sum(seed.cut for seed in found), max(seed.benign_refused for seed in found) / POPULATION.users
    ours, flat_rate = sum(fair.throughput()), sum(flat[0].throughput())
    required = [
        holds("interactions cut in the middle, FairServe, all seeds", "", cut, "0", cut == 0),
        holds("interactions cut in the middle, RPM(10)", "21.15 times as many", flat[0].cut(), "many",
              flat[0].cut() >= 20),
        holds("wasted tokens, FairServe", 0, fair.wasted_tokens(), "0", fair.wasted_tokens() == 0),
        holds("wasted tokens, VTC: least of the seeds", 77.2e3, min(seed.wasted_vtc for seed in found), "> 0",
              min(seed.wasted_vtc for seed in found) > 0),
        holds("admitted interactions served to the end", "100 %", percent(fair.served()), "100 %", fair.served() == 1),
        holds("benign users ever refused, most of the seeds", "0 to 0.55 %", percent(refused_share), "<= 0.55 %",
              refused_share <= 0.0055),
        holds("refusals that are the abusers'", "", f"{abusers} of {refused}", ">= 95 %", abusers >= 0.95 * refused),
        _delayed("users delayed inside interactions, VTC's over FairServe's", found, inside=True),
        _delayed("users delayed in any call (waiting for room), VTC's over FairServe's", found, inside=False),
        holds("users delayed, RPM(60)'s over VTC's", 8.7, flat[2].delayed() / vtc.delayed(), "> 1",
              flat[2].delayed() > vtc.delayed()),
        holds("throughput, FairServe's over VTC's: least of the seeds", "1.02 to 1.05",
              min(seed.throughput for seed in found), ">= 1, to 0.5 %", min(s.throughput for s in found) >= 0.995),
        holds("throughput, FairServe's over RPM(10)'s", "1.03 to 1.75", ours / flat_rate, ">= 1.03",
              ours >= 1.03 * flat_rate),
        holds("TTFT of all that is answered, VTC's over FairServe's", "1.00 to 1.06",
              vtc.mean_ttft_s(benign=False) / fair.mean_ttft_s(benign=False), ">= 1",
              vtc.mean_ttft_s(benign=False) >= fair.mean_ttft_s(benign=False)),
        holds("throttled while the pool was not overloaded", "", fair.calm_refusals, "0", fair.calm_refusals == 0),
    ]  # fmt: skip
    compared = [
        shown(f"{one.name}'s over FairServe's: users delayed / delayed inside / throughput / TTFT, benign and all",
              "93 / - / 0.90 / 0.95" if one.name.startswith("RPM") else "10.67 / - / 1.00 / 1.00",
              " / ".join(f"{value:.2f}" for value in _over(one, fair)))
        for one in (*flat, vtc)
    ]  # fmt: skip
    by_seed = [
        shown(f"seed {name}: users delayed inside, VTC and FairServe; in any call", "",
              f"{percent(seed.delayed_inside_vtc)}, {percent(seed.delayed_inside)}; "
              f"{percent(seed.delayed_vtc)}, {percent(seed.delayed)}")
        for name, seed in zip((POPULATION.seed, *SEEDS), found, strict=True)
    ]  # fmt: skip
    return required + compared + by_seed + [row for one in studies.values() for row in _shown(one)]


def _delayed(measure: str, found: Collection[Seed], *, inside: bool) -> Row:
    """The published ratio, of all seeds together, with its spread."""
    pairs = [
        (seed.delayed_inside_vtc, seed.delayed_inside) if inside else (seed.delayed_vtc, seed.delayed) for seed in found
    ]
    ratios = [theirs / ours if ours else float("inf") for theirs, ours in pairs]
    ours = sum(ours for _, ours in pairs)
    together = sum(theirs for theirs, _ in pairs) / ours if ours else float("inf")
    value = f"{together:.2f} ({min(ratios):.2f} to {max(ratios):.2f})"
    return holds(f"{measure}, {len(pairs)} seeds", 10.67, value, ">= 10", together >= 10)


def _over(one: Study, fair: Study) -> tuple[float, ...]:
    return (
        one.delayed() / fair.delayed(),
        one.delayed(inside=True) / fair.delayed(inside=True),
        sum(one.throughput()) / sum(fair.throughput()),
        one.mean_ttft_s(benign=True) / fair.mean_ttft_s(benign=True),
        one.mean_ttft_s(benign=False) / fair.mean_ttft_s(benign=False),
    )


PUBLISHED = {
    "RPM": ("15.7e3", "11155 + 183", "40.20", "51.52 / 85.36", "92.03 / 87.64"),
    "VTC": ("77.2e3", "12190 + 263", "42.57", "", ""),
    "FS (W)": ("", "12217 + 267", "42.82", "", ""),
    "FS (W+I)": ("0", "12248 + 268", "42.53", "96.67 / 100", "99.45 / 100"),
}
"""Wasted tokens, and the columns of table 3, by policy."""


def _shown(one: Study) -> list[Row]:
    prompt, output = one.throughput()
    abusers, refused = one.refusals()
    published = PUBLISHED.get("RPM" if one.name.startswith("RPM") else one.name, ("",) * 5)
    provided = [percent(share) for share in one.provided()]
    apps = ", ".join(f"{served} ({prompt_tokens:.0f})" for served, prompt_tokens in map(one.app, SHOWN_APPS))
    waits = " / ".join(f"{one.mean_wait_s(inside=inside):.2f} s" for inside in (False, True))
    ttft = " / ".join(f"{one.mean_ttft_s(benign=benign):.2f} s" for benign in (True, False))
    measures = (
        ("interactions cut", "", one.cut()),
        ("wasted tokens", published[0], one.wasted_tokens()),
        ("refused of abusers / of all", "", f"{abusers} / {refused}"),
        ("benign users ever refused", "", one.benign_users_refused()),
        ("users delayed / inside interactions", "", f"{percent(one.delayed())} / {percent(one.delayed(inside=True))}"),
        ("dispatches of abusers while a benign call was delayed, mean", "", one.overtaken()),
        ("mean wait of first calls / inside interactions", "", waits),
        ("prompt + output tokens/s", published[1], f"{prompt:.0f} + {output:.0f}"),
        ("mean TTFT, benign users / all", published[2], ttft),
        ("service provided, requests / interactions", published[3], " / ".join(provided[:2])),
        ("users served, requests / interactions", published[4], " / ".join(provided[2:])),
        ("KV cache when one was throttled, least / median", "", _kv(one.kv_at_refusal)),
        ("applications 14, 7, 12 served (prompt tokens/s)", "", apps),
    )
    return [shown(f"{one.name}: {measure}", theirs, ours) for measure, theirs, ours in measures]


def _waits_figures(studies: Iterable[Study]) -> list[Figure]:
    seconds = [0.1 * step for step in range(1, 51)]
    drawn = []
    for inside, title in ((False, "Users one of whose calls"), (True, "Users one of whose calls inside interactions")):
        series = [
            Series(one.name, [(limit, 100 * one.delayed(limit, inside=inside)) for limit in seconds]) for one in studies
        ]
        name = "fairserve-waits-inside" if inside else "fairserve-waits"
        drawn.append(Figure(name, f"{title} waited longer", "seconds", "percent of users", series))
    return drawn


def _kv(shares: list[float]) -> str:
    return f"{percent(min(shares))} / {percent(percentile(shares, 0.5))}" if shares else "-"


NOTES = (
    (
        "Graph sizes, tokens, applications and the number of users are published; their spread is assumed "
        "(lab/fairserve/population.py). Users who behave load one engine "
        "(h100-llama3-8b, 32,768 tokens) to 0.55 of its capacity. Three abusers ask for 1.5 times as much as "
        "the engine can do."
    ),
    (
        "The paper prints no limits. Here a user may start 10 interactions a minute under FairServe while the "
        "KV cache is overloaded. RPM(10) leaves the engine room to spare; at 60 it is as full as without a limit."
    ),
    (
        "FairServe lets calls inside wait for 600 s. FS (W) and FS (W+I), as printed, compare users by what is "
        "normal for their applications; FairServe as it comes compares them by plain service."
    ),
    (
        "Delayed inside interactions: users with a later call that waited for more than a second. Where overload "
        "begins at 0.5 of the KV cache, VTC's 40 % are 11.6 times FairServe's 3.5 % (`fairserve-regimes`)."
    ),
    ("Table 3: a refused start counts as a request that was not provided."),
)

FAIRSERVE = Experiment("fairserve", "FairServe: sections 5.1 to 5.4 and table 3", _run)
