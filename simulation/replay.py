"""Replay of a trace under other policies, by the production engine in virtual time.

The trace fixes arrivals and answer lengths. This is an open loop: a client that would wait for an answer before its
next request does not wait here.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

from backends.simulated.engine_model import EngineModel
from backends.simulated.engine_profiles import EngineProfile
from policies.admission.engine import AdmissionEngine
from policies.admission.named import named_policy
from policies.orders.cost import LinearCost
from policies.orders.policy_entries import POLICIES
from policies.request import ServiceTokens
from simulation.driver import Driver, SimulatedGateway
from simulation.run import IMPOSSIBLE, Arrival, Record
from simulation.statistics import quantiles
from simulation.timeline import Timeline
from simulation.traces.reader import Trace

OTHERS = "(others)"
TENANTS_KNOWN = 1000
"""Tenants of most demand that are reported separately."""
TENANTS_LISTED = 8
TENANTS_COMPARED = 50
"""Tenants of most demand whose shares are compared."""
TICKS = 240
TICK_S_MIN = 0.25
WINDOW_S_MAX = 60.0
WINDOWS = 20


class UnknownPolicyError(ValueError):
    """An unknown name of a policy. The message lists the names that exist."""


def policy_names(text: str) -> list[str]:
    """Return comma-separated policy names, each once. Raise UnknownPolicyError."""
    names = list(dict.fromkeys(name.strip() for name in text.split(",")))
    for name in names:
        if name not in POLICIES:
            raise UnknownPolicyError(f"no policy is named {name!r}; there are: {', '.join(sorted(POLICIES))}")
    return names


@dataclass(slots=True)
class TenantResult:
    """Results of one tenant. `service` is prompt tokens plus twice the output tokens; times to first token are in
    seconds."""

    name: str
    weight: float
    requests: int = 0
    completed: int = 0
    service: float = 0.0
    ttft_s: dict[str, float] | None = None


@dataclass(slots=True)
class ReplayResult:
    """Results of all traffic under one policy.

    Attributes:
        backends: number of engines.
        refused: number of requests that did not complete, by outcome.
        ttft_s: from arrival to first token, over all requests that had one.
        tokens_per_s: prompt and output tokens of served requests, until the last one ended.
        jain: index of the waiting tenants' service per weight, mean over windows in which several waited; None without
            one. Tenants beyond the 50 with most demand count as one tenant of weight 1.
        gap_max: largest difference of service per weight that two of those 50 tenants reached while both waited.
        preemptions: number of preemptions inside engines, each for recomputation.
        wasted_tokens: spent in interactions that were then aborted, as the gateway counts them.
        service: of the tenants with most demand, and of the others: (s, service per second around then).
        gap: (s, difference of service per weight).
        queued: requests that could not be dispatched at once.
    """

    policy: str
    backends: int
    requests: int = 0
    completed: int = 0
    refused: dict[str, int] = field(default_factory=dict)
    ttft_s: dict[str, float] | None = None
    tokens_per_s: float = 0.0
    output_tokens_per_s: float = 0.0
    jain: float | None = None
    gap_max: float = 0.0
    preemptions: int = 0
    wasted_tokens: int = 0
    ended_s: float = 0.0
    tenants: Sequence[TenantResult] = ()
    service: Mapping[str, Sequence[tuple[float, float]]] = field(default_factory=dict)
    gap: Sequence[tuple[float, float]] = ()
    queued: int = 0


def replay_under(
    policy: str,
    trace: Trace,
    *profiles: EngineProfile,
    engine: AdmissionEngine | None = None,
    ended: Callable[[], None] = lambda: None,
) -> ReplayResult:
    """Run the trace under one of `POLICIES`, in front of an engine of each profile. Raise TraceError.

    Args:
        engine: an admission engine of that policy without backends; None creates one with the defaults.
        ended: called at the end of every request, served or refused.
    """
    if engine is None:
        engine = AdmissionEngine(named_policy(policy))
    models = {f"engine-{number}": EngineModel(profile) for number, profile in enumerate(profiles, 1)}
    for name, model in models.items():
        engine.add_backend(name, max_num_seqs=model.profile.max_num_seqs)
    tally = _Tally(trace, ReplayResult(policy, len(profiles)))

    def finished(record: Record) -> None:
        tally.add(record)
        ended()

    driver = Driver([SimulatedGateway(0, engine)], models, ended=finished)
    driver.run(_possible(trace, profiles[0], finished))
    result = tally.summed_up(trace)
    result.wasted_tokens = engine.interactions.wasted_tokens
    return result


def _possible(trace: Trace, profile: EngineProfile, finished: Callable[[Record], None]) -> Iterator[Arrival]:
    """Yield requests that fit the model's context. Others end at once, as the gateway refuses them."""
    for arrival in trace.arrivals(profile.block_size):
        room = profile.max_model_len - arrival.prompt_tokens
        if arrival.output_tokens > room or room < 1:
            finished(Record(arrival, finished_s=arrival.arrived_s, outcome=IMPOSSIBLE))
        else:
            yield replace(arrival, output_tokens_max=min(arrival.output_tokens_max, room))


class _Tally:
    """Totals over ended requests."""

    def __init__(self, trace: Trace, result: ReplayResult) -> None:
        by_demand = sorted(trace.demand, key=lambda tenant: (-trace.demand[tenant], tenant))
        self._compared = by_demand[:TENANTS_COMPARED]
        self._listed = by_demand[:TENANTS_LISTED] if len(by_demand) > TENANTS_LISTED + 1 else by_demand
        self._timeline = Timeline([*self._compared, OTHERS], max(TICK_S_MIN, trace.span_s / TICKS))
        self._result = result
        self._ttft_s = array("d")
        self._weights = {**trace.weights, OTHERS: 1.0}
        self._tenants = {
            tenant: (TenantResult(tenant, self._weights[tenant]), array("d"))
            for tenant in [*by_demand[:TENANTS_KNOWN], OTHERS]
        }
        self._price = LinearCost()
        self._prompt_tokens = self._output_tokens = 0

    def add(self, record: Record) -> None:
        arrival, result = record.arrival, self._result
        tenant = arrival.flow.tenant
        prompt_tokens = arrival.prompt_tokens if record.dispatched_s is not None else 0
        output_tokens = len(record.token_s)
        one, ttft_s = self._tenants[tenant if tenant in self._tenants else OTHERS]
        one.service += self._price(ServiceTokens(prompt_tokens, output_tokens))
        counts: list[tuple[ReplayResult | TenantResult, array[float]]] = [(result, self._ttft_s), (one, ttft_s)]
        for count, times_s in counts:
            count.requests += 1
            count.completed += record.outcome == "completed"
            if record.ttft_s is not None:
                times_s.append(record.ttft_s)
        self._timeline.add(tenant if tenant in self._compared else OTHERS, record)
        if record.outcome != "completed":
            result.refused[record.outcome] = result.refused.get(record.outcome, 0) + 1
        self._prompt_tokens += prompt_tokens
        self._output_tokens += output_tokens
        result.preemptions += record.preemptions
        result.queued += record.outcome != IMPOSSIBLE and record.dispatched_s != arrival.arrived_s
        result.ended_s = max(result.ended_s, record.finished_s or 0.0)

    def summed_up(self, trace: Trace) -> ReplayResult:
        """Return the results after the end of all requests."""
        result, window_s = self._result, min(WINDOW_S_MAX, trace.span_s / WINDOWS)
        weights = {tenant: self._weights[tenant] for tenant in self._compared}
        result.gap = self._timeline.gaps(weights)
        result.gap_max = max((value for _, value in result.gap), default=0.0)
        result.jain = self._timeline.jain(weights, window_s)
        rates = {tenant: self._timeline.rates(tenant, window_s) for tenant in [*self._compared, OTHERS]}
        service = {tenant: rates[tenant] for tenant in self._listed}
        if len(trace.demand) > len(self._listed):
            rest = [course for tenant, course in rates.items() if tenant not in service]
            service[OTHERS] = [(course[0][0], sum(rate for _, rate in course)) for course in zip(*rest, strict=True)]
        result.service = service
        result.refused = dict(sorted(result.refused.items()))
        result.ttft_s = quantiles(self._ttft_s, 50, 95, 99)
        result.tokens_per_s = self._per_s(self._prompt_tokens + self._output_tokens)
        result.output_tokens_per_s = self._per_s(self._output_tokens)
        for one, ttft_s in self._tenants.values():
            one.ttft_s = quantiles(ttft_s, 50, 95, 99)
        result.tenants = [one for one, _ in self._tenants.values() if one.requests]
        return result

    def _per_s(self, tokens: int) -> float:
        return tokens / self._result.ended_s if self._result.ended_s else 0.0
