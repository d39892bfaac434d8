"""FairServe's case study (table 4): three applications that ask for several times what the engine can do, and give up.

The paper prints neither its engine nor the time-out. Here the engine computes about as many prompt tokens a second as
the table's rows add up to, and a client gives up on any call that has waited for a minute, whatever the policy.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from functools import partial
from statistics import mean
from typing import NamedTuple

from backends.simulated.engine_profiles import EngineProfile
from lab.experiment import Experiment, Findings, Inputs, Row, holds, shown
from lab.fairserve.population import TABLE_4, case_study
from lab.fairserve.study import ENGINE, Study, ends_calls, flat_limit, study
from policies.admission.engine import AdmissionEngine

DURATION_S = 900.0
"""About what the printed requests, served, take at the printed throughput."""
TIMEOUT_S = 60.0
USERS = 10
"""Users of each application. A user is a tenant."""
SEEDS = (1, 2, 3, 4, 5, 6)
UNBOUNDED = 1e6
"""Calls."""
SLOW: EngineProfile = replace(
    ENGINE, name="table-4", num_gpu_blocks=3001, base_s=2.5e-2, per_prefill_token_s=8e-4, per_seq_s=2e-4
)
"""About 1,200 prompt tokens a second, the most that table 4 prints of one policy, and a cache of 48,000 tokens."""

POLICIES: Mapping[str, Callable[[], AdmissionEngine]] = {
    "RPM(10)": partial(flat_limit, 10, wait_s_max=TIMEOUT_S),
    "VTC": partial(ends_calls, "vtc", wait_s_max=TIMEOUT_S),
    "FS (W)": partial(ends_calls, "wsc", wait_s_max=TIMEOUT_S, across_tenants=True),
    "FS (W+I)": partial(
        ends_calls, "fairserve", wait_s_max=TIMEOUT_S, across_tenants=True, window_calls=UNBOUNDED, working_set=False
    ),
    "FairServe": partial(ends_calls, "fairserve", wait_s_max=TIMEOUT_S),
}
"""FS (W+I) as printed: a call inside an interaction goes first, however much others are owed."""


class Published(NamedTuple):
    """The values that table 4 prints of one policy: for applications 14, 7 and 12, and in section 5.5."""

    served: str
    prompt_rate: str
    wasted: str = ""


PUBLISHED = {
    "RPM(10)": Published("56, 4, 2", "361, 860, 5"),
    "VTC": Published("37, 29, 73", "256, 374, 124", "3224"),
    "FS (W)": Published("37, 29, 73", "253, 390, 125"),
    "FS (W+I)": Published("37, 27, 80", "258, 359, 128", "461"),
}


def case_studies(seed: int, only: Collection[str] = tuple(POLICIES)) -> dict[str, Study]:
    """The same requests under every policy, or under those of these names."""
    planned = case_study(duration_s=DURATION_S, users=USERS, seed=seed)
    return {
        name: study(name, engine(), planned, 0.0, DURATION_S, SLOW) for name, engine in POLICIES.items() if name in only
    }


def _run(inputs: Inputs) -> Findings:
    by_seed = [case_studies(seed) for seed in SEEDS]
    return Findings(rows({name: [studies[name] for studies in by_seed] for name in POLICIES}), (), NOTES)


def rows(studies: Mapping[str, Sequence[Study]]) -> list[Row]:
    """Means over the seeds of what each policy served of each application, and of what it wasted."""
    wasted = {name: mean(one.wasted_tokens() for one in of) for name, of in studies.items()}
    cut = {name: sum(one.cut() for one in of) for name, of in studies.items()}
    light = {name: mean(one.app(12)[1] for one in of) for name, of in studies.items()}
    required = [
        holds("wasted tokens, FS (W+I) / VTC", 461 / 3224, wasted["FS (W+I)"] / wasted["VTC"], "<= 0.143",
              wasted["FS (W+I)"] <= 461 / 3224 * wasted["VTC"]),
        holds("wasted tokens, FS (W+I) / FS (W)", "", wasted["FS (W+I)"] / wasted["FS (W)"], "< 1",
              wasted["FS (W+I)"] < wasted["FS (W)"]),
        holds("interactions cut, FairServe as it comes / VTC", "", cut["FairServe"] / cut["VTC"], "< 1",
              cut["FairServe"] < cut["VTC"]),
        holds("prompt tokens/s of application 12, VTC / RPM(10)", 24, light["VTC"] / light["RPM(10)"], "> 1",
              light["VTC"] > light["RPM(10)"]),
    ]  # fmt: skip
    return required + [row for name, of in studies.items() for row in _shown(name, of, wasted[name])]


def _shares(one: Study) -> list[float]:
    """Return the share of each application in the computed prompt tokens."""
    rates = [one.app(number)[1] for number in TABLE_4]
    return [rate / sum(rates) for rate in rates]


def _answered(one: Study) -> list[int]:
    """Requests (calls) that were answered, of each application."""
    return [
        sum(record.outcome == "completed" for course in one.courses if course.interaction.flow.app == f"app{number}"
            for record in course.records)
        for number in TABLE_4
    ]  # fmt: skip


def _shown(name: str, of: Sequence[Study], wasted: float) -> list[Row]:
    published = PUBLISHED.get(name, Published("", ""))
    answered = _means(of, _answered, "{:.0f}")
    rates = _means(of, lambda one: [one.app(number)[1] for number in TABLE_4], "{:.0f}")
    shares = _means(of, lambda one: [100 * share for share in _shares(one)], "{:.0f} %")
    cut = sum(one.cut() for one in of)
    return [
        shown(f"{name}: requests served, applications 14, 7, 12", published.served, answered),
        shown(f"{name}: prompt tokens/s", published.prompt_rate, rates),
        shown(f"{name}: part of all prompt tokens", "", shares),
        shown(f"{name}: wasted tokens; interactions cut, all seeds", published.wasted, f"{wasted:,.0f}; {cut}"),
    ]


def _means(of: Sequence[Study], values: Callable[[Study], Sequence[float]], format_: str) -> str:
    return ", ".join(format_.format(mean(each)) for each in zip(*map(values, of), strict=True))


NOTES = (
    (
        "The printed numbers of requests, of the printed mean lengths, from 10 users of each application "
        "within 900 s. Assumed are the interactions (2 to 10 calls) and the engine: about 1,200 prompt tokens a "
        "second, a quarter of what is asked. Clients give up on a call after 60 s. Means of 6 seeds."
    ),
    "FS (W) counts normal calls; VTC and FairServe as it comes give users equal tokens. FS (W+I) is the paper's "
    "FairServe: a call inside an interaction goes first, however much others are owed. FairServe as it comes "
    "bounds what such a call may pass, so some calls inside wait for a minute here. Few are cut, but the few are "
    "long: it wastes as many tokens as VTC. The gateway lets a call inside wait for ten minutes "
    "(`queue_wait_s_max_inside`), not for one.",
)

FAIRSERVE_TABLE4 = Experiment("fairserve-table4", "FairServe, table 4: three applications that give up", _run)
