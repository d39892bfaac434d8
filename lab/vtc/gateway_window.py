"""What does a gateway lose against a scheduler inside the engine, and how much should it let in? Not in the papers.

VTC at the gateway over a first-come engine, on the trace of 27 clients: the production `AdmissionEngine`, and windows
that only count requests, or only read the engine's waiting gauge.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from operator import attrgetter
from statistics import mean

from backends.simulated.engine_model import EngineModel
from backends.simulated.engine_profiles import EngineProfile, profile
from lab.experiment import Experiment, Figure, Findings, Inputs, holds, shown
from lab.lab_driver import simulate
from lab.plots import Series
from lab.simulation_result import SimulationResult
from lab.vtc.known_lengths import KnownLengths
from lab.vtc.runs import arena, measure, serve, step_times, vtc
from lab.vtc.windows import Rule, in_flight, serve_with_rule, starts_now, waiting
from policies.admission.engine import AdmissionEngine
from policies.admission.named import named_policy
from policies.capacity.gauges import CapacitySettings
from policies.capacity.output_lengths import OutputPredictor
from policies.orders.fcfs import Fcfs
from policies.orders.order import Order
from policies.orders.vtc import Vtc
from policies.queue.bounds import QueueLimits
from simulation.run import Arrival

BACKEND = "engine"
NOTHING_EXPIRES = QueueLimits(queue_requests_max=1_000_000, queue_wait_s_max=1e6)
WINDOWS = (8, 16, 20, 24, 32, 48, 64, 128)
WAITING = (0, 1, 2, 4, 8)
CEILINGS = (0.7, 0.8, 0.9, 0.98, 1.05)


@dataclass(frozen=True, slots=True)
class WindowPoint:
    """A way to serve the trace: how far from fair, how fast, and what it costs in preemptions; means over a sweep."""

    gap: float
    tokens_per_s: float
    preemptions: float

    def cell(self) -> str:
        return f"{self.gap:.0f} / {self.tokens_per_s:.0f} / {self.preemptions:.0f}"


def _mean(points: Sequence[WindowPoint]) -> WindowPoint:
    return WindowPoint(
        mean(each.gap for each in points),
        mean(each.tokens_per_s for each in points),
        mean(each.preemptions for each in points),
    )


def _point(run: SimulationResult) -> WindowPoint:
    measured = measure(run)
    preemptions = sum(record.preemptions for record in run.records.values())
    return WindowPoint(measured.difference.avg, measured.tokens_per_s, preemptions)


def _profiles(points: int) -> list[EngineProfile]:
    """The same step times as those of the paper's loop."""
    return [replace(profile("a10g-llama2-7b"), base_s=loop.decode_base_s) for loop in step_times(points)]


def production(
    arrivals: Sequence[Arrival],
    engine_profile: EngineProfile,
    *,
    capacity: CapacitySettings | None = None,
    lengths: OutputPredictor | None = None,
) -> WindowPoint:
    """VTC in the production engine, one millisecond away from a vLLM that it scrapes ten times a second."""
    engine = AdmissionEngine(named_policy("vtc"), limits=NOTHING_EXPIRES, capacity=capacity, lengths=lengths)
    engine.add_backend(BACKEND, max_num_seqs=engine_profile.max_num_seqs)
    return _point(simulate(arrivals, engine=engine, backends={BACKEND: EngineModel(engine_profile)}))


def gateway_window(arrivals: Sequence[Arrival], points: int = 3) -> Findings:
    engines = _profiles(points)
    middle = engines[points // 2]

    def ruled(order: Callable[[], Order], rule: Rule, profiles: Sequence[EngineProfile]) -> WindowPoint:
        return _mean([_point(serve_with_rule(arrivals, order(), each, rule)) for each in profiles])

    paper = _mean([_point(serve(vtc, arrivals, loop=loop)) for loop in step_times(points)])
    inside = ruled(Vtc, starts_now, engines)
    direct = ruled(Fcfs, in_flight(1_000_000), engines)
    ours = _mean([production(arrivals, each) for each in engines])
    known = KnownLengths({arrival.id: float(arrival.output_tokens) for arrival in arrivals})
    informed = _mean([production(arrivals, each, lengths=known) for each in engines])
    windows = {most: ruled(Vtc, in_flight(most), [middle]) for most in WINDOWS}
    targets = {most: ruled(Vtc, waiting(most), [middle]) for most in WAITING}
    ceilings = {share: production(arrivals, middle, capacity=CapacitySettings(kv_ceiling=share)) for share in CEILINGS}
    head = "avg difference / tokens/s / preemptions"
    gap, rate = ours.gap / paper.gap, ours.tokens_per_s / inside.tokens_per_s
    rows = [
        shown(f"VTC in the paper's engine: {head}", "252 / 779 / 0", paper.cell()),
        shown("VTC inside vLLM", "", inside.cell()),
        shown("everything straight to vLLM", "", direct.cell()),
        shown("VTC at the gateway (production engine)", "", ours.cell()),
        shown("the same, with known lengths of answers", "", informed.cell()),
        holds("avg difference, gateway / paper's engine", "", gap, "<= 1.10", gap <= 1.10),
        holds("tokens/s, gateway / inside vLLM", "", rate, ">= 0.98", rate >= 0.98),
        shown("tokens/s, gateway / paper's engine", "", ours.tokens_per_s / paper.tokens_per_s),
        *(shown(f"fixed window of {most}", "", point.cell()) for most, point in windows.items()),
        *(shown(f"while at most {most} wait inside", "", point.cell()) for most, point in targets.items()),
        *(shown(f"production, KV ceiling {share:g}", "", point.cell()) for share, point in ceilings.items()),
    ]
    without = (("fairgate, no window", ours), ("inside vLLM", inside), ("nothing in front", direct))
    gap_of, rate_of = attrgetter("gap"), attrgetter("tokens_per_s")
    figures = [
        Figure(
            name, title, "requests that a fixed window lets into the engine", y_label,
            [
                Series("fixed window", [(most, value(point)) for most, point in windows.items()], dots=True),
                *(Series(label, [(most, value(point)) for most in windows]) for label, point in without),
            ],
        )
        for name, title, y_label, value in (
            ("gateway-window", "How unfair: average difference of service", "weighted tokens", gap_of),
            ("gateway-window-rate", "How fast: tokens per second", "tokens/s", rate_of),
        )
    ]  # fmt: skip
    notes = [
        f"The first five rows are means over {points} step times within 3.5 %, the others single runs. A good fixed "
        "window "
        "depends on the lengths of requests: the average difference is "
        f"{windows[24].gap:.0f} at 24 requests, {windows[64].gap:.0f} at 64, {direct.gap:.0f} without a gateway.",
        f"vLLM does not know how long answers will be, and preempts {inside.preemptions:.0f} requests; the paper's "
        "engine "
        "knows the lengths and preempts none. Without the lengths, the production engine fills the cache to the mean "
        "and a "
        "standard deviation of what will be held; with them it preempts none, but spreads the starts.",
    ]
    return Findings(rows, figures, notes)


def _run(inputs: Inputs) -> Findings:
    return gateway_window(arena(inputs))


GATEWAY_WINDOW = Experiment("gateway-window", "VTC at a gateway: what a window costs (not in the papers)", _run)
