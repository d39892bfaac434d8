"""Agents that overfill the KV cache, with the working set and without it: rows of `python -m bench.virtual`.

Both are the same code and the same agents: without it, the order holds no start. The engines are an 8B model on an H100
as measured, and a 70B model on four of them by assumption (10,000 prompt tokens a second, 18 ms a step).
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from statistics import quantiles

from backends.simulated.engine import EngineModel
from backends.simulated.profiles import EngineProfile, profile
from policies.admission.engine import AdmissionEngine
from policies.admission.named import named_policy
from policies.queue.bounds import QueueLimits
from simulation.driver import simulate
from simulation.run import Record
from simulation.workloads.agents import CONTEXT_TOKENS, Agents, Crowd, Questions

__all__ = ["HEADS", "rows"]

PATIENT = QueueLimits(wait_s_max=1e5, wait_s_max_inside=1e5)
DROPPED = 0.25
"""Part of the time at the beginning that is not counted."""
SMALL, LARGE = "8B", "70B"
HEADS = ["", "tasks an hour", "calls/s", "cached", "first token inside", "p95 of starts", "chat p50 / p95", "service"]


def engine_profile(model: str, kv_tokens: int) -> EngineProfile:
    """An engine with so much KV."""
    small = replace(
        profile("h100-llama3.1-8b"), num_gpu_blocks=kv_tokens // 16 + 1, max_model_len=min(kv_tokens, 65_536)
    )
    if model == SMALL:
        return small
    return replace(
        small, base_s=18e-3, per_prefill_token_s=1e-4, per_seq_s=3e-5, per_context_token_s=3e-8,
        max_num_batched_tokens=2048,
    )  # fmt: skip


@dataclass(frozen=True)
class Row:
    """What runs where?"""

    name: str
    model: str
    kv_tokens: int
    times: float
    """Agents times their mean context over the KV of all engines."""
    engines: int = 1
    pause_s: float = 2.0
    streams: bool = True
    weights: tuple[float, float] = (1.0, 1.0)
    beside: tuple[Questions, ...] = ()

    def groups(self) -> list[Agents | Questions]:
        """Two tenants of as many agents, and who else there is."""
        each = max(1, round(self.times * self.engines * self.kv_tokens / CONTEXT_TOKENS / 2))
        agents = [
            Agents(name, each, weight=weight, pause_s=self.pause_s, streamed=self.streams)
            for name, weight in zip("ab", self.weights, strict=True)
        ]
        return [*agents, *self.beside]


CHAT, FLOOD = Questions("chat", per_s=1.0), Questions("flood", clients=60)
ROWS = [
    *[
        Row(f"{model}, {kv // 1000}k, {times:g}x", model, kv, times)
        for model, kv in ((LARGE, 120_000), (SMALL, 120_000), (LARGE, 450_000), (SMALL, 400_000))
        for times in ((0.5, 1, 2, 4) if kv == 120_000 else (1, 2))
    ],
    *[Row(f"three engines, {model}, 2x", model, 120_000, 2, engines=3) for model in (LARGE, SMALL)],
    *[Row(f"chat beside, {model}, 2x", model, 120_000, 2, beside=(CHAT,)) for model in (LARGE, SMALL)],
    *[Row(f"flood beside, {model}, 2x", model, 120_000, 2, beside=(FLOOD,)) for model in (LARGE, SMALL)],
    *[Row(f"weights 4:1, {model}, 4x", model, 120_000, 4, weights=(4.0, 1.0)) for model in (LARGE, SMALL)],
    *[
        Row(f"pauses of {pause:g} s, {model}, 2x", model, 120_000, 2, pause_s=pause)
        for pause in (10.0, 30.0)
        for model in (LARGE, SMALL)
    ],
]


@dataclass
class Found:
    """What was counted of one run."""

    seconds: float
    tasks: int = 0
    calls: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    inside_s: list[float] = field(default_factory=list)
    starts_s: list[float] = field(default_factory=list)
    chat_s: list[float] = field(default_factory=list)
    service: dict[str, float] = field(default_factory=dict)
    """In the order's own unit, per second: a cached token is a tenth."""

    def note(self, record: Record) -> None:
        """A request has ended within the time that counts."""
        arrival, first_s = record.arrival, record.ttft_s
        if record.outcome != "completed" or first_s is None:
            return
        computed = arrival.prompt_tokens - 0.9 * record.cached_tokens
        tenant = arrival.flow.tenant
        self.service[tenant] = self.service.get(tenant, 0.0) + computed + 2 * len(record.token_s)
        if arrival.flow.app == "chat":
            self.chat_s.append(first_s)
            return
        self.calls += 1
        self.prompt_tokens += arrival.prompt_tokens
        self.cached_tokens += record.cached_tokens
        (self.starts_s if ".0." in arrival.id else self.inside_s).append(first_s)

    def cells(self) -> list[str]:
        """As the table has them."""
        service = " : ".join(f"{name} {tokens / self.seconds:.0f}" for name, tokens in sorted(self.service.items()))
        return [
            f"{self.tasks / self.seconds * 3600:.0f}",
            f"{self.calls / self.seconds:.2f}",
            f"{self.cached_tokens / max(1, self.prompt_tokens):.2f}",
            f"{part(self.inside_s, 50):.2f} s",
            f"{part(self.starts_s, 95):.0f} s",
            f"{part(self.chat_s, 50):.2f} / {part(self.chat_s, 95):.1f} s" if self.chat_s else "",
            service,
        ]


def part(values: list[float], percent: int) -> float:
    """This percentile of the values."""
    return quantiles(values, n=100)[percent - 1] if len(values) > 1 else 0.0


def run(row: Row, seed: int, until_s: float, *, holds: bool, steps: bool = False) -> Found:
    """`holds`: starts wait for the working set. `steps`: the engines report each step."""
    engine_like = engine_profile(row.model, row.kv_tokens)
    engine = AdmissionEngine(named_policy("fairserve", engines=row.engines), limits=PATIENT)
    if not holds:
        engine.working_set.is_ahead = None
    models = {f"engine-{number}": EngineModel(engine_like) for number in range(row.engines)}
    for name in models:
        engine.add_backend(name, max_num_seqs=engine_like.max_num_seqs)
    from_s = DROPPED * until_s
    found, crowd = Found(until_s - from_s), Crowd(row.groups(), seed=seed, until_s=until_s)

    def ended(record: Record) -> None:
        if record.finished_s is not None and record.finished_s >= from_s:
            found.note(record)

    simulate(
        crowd.arrivals(), engine=engine, backends=models, next_arrival=crowd.next_arrival, ended=ended, steps=steps,
        until_s=until_s,
    )  # fmt: skip
    found.tasks = sum(end_s >= from_s for _, _, end_s in crowd.finished)
    return found


def rows(names: str, seeds: Sequence[int], until_s: float) -> list[list[str]]:
    """The rows whose name has this in it, with the working set and without."""
    found = []
    for row in ROWS:
        if names not in row.name:
            continue
        for seed in seeds:
            for holds in (True, False):
                label = f"{row.name}, seed {seed}, {'with' if holds else 'without'}"
                found.append([label, *run(row, seed, until_s, holds=holds).cells()])
                print("  " + ", ".join(found[-1]), flush=True)
    return found
