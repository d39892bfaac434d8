"""Locality and fairness together ("Locality-aware Fair Scheduling in LLM Serving", arXiv 2501.14312, sections 6 and 7).

The data sets are replaced by prompts of the published lengths (`lab.dlpm.programs`), the GPUs by two models of them (an
assumption, not a measurement). Everything goes through the gateway's `AdmissionEngine`, with what an
unmodified engine lets it see; in the paper the schedulers sit in the engines.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from functools import partial
from math import inf
from statistics import mean

from backends.simulated.engine_model import EngineModel
from backends.simulated.engine_profiles import EngineProfile
from lab.dlpm.baselines import lpm, preble, round_robin_lpm, vtc_round_robin
from lab.dlpm.programs import BLOCK_TOKENS, Misbehaviour, Programs, judge, long_context_qa, tree_of_thoughts
from lab.experiment import Experiment, Figure, Findings, Inputs, Row, holds, require_source, shown
from lab.lab_driver import simulate
from lab.plots import Series
from lab.service import service
from policies.admission.engine import AdmissionEngine
from policies.admission.named import named_policy
from policies.admission.policy import Policy
from policies.orders.cost import LinearCost
from policies.queue.bounds import QueueLimits
from simulation.run import Record
from simulation.statistics import jain, percentile

A100 = EngineProfile(
    name="a100-llama3.1-8b",
    block_size=BLOCK_TOKENS,
    num_gpu_blocks=6251,
    max_model_len=100_000,
    max_num_seqs=256,
    max_num_batched_tokens=8192,
    base_s=1.2e-2,
    per_prefill_token_s=1.0e-4,
    per_seq_s=3.0e-5,
    per_context_token_s=8.7e-8,
)
"""80 GB: 16 GB of weights read per step, 16 GFLOP per prefill token at half of peak, 128 KiB of KV per token, so
400,000 tokens fit: about nineteen documents of the long-context workload."""
A10G = replace(
    A100, name="a10g-llama3.2-3b", num_gpu_blocks=1901, base_s=1.5e-2, per_prefill_token_s=1.07e-4, per_seq_s=5.0e-5,
    per_context_token_s=1.9e-7,
)  # fmt: skip
"""24 GB: 6.4 GB of weights per step, 112 KiB of KV per token, so 120,000 tokens fit."""
SEEDS = (42, 1, 2)
"""Seeds of the workloads. Pages show the mean: with one seed, a few reloads of documents decide a ratio."""
QUANTA = (2000.0, 5000.0, 20_000.0, 80_000.0)
BACKEND_QUANTA = (2000.0, 40_000.0, 200_000.0, 1_000_000.0, inf)
MISBEHAVES = "0"

FRONTIER_NOTE = (
    "Eight documents a client, and 32 of the client that sends four times as many requests in S1: the "
    "paper's three would fit this cache. VTC charges cached input in full, as in the paper; at a tenth, "
    "as in the gateway, its index is 0.970 and 0.960, below DLPM's."
)
CLIENTS_NOTE = (
    "The quantum is 80,000, about two documents with their questions. At 20,000, DLPM comes to 0.29 and "
    "0.34 of LPM (20 and 50 clients, one seed)."
)
WORKERS_NOTES = (
    (
        "S2: tree of thoughts; S1: judge; then the number of workers. Latency is over complete programs of the "
        "clients that behave. On several workers D2LPM loses to the Preble-like router by 8 to 27 %, except with "
        "the judges on two workers. Nobody needs protection here: under the router a call waits 1 to 4 s, not the "
        "paper's hundreds."
    ),
    (
        "The paper's order by Jain's index does not come out: the client that misbehaves waits, and the others "
        "get what they ask for."
    ),
)


@dataclass(frozen=True, slots=True)
class LocalityRun:
    """One run. Rates in weighted tokens per second, times in seconds, which are those of all clients but the first."""

    throughput: float
    hits: float
    jain_visible: float
    jain_actual: float
    mean_s: float
    p50_s: float
    p99_s: float
    wait_s: float
    """Mean wait of a call at the gateway."""


def vtc() -> Policy:
    """As in the paper, cached input counts as much as any other, and what is cached passes nothing."""
    return named_policy("vtc", cached_weight=1.0, placement="least_loaded")


def run(policy: Policy, programs: Programs, profile: EngineProfile, backends: int = 1) -> LocalityRun:
    """Serve these programs to the last one."""
    engine = AdmissionEngine(policy, limits=QueueLimits(queue_requests_max=1_000_000, queue_wait_s_max=1e6))
    models = {f"worker{number}": EngineModel(profile) for number in range(backends)}
    for name in models:
        engine.add_backend(name, max_num_seqs=profile.max_num_seqs)
    result = simulate(programs.arrivals(), engine=engine, backends=models, next_arrival=programs.next_arrival)
    records = list(result.records.values())
    begins_s = min(record.arrival.arrived_s for record in records)
    prompt_tokens = sum(record.arrival.prompt_tokens for record in records)
    visible = prompt_tokens + 2 * sum(len(record.token_s) for record in records)
    start_s, end_s = _all_active(records)
    latencies = [
        latency for client, ended in programs.latencies_s().items() for latency in ended if client != MISBEHAVES
    ]
    waits_s = [
        (record.dispatched_s or 0.0) - record.arrival.arrived_s
        for record in records
        if record.arrival.flow.tenant != MISBEHAVES
    ]
    return LocalityRun(
        throughput=visible / (result.ended_s - begins_s),
        hits=sum(record.cached_tokens for record in records) / prompt_tokens,
        jain_visible=jain(service(records, start_s, end_s).values()),
        jain_actual=jain(service(records, start_s, end_s, cost=LinearCost(cached_weight=0.0)).values()),
        mean_s=sum(latencies) / len(latencies),
        p50_s=percentile(latencies, 0.5),
        p99_s=percentile(latencies, 0.99),
        wait_s=mean(waits_s),
    )


Workload = Callable[[int], Programs]
"""Traffic by seed."""


def average(
    make: Callable[[], Policy],
    workload: Workload,
    profile: EngineProfile,
    backends: int = 1,
    seeds: Sequence[int] = SEEDS,
) -> LocalityRun:
    """The mean of every measure over the seeds."""
    studies = [run(make(), workload(seed), profile, backends) for seed in seeds]
    return LocalityRun(
        **{each.name: mean(getattr(study, each.name) for study in studies) for each in fields(LocalityRun)}
    )


def frontier(inputs: Inputs) -> Findings:
    """Figures 1 and 7 (one GPU): DLPM between a fair order and the fastest one, along its quantum."""
    rows: list[Row] = []
    figures: list[Figure] = []
    kinds: tuple[tuple[str, Misbehaviour], ...] = (("S1", "more"), ("S2", "longer"))
    for label, misbehaviour in kinds:

        def traffic(seed: int, misbehaviour: Misbehaviour = misbehaviour) -> Programs:
            return long_context_qa(5, 60, 1.5, misbehaviour=misbehaviour, documents=8, seed=seed)

        fair, fast = average(vtc, traffic, A100), average(lpm, traffic, A100)
        swept = {quantum: average(partial(named_policy, "dlpm", quantum=quantum), traffic, A100) for quantum in QUANTA}
        ours = swept[20_000.0]
        rows += [
            holds(
                f"{label}: throughput, DLPM / LPM",
                "about 1",
                ours.throughput / fast.throughput,
                ">= 0.85",
                ours.throughput >= 0.85 * fast.throughput,
            ),
            holds(
                f"{label}: throughput, DLPM / VTC",
                "up to 2.87",
                ours.throughput / fair.throughput,
                "> 2",
                ours.throughput > 2 * fair.throughput,
            ),
            _between(f"{label}: Jain, client-visible", fast.jain_visible, ours.jain_visible, fair.jain_visible),
        ]
        for name, study in (("VTC", fair), *((f"DLPM, quantum {q:,.0f}", s) for q, s in swept.items()), ("LPM", fast)):
            rows += [
                shown(f"{label}: {name}: throughput", "", study.throughput),
                shown(f"{label}: {name}: Jain, client-visible", "", study.jain_visible),
                shown(f"{label}: {name}: Jain, computed", "", study.jain_actual),
            ]
        points = sorted((study.jain_visible, study.throughput) for study in swept.values())
        series = [
            Series("DLPM", points, dots=True),
            Series("VTC", [(fair.jain_visible, fair.throughput)], dots=True),
            Series("LPM", [(fast.jain_visible, fast.throughput)], dots=True),
        ]
        name = f"dlpm-frontier-{label.lower()}"
        title = f"Throughput and fairness, {label}"
        figures.append(Figure(name, title, "Jain's index: 1 is equal", "service per second", series, x_from=0.9))
    return Findings(rows, figures, (FRONTIER_NOTE,))


def clients(inputs: Inputs) -> Findings:
    """Figure 11: 5 to 50 clients at the same total rate, with two documents each, on one small GPU."""
    rates: dict[str, list[tuple[float, float]]] = {"DLPM": [], "LPM": [], "VTC": []}
    for number in (5, 10, 20, 50):

        def traffic(seed: int, number: int = number) -> Programs:
            return long_context_qa(number, 500 // number, 25 / number, misbehaviour="none", documents=2, seed=seed)

        for name, make in (("DLPM", partial(named_policy, "dlpm", quantum=80_000.0)), ("LPM", lpm), ("VTC", vtc)):
            rates[name].append((float(number), average(make, traffic, A10G).throughput))
    rows: list[Row] = []
    for (count, ours), (_, fast), (_, fair) in zip(rates["DLPM"], rates["LPM"], rates["VTC"], strict=True):
        rows.append(holds(f"{count:.0f} clients: DLPM / LPM", "about 1", ours / fast, ">= 0.85", ours >= 0.85 * fast))
        rows.append(shown(f"{count:.0f} clients: DLPM / VTC", "above 1", ours / fair))
    series = [Series(name, points, dots=True) for name, points in rates.items()]
    return Findings(
        rows, [Figure("dlpm-clients", "More clients", "clients", "service per second", series)], (CLIENTS_NOTE,)
    )


@dataclass(frozen=True, slots=True)
class Loaded:
    """Programs for so many workers, by seed, and the numbers of workers for which they are run."""

    programs: Callable[[int, int], Programs]
    workers: Sequence[int]


WORKLOADS: Mapping[str, Loaded] = {
    "tree of thoughts, S2": Loaded(
        lambda workers, seed: tree_of_thoughts(4, 12 * workers, 0.1 * workers, misbehaviour="longer", seed=seed),
        (1, 2, 4),
    ),
    "judge, S1": Loaded(
        lambda workers, seed: judge(4, 24 * workers, 0.2 * workers, misbehaviour="more", seed=seed), (1, 2, 4, 8)
    ),
}
"""Two minutes of arrivals, which come faster than they are served, with the paper's answers of 256 tokens. Load grows
with the workers; what is open is several times a worker's cache. As in the paper, trees stop at four workers."""
WORKER_SEEDS: Mapping[int, Sequence[int]] = {1: (42, 1), 2: (42, 1), 4: (42,), 8: (42,)}
"""Seeds by number of workers: the more workers, the more programs one seed has."""
LOCAL_QUANTUM = 20_000.0
PREBLE = "Preble-like"
UNFAIR = "D2LPM, infinite quantum"
"""Longest prefix first at each worker, with D2LPM's placement: what the local fairness costs."""
SCHEDULERS: Mapping[str, Callable[[], Policy]] = {
    "D2LPM": lambda: named_policy("d2lpm", quantum=LOCAL_QUANTUM),
    "RR+LPM": round_robin_lpm,
    "VTC+RR": vtc_round_robin,
    PREBLE: preble,
    UNFAIR: lambda: named_policy("d2lpm", quantum=inf),
}


def workers(inputs: Inputs) -> Findings:
    """Figure 7: D2LPM against three ways to place requests, on 1 to 8 GPUs. Raises FromSourceError."""
    require_source()  # since two of them are assignments of our own
    rows: list[Row] = []
    figures: list[Figure] = []
    for workload, loaded in WORKLOADS.items():
        studies: dict[str, dict[int, LocalityRun]] = {name: {} for name in SCHEDULERS}
        for count in loaded.workers:
            programs = partial(loaded.programs, count)
            for name, make in SCHEDULERS.items():
                if (name != PREBLE or count > 1) and (name != UNFAIR or count == 2):
                    studies[name][count] = average(make, programs, A10G, count, WORKER_SEEDS[count])
            where = f"{workload.rpartition(', ')[2]} × {count}"
            rows += _against(where, {name: by[count] for name, by in studies.items() if count in by})
        drawn = {name: by for name, by in studies.items() if name != UNFAIR}
        slug = workload.replace(", ", "-").replace(" ", "-").lower()
        figures += [
            _by_workers(f"d2lpm-rate-{slug}", f"Throughput, {workload}", "service per second", drawn, "throughput"),
            _by_workers(f"d2lpm-latency-{slug}", f"Well-behaved clients, {workload}", "mean seconds", drawn, "mean_s"),
        ]
    return Findings(rows, figures, (PREBLE_NOTE, *WORKERS_NOTES))


PREBLE_NOTE = "The Preble-like router has Preble's published placement, without its migration and priorities."


def _against(where: str, studies: Mapping[str, LocalityRun]) -> list[Row]:
    ours, fair, cached = studies["D2LPM"], studies["VTC+RR"], studies["RR+LPM"]
    others = {name: study for name, study in studies.items() if name != "D2LPM"}
    share, latency = ours.throughput / fair.throughput, ours.mean_s / fair.mean_s
    rows = [
        holds(f"{where}: throughput / VTC+RR", "1 to 2.87", share, ">= 1", share >= 1),
        holds(f"{where}: latency / VTC+RR", "0.13 to 1, mean 0.34", latency, "< 1", latency < 1),
    ]
    if PREBLE in studies:
        router = studies[PREBLE]
        latency = ours.mean_s / router.mean_s
        rows += [
            holds(f"{where}: latency / {PREBLE}", "0.14 to 1, mean 0.34", latency, "< 1", latency < 1),
            shown(f"{where}: throughput / {PREBLE}", "at least 1", ours.throughput / router.throughput),
        ]
    if UNFAIR in studies:
        latency = studies[UNFAIR].mean_s / studies[PREBLE].mean_s
        rows.append(shown(f"{where}: latency / {PREBLE}, {UNFAIR}", "", latency))
    return [
        *rows,
        shown(f"{where}: throughput / RR+LPM", "up to 2.22", ours.throughput / cached.throughput),
        shown(f"{where}: latency / RR+LPM", "0.10 to 1, mean 0.25", ours.mean_s / cached.mean_s),
        shown(f"{where}: mean wait of a call, s", "", _cells({name: study.wait_s for name, study in studies.items()})),
        shown(f"{where}: cached share of input", "", _cells({name: study.hits for name, study in studies.items()})),
        shown(f"{where}: Jain, client-visible", "VTC > D2LPM > Preble > RR+LPM", ours.jain_visible),
        shown(f"{where}: Jain of the others", "", _cells({name: study.jain_visible for name, study in others.items()})),
        shown(f"{where}: Jain, computed", "", _cells({name: study.jain_actual for name, study in studies.items()})),
    ]


def _cells(values: Mapping[str, float]) -> str:
    return ", ".join(f"{name} {value:.3f}" for name, value in values.items())


def backend_quantum(inputs: Inputs) -> Findings:
    """Figure 10: how long a client may stick to one worker (four workers)."""
    traffic = partial(WORKLOADS["judge, S1"].programs, 4)
    make = partial(named_policy, "d2lpm", quantum=LOCAL_QUANTUM)
    swept = [
        (quantum, average(partial(make, backend_quantum=quantum), traffic, A10G, 4, WORKER_SEEDS[4]))
        for quantum in BACKEND_QUANTA
    ]
    rows: list[Row] = []
    for quantum, study in swept:
        rows.append(shown(f"Q^w {quantum:,.0f}: throughput", "rises, levels off", study.throughput))
        rows.append(shown(f"Q^w {quantum:,.0f}: Jain, client-visible", "0.855 to 0.83", study.jain_visible))
        rows.append(shown(f"Q^w {quantum:,.0f}: mean latency of well-behaved clients, s", "", study.mean_s))
    first, last = swept[0][1], swept[-2][1]
    rises = last.throughput / first.throughput
    rows.append(holds("throughput, largest finite / smallest Q^w", "> 1", rises, "> 1", rises > 1))
    points = [(quantum, study.throughput) for quantum, study in swept if quantum < inf]
    series = [Series("D2LPM", points, dots=True)]
    return Findings(
        rows,
        [
            Figure(
                "d2lpm-quantum", "Sticking to an engine", "quantum per engine, in tokens", "service per second", series
            )
        ],
    )


def _between(measure: str, low: float, ours: float, high: float) -> Row:
    return holds(measure, "between LPM and VTC", ours, f"{low:.3f} to {high:.3f}", low <= ours <= high)


def _by_workers(
    name: str, title: str, y_label: str, studies: Mapping[str, Mapping[int, LocalityRun]], field: str
) -> Figure:
    series = [
        Series(scheduler, [(float(count), float(getattr(study, field))) for count, study in by.items()], dots=True)
        for scheduler, by in studies.items()
    ]
    return Figure(name, title, "engines", y_label, series)


def _all_active(records: Sequence[Record]) -> tuple[float, float]:
    """From when the last client has begun until the first one has ended."""
    begun: dict[str, float] = {}
    ended: dict[str, float] = {}
    for record in records:
        client = record.arrival.flow.tenant
        begun.setdefault(client, record.arrival.arrived_s)
        ended[client] = max(ended.get(client, 0.0), record.finished_s or 0.0)
    return max(begun.values()), min(ended.values())


DLPM_EXPERIMENTS = (
    Experiment("dlpm-frontier", "DLPM, figures 1 and 7: throughput and fairness on one GPU", frontier),
    Experiment("dlpm-clients", "DLPM, figure 11: more clients at the same total rate", clients),
    Experiment("d2lpm-workers", "DLPM, figure 7: D2LPM on 1 to 8 GPUs", workers),
    Experiment("d2lpm-quantum", "DLPM, figure 10: how long a client sticks to a GPU", backend_quantum),
)
