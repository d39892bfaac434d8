"""Agents that overfill the KV cache, with the working set and without it: rows of `python -m bench.virtual`.

Both are the same code and the same agents: without it, the order holds no start. The engines are an 8B model on an H100
as measured, and a 70B model on four of them by assumption (10,000 prompt tokens a second, 18 ms a step).

Each run is also a line of JSON, so that those of two commits can be compared.
"""

import gzip
import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from statistics import fmean
from typing import Any
from zlib import crc32

from backends.simulated.engine_model import EngineModel
from backends.simulated.engine_profiles import EngineProfile, profile
from bench.report import quantile
from bench.sessions import TRACE
from lab.agents import CONTEXT_TOKENS, Agents, Calls, Crowd, Questions
from lab.several_gateways import simulate_together
from policies.admission.engine import AdmissionEngine
from policies.admission.named import named_policy
from policies.queue.bounds import QueueLimits
from simulation.run import Arrival, Record
from tests.simulation.replicas import SimulatedStore

TRACES = Path(__file__).parents[2] / "shared" / "traces"
RECORDED_TOKENS_PER_S = 60.0
DROPPED = 0.25
"""Part of the time at the beginning that is not counted."""
SMALL, LARGE = "8B", "70B"
HEADS = [
    "", "tasks an hour", "calls/s", "cached", "first token inside, p50 / p95", "of starts", "of chat", "service/s",
    "preempted", "refused",
]  # fmt: skip


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
    """The setting of one row: engines, agents and policy."""

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
    is_recorded: bool = False
    """The interactions are those of `bench.sessions.TRACE`."""
    patience_s: float = 1e5
    gateways: int = 1
    """Number of gateways. With several, all agents of one tenant are at the first, the other tenant's at the rest."""

    def gateway_of(self, arrival: Arrival, now: float) -> int:
        """Where this arrives."""
        if self.gateways == 1 or arrival.flow.tenant == "a":
            return 0
        return 1 + crc32(arrival.flow.user.encode()) % (self.gateways - 1)

    def groups(self) -> list[Agents | Questions]:
        """Two tenants of as many agents, and who else there is."""
        recorded = recorded_calls() if self.is_recorded else ()
        prompts = [prompt for calls in recorded for prompt, _, _ in calls]
        context_tokens = fmean(prompts) if prompts else CONTEXT_TOKENS
        each = max(1, round(self.times * self.engines * self.kv_tokens / context_tokens / 2))
        agents = [
            Agents(name, each, weight=weight, pause_s=self.pause_s, streamed=self.streams, recorded=recorded)
            for name, weight in zip("ab", self.weights, strict=True)
        ]
        return [*agents, *self.beside]


def recorded_calls() -> tuple[Calls, ...]:
    """The recorded interactions. The recorded times between two calls include the answers, which are taken to have come
    at `RECORDED_TOKENS_PER_S`. Prompts do not shrink. Raises OSError.
    """
    sessions: dict[str, list[dict[str, Any]]] = {}
    with gzip.open(TRACES / TRACE, "rt") as lines:
        for row in map(json.loads, lines):
            sessions.setdefault(f"{row['app']}/{row['session']}", []).append(row)
    found = []
    for rows in sessions.values():
        calls, longest = [], 0
        for row, following in zip(rows, [*rows[1:], rows[-1]], strict=True):
            longest = max(longest, row["est_input_tokens"])
            output = max(1, row["est_output_tokens"])
            calls.append((longest, output, max(0.0, following["t_s"] - row["t_s"] - output / RECORDED_TOKENS_PER_S)))
            longest += output
        found.append(tuple(calls))
    return tuple(found)


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
    *[Row(f"recorded, 8B, {times:g}x", SMALL, 400_000, times, is_recorded=True) for times in (1, 2)],
    *[Row(f"three gateways, skewed, {model}, 2x", model, 120_000, 2, gateways=3) for model in (LARGE, SMALL)],
    *[Row(f"patience of a minute, {model}, 4x", model, 120_000, 4, patience_s=60.0) for model in (LARGE, SMALL)],
]


@dataclass
class Found:
    """The counts of one run."""

    seconds: float
    tasks: int = 0
    calls: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    inside_s: list[float] = field(default_factory=list)
    starts_s: list[float] = field(default_factory=list)
    chat_s: list[float] = field(default_factory=list)
    service: dict[str, float] = field(default_factory=dict)
    """In the order's own unit: a cached token is a tenth."""
    whole_service: dict[str, float] = field(default_factory=dict)
    """The same with each prompt token in full, cached or not: what the clients see."""
    preemptions: int = 0
    refused: Counter[str] = field(default_factory=Counter)
    """Refused requests by reason."""
    came_back: list[tuple[float, float, int]] = field(default_factory=list)
    """As `Crowd.came_back`."""
    queued: int = 0
    """Waiting at the end. Those who wait longest are in no percentile yet."""

    def note(self, record: Record) -> None:
        """A request has ended within the time that counts."""
        arrival, first_s = record.arrival, record.ttft_s
        self.preemptions += record.preemptions
        if record.outcome != "completed" or first_s is None:
            self.refused[record.outcome] += 1
            return
        tenant, whole = arrival.flow.tenant, arrival.prompt_tokens + 2 * len(record.token_s)
        self.whole_service[tenant] = self.whole_service.get(tenant, 0.0) + whole
        self.service[tenant] = self.service.get(tenant, 0.0) + whole - 0.9 * record.cached_tokens
        if arrival.flow.app == "chat":
            self.chat_s.append(first_s)
            return
        self.calls += 1
        self.prompt_tokens += arrival.prompt_tokens
        self.cached_tokens += record.cached_tokens
        (self.starts_s if ".0." in arrival.id else self.inside_s).append(first_s)

    def numbers(self) -> dict[str, Any]:
        """All that was counted, per hour and second."""
        numbers = {
            "tasks_per_h": self.tasks / self.seconds * 3600,
            "calls_per_s": self.calls / self.seconds,
            "cached": self.cached_tokens / max(1, self.prompt_tokens),
        }
        for name, values in (("inside", self.inside_s), ("starts", self.starts_s), ("chat", self.chat_s)):
            if values:
                numbers |= {f"{name}_p50_s": quantile(values, 0.5), f"{name}_p95_s": quantile(values, 0.95)}
        per_s = [
            {tenant: round(tokens / self.seconds) for tenant, tokens in sorted(tokens_of.items())}
            for tokens_of in (self.service, self.whole_service)
        ]
        return {name: round(value, 3) for name, value in numbers.items()} | {
            "service_per_s": per_s[0],
            "whole_service_per_s": per_s[1],
            "preemptions": self.preemptions,
            "retry_after_right": round(
                sum(0.75 <= took_s / retry_after_s <= 1.25 for retry_after_s, took_s, _ in self.came_back)
                / max(1, len(self.came_back)),
                3,
            ),
            "in_at_first_return": round(
                sum(tries == 1 for *_, tries in self.came_back) / max(1, len(self.came_back)), 3
            ),
            "came_back": len(self.came_back),
            "refused": dict(sorted(self.refused.items())),
            "queued": self.queued,
        }

    def cells(self) -> list[str]:
        """As the table has them."""
        numbers = self.numbers()
        return [
            f"{numbers['tasks_per_h']:.0f}",
            f"{numbers['calls_per_s']:.2f}",
            f"{numbers['cached']:.2f}",
            *[times(values) for values in (self.inside_s, self.starts_s, self.chat_s)],
            " : ".join(f"{tenant} {tokens}" for tenant, tokens in numbers["service_per_s"].items()),
            str(self.preemptions),
            ", ".join(f"{reason} {count}" for reason, count in sorted(self.refused.items())),
        ]


def times(values: list[float]) -> str:
    """Median and 95th percentile."""
    return f"{quantile(values, 0.5):.2f} / {quantile(values, 0.95):.1f} s" if values else ""


def run(row: Row, seed: int, until_s: float, *, holds: bool, steps: bool = False, policy: str = "fairserve") -> Found:
    """`holds`: starts wait for the working set. `steps`: the engines report each step."""
    engine_like = engine_profile(row.model, row.kv_tokens)
    limits = QueueLimits(queue_wait_s_max=row.patience_s, queue_wait_s_max_inside=1e6)
    models = {f"engine-{number}": EngineModel(engine_like) for number in range(row.engines)}
    gateways = [AdmissionEngine(named_policy(policy), limits=limits) for _ in range(row.gateways)]
    for engine in gateways:
        if not holds:
            engine.working_set.first_start = None
        for name in models:
            engine.add_backend(name, max_num_seqs=engine_like.max_num_seqs)
    from_s = DROPPED * until_s
    found, crowd = Found(until_s - from_s), Crowd(row.groups(), seed=seed, until_s=until_s)

    def ended(record: Record) -> None:
        if record.finished_s is not None and record.finished_s >= from_s:
            found.note(record)

    simulate_together(
        crowd.arrivals(), engines=gateways, backends=models, next_arrival=crowd.next_arrival,
        ended=ended, steps=steps, until_s=until_s, arrives_at=row.gateway_of,
        store=SimulatedStore() if row.gateways > 1 else None,
    )  # fmt: skip
    found.tasks = sum(end_s >= from_s for _, _, end_s in crowd.finished)
    found.queued, found.came_back = sum(engine.queued for engine in gateways), crowd.came_back
    return found


def rows(names: str, seeds: Sequence[int], until_s: float, policy: str = "fairserve") -> list[list[str]]:
    """The rows whose name has this in it, with the working set and, where the order holds starts, without."""
    found = []
    both = (True, False) if named_policy(policy).order.admits_wholes else (False,)
    for row in ROWS:
        if names not in row.name:
            continue
        for seed in seeds:
            for holds in both:
                one = run(row, seed, until_s, holds=holds, policy=policy)
                found.append([f"{row.name}, seed {seed}, {'with' if holds else 'without'}", *one.cells()])
                what = {"row": row.name, "policy": policy, "seed": seed, "seconds": until_s, "holds": holds}
                print(json.dumps(what | one.numbers()), flush=True)
    return found
