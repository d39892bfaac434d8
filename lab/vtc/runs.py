"""How are VTC's experiments run? Its schedulers by the names of the paper, served by the paper's engine loop."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from random import Random
from statistics import median
from typing import NamedTuple

from lab.experiment import Inputs
from lab.simulation_result import SimulationResult
from lab.vtc.fairness import Discrepancy, Served, discrepancy, served, tokens_per_s
from lab.vtc.in_engine import A10G_LLAMA2_7B, EngineLoop, serve_in_engine
from lab.vtc.known_lengths import KnownLengths
from lab.vtc.unfair_orders import Lcf, Rpm
from policies.capacity.output_lengths import OutputLengths, OutputPredictor
from policies.orders.cost import Cost, LinearCost, ProfiledCost
from policies.orders.fcfs import Fcfs
from policies.orders.order import Order
from policies.orders.vtc import CounterParams, Vtc, VtcParams
from simulation.run import Arrival
from simulation.traces.reader import Trace

TWO_U = 40_000.0
"""2U of theorem 4.4 in the paper's setting: U = max(w_p * 256, w_q * 10,000)."""
LINEAR = LinearCost()


class Scheduler(NamedTuple):
    """An order, and the predictor it needs: made anew for each run."""

    policy: Callable[[Cost], Order]
    lengths: Callable[[Sequence[Arrival], int], OutputPredictor] | None = None
    """From the arrivals and a seed."""


def _true_lengths(arrivals: Sequence[Arrival], seed: int) -> OutputPredictor:
    return KnownLengths({arrival.id: float(arrival.output_tokens) for arrival in arrivals})


def _noisy_lengths(arrivals: Sequence[Arrival], seed: int) -> OutputPredictor:
    random = Random(seed)
    return KnownLengths({arrival.id: arrival.output_tokens * random.uniform(0.5, 1.5) for arrival in arrivals})


def _name(cost: Cost) -> str:
    return "profiled" if isinstance(cost, ProfiledCost) else "linear"


fcfs = Scheduler(lambda cost: Fcfs())
lcf = Scheduler(lambda cost: Lcf(CounterParams(cost=_name(cost))))
vtc = Scheduler(lambda cost: Vtc(VtcParams(cost=_name(cost))))
predict = Scheduler(
    lambda cost: Vtc(VtcParams(cost=_name(cost), predict_output=True)), lambda arrivals, seed: OutputLengths()
)
oracle = Scheduler(lambda cost: Vtc(VtcParams(cost=_name(cost), predict_output=True)), _true_lengths)
noisy_oracle = Scheduler(lambda cost: Vtc(VtcParams(cost=_name(cost), predict_output=True)), _noisy_lengths)


def rpm(requests_per_minute: int) -> Scheduler:
    return Scheduler(lambda cost: Rpm(requests_per_minute))


def arena(inputs: Inputs) -> list[Arrival]:
    """The ten minutes of Chatbot Arena in which each model is a client: 27 clients, 1,500 requests (section 5.3)."""
    return list(Trace(inputs.trace("vtc_arena27_10min.csv.gz")).arrivals(block_size=16))


def step_times(points: int) -> list[EngineLoop]:
    """Decode steps from 3.5 % faster to 3.5 % slower than fitted, so that no number hangs on how arrivals meet batches.

    With evenly spaced arrivals plain VTC is phase-locked: the mean difference of table 5 lies anywhere between 1 and
    130 as the step time moves by 5 %.
    """
    base_s = A10G_LLAMA2_7B.decode_base_s
    shares = [0.0] if points == 1 else [-0.035 + 0.07 * point / (points - 1) for point in range(points)]
    return [replace(A10G_LLAMA2_7B, decode_base_s=base_s * (1 + share)) for share in shares]


def serve(
    scheduler: Scheduler,
    arrivals: Sequence[Arrival],
    *,
    loop: EngineLoop = A10G_LLAMA2_7B,
    cost: Cost = LINEAR,
    seed: int = 0,
) -> SimulationResult:
    """Run one workload in the paper's engine loop."""
    lengths = scheduler.lengths(arrivals, seed) if scheduler.lengths is not None else None
    return serve_in_engine(arrivals, scheduler.policy(cost), loop=loop, lengths=lengths)


@dataclass(frozen=True, slots=True)
class MeasuredRun:
    """The values that the tables print of one run."""

    difference: Discrepancy
    tokens_per_s: float
    requests: list[Served]

    def cells(self) -> str:
        return cells(self.difference.max, self.difference.avg, self.difference.var, self.tokens_per_s)


def cells(*numbers: float) -> str:
    """Max / avg / variance / throughput as the tables of the paper print them."""
    return " / ".join(f"{number:.0f}" if number >= 100 else f"{number:.2f}" for number in numbers)


def measure(run: SimulationResult, *, cost: Cost = LINEAR) -> MeasuredRun:
    requests = served(run.records.values())
    return MeasuredRun(discrepancy(requests, cost=cost), tokens_per_s(requests, run.ended_s), requests)


def medians(runs: Sequence[MeasuredRun]) -> str:
    """The middle value of each column over a sweep."""
    differences = [run.difference for run in runs]
    columns = [[one.max for one in differences], [one.avg for one in differences], [one.var for one in differences]]
    return cells(*(median(column) for column in [*columns, [run.tokens_per_s for run in runs]]))
