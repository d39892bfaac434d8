"""What would this traffic have seen under another policy? The production engine and policies, in virtual time.

The trace decides when requests arrive and how long their answers are. That is an open loop: a client that would have
waited for an answer before it asked again does not do so here.
"""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from backends.simulated.engine_model import EngineModel
from backends.simulated.engine_profiles import EngineProfile
from policies.admission.engine import AdmissionEngine
from policies.admission.named import named_policy
from policies.orders.cost import LinearCost
from policies.orders.policy_entries import POLICIES
from policies.request import ServiceTokens
from simulation.driver import simulate
from simulation.run import IMPOSSIBLE, Arrival, Record
from simulation.statistics import percentile
from simulation.timeline import Timeline
from simulation.traces.reader import Trace

OTHERS = "(others)"
TENANTS_LISTED = 8
TENANTS_COMPARED = 50
"""Tenants with most demand whose shares are compared with each other."""
TICKS = 240
TICK_S_MIN = 0.25
WINDOW_S_MAX = 60.0
WINDOWS = 20


class UnknownPolicyError(ValueError):
    """No policy has this name; the message lists the names that exist."""


def policy_names(text: str) -> list[str]:
    """Names with commas between them, each once. Raises UnknownPolicyError."""
    names = list(dict.fromkeys(name.strip() for name in text.split(",")))
    for name in names:
        if name not in POLICIES:
            raise UnknownPolicyError(f"no policy is named {name!r}; there are: {', '.join(sorted(POLICIES))}")
    return names


@dataclass(frozen=True, slots=True)
class Percentiles:
    p50: float
    p95: float
    p99: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Percentiles | None:
        """None of nothing."""
        ordered = sorted(values)
        return cls(*(percentile(ordered, share) for share in (0.5, 0.95, 0.99))) if ordered else None


@dataclass(frozen=True, slots=True)
class TenantResult:
    """What one tenant saw. `service` is prompt tokens and twice the output tokens; times to first token in seconds."""

    name: str
    weight: float
    requests: int
    completed: int
    service: float
    ttft_s: Percentiles | None


@dataclass(frozen=True, slots=True)
class ReplayResult:
    """What the traffic saw under one policy.

    Attributes:
        backends: before how many engines?
        refused: how many requests, by reason.
        ttft_s: from arrival to first token, over all requests that had one.
        tokens_per_s: prompt and output tokens of the requests that were served, until the last one ended.
        jain: of the service per weight of the tenants that waited, mean over windows in which several did; None:
            there was none.
        gap_max: largest difference of service per weight that two tenants came to while both waited.
        preemptions: requests that an engine threw out to compute again.
        wasted_tokens: spent in interactions that were then cut, as the gateway counts them.
        service: of the tenants with most demand, and of the others: (s, service per second around then).
        gap: (s, difference of service per weight).
        queued: requests that could not be dispatched at once.
    """

    policy: str
    backends: int
    requests: int
    completed: int
    refused: Mapping[str, int]
    ttft_s: Percentiles | None
    tokens_per_s: float
    output_tokens_per_s: float
    jain: float | None
    gap_max: float
    preemptions: int
    wasted_tokens: int
    ended_s: float
    tenants: Sequence[TenantResult]
    service: Mapping[str, Sequence[tuple[float, float]]]
    gap: Sequence[tuple[float, float]]
    queued: int = 0


def replay_under(
    policy: str,
    trace: Trace,
    *profiles: EngineProfile,
    engine: AdmissionEngine | None = None,
    ended: Callable[[], None] = lambda: None,
) -> ReplayResult:
    """Run the trace under one of `POLICIES`, in front of an engine of each profile. Raises TraceError.

    `engine`: an admission engine of that policy that has no backend yet; None: one with the defaults. `ended` is called
    at the end of every request, be it served or refused.
    """
    if engine is None:
        engine = AdmissionEngine(named_policy(policy))
    models = {f"engine-{number}": EngineModel(profile) for number, profile in enumerate(profiles, 1)}
    for name, model in models.items():
        engine.add_backend(name, max_num_seqs=model.profile.max_num_seqs)
    tally = _Tally(trace)

    def finished(record: Record) -> None:
        tally.add(record)
        ended()

    simulate(_possible(trace, profiles[0], finished), engine=engine, backends=models, ended=finished)
    wasted_tokens = sum(waste.tokens for waste in engine.interactions.wasted.values())
    return tally.result(policy, trace, len(profiles), wasted_tokens)


def _possible(trace: Trace, profile: EngineProfile, finished: Callable[[Record], None]) -> Iterator[Arrival]:
    """Requests that fit the model's context; the others end at once, as the gateway refuses them."""
    for arrival in trace.arrivals(profile.block_size):
        room = profile.max_model_len - arrival.prompt_tokens
        if arrival.output_tokens > room or room < 1:
            finished(Record(arrival, finished_s=arrival.arrived_s, outcome=IMPOSSIBLE))
        else:
            yield replace(arrival, output_tokens_max=min(arrival.output_tokens_max, room))


class _Count:
    """What is counted of one tenant, or of all."""

    __slots__ = ("completed", "requests", "service", "ttft_s")

    def __init__(self) -> None:
        self.requests = self.completed = 0
        self.service = 0.0
        self.ttft_s = array("d")

    def add(self, record: Record, service: float) -> None:
        self.requests += 1
        self.completed += record.outcome == "completed"
        self.service += service
        if record.ttft_s is not None:
            self.ttft_s.append(record.ttft_s)


class _Tally:
    """Adds requests up as they end."""

    def __init__(self, trace: Trace) -> None:
        by_demand = sorted(trace.demand, key=lambda tenant: (-trace.demand[tenant], tenant))
        self._compared = by_demand[:TENANTS_COMPARED]
        self._listed = by_demand[:TENANTS_LISTED] if len(by_demand) > TENANTS_LISTED + 1 else by_demand
        self._timeline = Timeline([*self._compared, OTHERS], max(TICK_S_MIN, trace.span_s / TICKS))
        self._all = _Count()
        self._tenants = {tenant: _Count() for tenant in [*self._listed, OTHERS]}
        self._refused: Counter[str] = Counter()
        self._price = LinearCost()
        self._prompt_tokens = self._output_tokens = self._preemptions = self._queued = 0
        self._ended_s = 0.0

    def add(self, record: Record) -> None:
        arrival = record.arrival
        tenant = arrival.flow.tenant
        prompt_tokens = arrival.prompt_tokens if record.dispatched_s is not None else 0
        output_tokens = len(record.token_s)
        service = self._price(ServiceTokens(prompt_tokens, output_tokens))
        self._all.add(record, service)
        self._tenants[tenant if tenant in self._tenants else OTHERS].add(record, service)
        self._timeline.add(tenant if tenant in self._compared else OTHERS, record)
        if record.outcome != "completed":
            self._refused[record.outcome] += 1
        self._prompt_tokens += prompt_tokens
        self._output_tokens += output_tokens
        self._preemptions += record.preemptions
        self._queued += record.outcome != IMPOSSIBLE and record.dispatched_s != arrival.arrived_s
        self._ended_s = max(self._ended_s, record.finished_s or 0.0)

    def result(self, policy: str, trace: Trace, backends: int, wasted_tokens: int) -> ReplayResult:
        weights = {**trace.weights, OTHERS: 1.0}
        window_s = min(WINDOW_S_MAX, trace.span_s / WINDOWS)
        gap = self._timeline.gaps({tenant: weights[tenant] for tenant in self._compared})
        rates = {tenant: self._timeline.rates(tenant, window_s) for tenant in [*self._compared, OTHERS]}
        service = {tenant: rates[tenant] for tenant in self._listed}
        if self._tenants[OTHERS].requests:
            rest = [course for tenant, course in rates.items() if tenant not in service]
            service[OTHERS] = [(course[0][0], sum(rate for _, rate in course)) for course in zip(*rest, strict=True)]
        return ReplayResult(
            policy,
            backends,
            requests=self._all.requests,
            completed=self._all.completed,
            refused=dict(sorted(self._refused.items())),
            ttft_s=Percentiles.of(self._all.ttft_s),
            tokens_per_s=self._per_s(self._prompt_tokens + self._output_tokens),
            output_tokens_per_s=self._per_s(self._output_tokens),
            jain=self._timeline.jain(weights, window_s),
            gap_max=max((value for _, value in gap), default=0.0),
            preemptions=self._preemptions,
            wasted_tokens=wasted_tokens,
            ended_s=self._ended_s,
            tenants=[
                TenantResult(
                    name, weights[name], count.requests, count.completed, count.service, Percentiles.of(count.ttft_s)
                )
                for name, count in self._tenants.items()
                if count.requests
            ],
            service=service,
            gap=gap,
            queued=self._queued,
        )

    def _per_s(self, tokens: int) -> float:
        return tokens / self._ended_s if self._ended_s else 0.0
