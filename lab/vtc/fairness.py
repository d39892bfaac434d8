"""How far from fair was a run? The measures of "Fairness in Serving LLMs" (OSDI'24, section 5.1), as it computes them.

The service of a request is spread evenly from its first token to its last, the prompt's share included. An online count
(`lab.service.service`) charges the prompt at dispatch, and so shows other curves.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import NamedTuple

from policies.orders.cost import Cost, LinearCost
from policies.request import ServiceTokens
from simulation.run import Record

LINEAR = LinearCost()
WINDOW_S = 60.0
WARMUP_S = 30.0
TICKS = 20


class Served(NamedTuple):
    """A request of a run, by times from the run's start, in seconds. A rejected request has no times."""

    client: str
    input_tokens: int
    output_tokens: int
    arrived_s: float
    first_token_s: float | None
    finished_s: float | None


@dataclass(frozen=True, slots=True)
class Discrepancy:
    """Service difference in weighted tokens per second: its largest and mean value over the ticks, and its variance."""

    max: float
    avg: float
    var: float


def served(records: Iterable[Record]) -> list[Served]:
    """Return each request of a simulated run that was completed or rejected."""
    return [
        Served(
            record.arrival.flow.tenant, record.arrival.prompt_tokens, record.arrival.output_tokens,
            record.arrival.arrived_s, record.token_s[0] if record.token_s else None,
            record.finished_s if record.token_s else None,
        )
        for record in records
    ]  # fmt: skip


def discrepancy(requests: Collection[Served], *, cost: Cost = LINEAR, end_s: float = 600.0) -> Discrepancy:
    """The "service difference" of tables 2 to 6.

    At each tick, over the minute that follows, s_i is what client i receives and r_i what it asks for, both per second:
    sum over i of min(max_k s_k - s_i, |r_i - s_i|). So a client that asks for little does not lack more than that.
    What is asked for always has the linear cost. An arrival at either end of the minute counts, as in the artifact.
    """
    clients = sorted({request.client for request in requests})
    tick_s = (end_s - WARMUP_S) / TICKS
    differences = []
    for tick in range(1, TICKS):
        begin_s = tick_s * tick
        rates = dict.fromkeys(clients, 0.0)
        asked = dict(rates)
        for request in requests:
            if request.finished_s is None:
                continue
            rates[request.client] += _received(request, begin_s, begin_s + WINDOW_S, cost) / WINDOW_S
            if begin_s <= request.arrived_s <= begin_s + WINDOW_S:  # both ends, as in the artifact
                asked[request.client] += LINEAR(_tokens(request)) / WINDOW_S
        most = max(rates.values(), default=0.0)
        differences.append(sum(min(most - rates[one], abs(asked[one] - rates[one])) for one in clients))
    mean = sum(differences) / len(differences)
    return Discrepancy(max(differences), mean, sum((each - mean) ** 2 for each in differences) / len(differences))


def received(requests: Iterable[Served], begin_s: float, end_s: float, *, cost: Cost = LINEAR) -> dict[str, float]:
    """Service of each client in [begin, end)."""
    total: dict[str, float] = {}
    for request in requests:
        total.setdefault(request.client, 0.0)
        if request.finished_s is not None:
            total[request.client] += _received(request, begin_s, end_s, cost)
    return total


def service_rate(requests: Iterable[Served], begin_s: float, end_s: float) -> dict[str, float]:
    """Service per second of each client in [begin, end)."""
    return {client: amount / (end_s - begin_s) for client, amount in received(requests, begin_s, end_s).items()}


def accumulated_gap(
    requests: Sequence[Served], *, end_s: float = 600.0, step_s: float = 5.0
) -> list[tuple[float, float]]:
    """(time, most minus least service that any client has received until then): theorem 4.4 bounds it by 2U."""
    times = [step_s * step for step in range(1, int(end_s / step_s) + 1)]
    steps: dict[str, list[float]] = {request.client: [] for request in requests}
    for time in times:
        for client, amount in received(requests, time - step_s, time).items():
            steps[client].append(amount)
    courses = [list(accumulate(amounts)) for amounts in steps.values()]
    return [(time, max(each) - min(each)) for time, each in zip(times, zip(*courses, strict=True), strict=True)]


def backlogged_gap(records: Iterable[Record]) -> float:
    """Largest difference, per weight, between what two tenants received while both had requests waiting all the time.

    Exact: prompts count at dispatch, output tokens as they come. It is this that theorem 4.4 bounds by 2U.
    """
    events: list[tuple[float, int, str, float]] = []
    for record in records:
        arrival = record.arrival
        tenant = arrival.flow.tenant
        events.append((arrival.arrived_s, _CAME, tenant, 0.0))
        if record.dispatched_s is None:
            events.append((record.finished_s or arrival.arrived_s, _LEFT, tenant, 0.0))
            continue
        events.append(
            (record.dispatched_s, _LEFT, tenant, LINEAR.input_weight * arrival.prompt_tokens / arrival.weight)
        )
        events += [(time, _TOKEN, tenant, LINEAR.output_weight / arrival.weight) for time in record.token_s]
    return _largest_drift(sorted(events))


_CAME, _LEFT, _TOKEN = range(3)


def _largest_drift(events: Iterable[tuple[float, int, str, float]]) -> float:
    """Over all pairs and intervals in which both wait: how far their difference moves."""
    waiting: dict[str, int] = {}
    total: dict[str, float] = {}
    extremes: dict[tuple[str, str], tuple[float, float]] = {}
    largest = 0.0
    for _, kind, tenant, amount in events:
        total[tenant] = total.get(tenant, 0.0) + amount
        before = waiting.get(tenant, 0)
        waiting[tenant] = before + (kind == _CAME) - (kind == _LEFT)
        if not waiting[tenant] and not before:
            continue
        for other, count in waiting.items():
            if other == tenant or not count:
                continue
            pair = (tenant, other) if tenant < other else (other, tenant)
            difference = total[pair[0]] - total[pair[1]]
            low, high = extremes.get(pair, (difference, difference)) if before else (difference, difference)
            extremes[pair] = low, high = min(low, difference), max(high, difference)
            largest = max(largest, high - low)
            if not waiting[tenant]:
                del extremes[pair]
    return largest


def ttft_mean_s(requests: Iterable[Served], begin_s: float = 0.0, end_s: float = float("inf")) -> dict[str, float]:
    """Mean time to the first token of each client's requests, over those whose first token falls in [begin, end)."""
    times: dict[str, list[float]] = {}
    for request in requests:
        if request.first_token_s is not None and begin_s <= request.first_token_s < end_s:
            times.setdefault(request.client, []).append(request.first_token_s - request.arrived_s)
    return {client: sum(each) / len(each) for client, each in times.items()}


def tokens_per_s(requests: Iterable[Served], total_s: float) -> float:
    """Input and output tokens of all that were not rejected, over the time the run took."""
    return sum(each.input_tokens + each.output_tokens for each in requests if each.finished_s is not None) / total_s


def _tokens(request: Served) -> ServiceTokens:
    return ServiceTokens(request.input_tokens, request.output_tokens)


def _received(request: Served, begin_s: float, end_s: float, cost: Callable[[ServiceTokens], float]) -> float:
    first_s, last_s = request.first_token_s, request.finished_s
    if first_s is None or last_s is None or first_s >= end_s or last_s < begin_s:
        return 0.0
    if last_s == first_s:
        return cost(_tokens(request))
    share = (min(last_s, end_s) - max(first_s, begin_s)) / (last_s - first_s)
    return cost(_tokens(request)) * share
