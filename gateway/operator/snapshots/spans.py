"""Who received how much, and who waited, within a span of time?

The sums are made from the remembered ends and from the running and queued requests. So nothing is computed without a
reader.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from math import inf
from typing import NamedTuple

from gateway.telemetry.ends import EndedRequest
from gateway.telemetry.recent_requests import service_of
from gateway.telemetry.record import Outcome
from policies.admission.engine import AdmissionEngine
from policies.queue.bounds import QueueSummary
from policies.request import is_batch, payer


class RunningRequest(NamedTuple):
    """A dispatched request, and the service that it has received up to now."""

    tenant: str
    weight: float
    arrived_s: float
    dispatched_s: float
    service: float
    backend: str = ""


def running(engine: AdmissionEngine) -> list[RunningRequest]:
    """Return the dispatched requests. O(dispatched)."""
    found = []
    for lease in engine.requests.leases.values():
        request = lease.request
        service = service_of(request.progress.charged, request.prompt_tokens, lease.output_tokens)
        flow, arrived_s = request.flow, request.arrived_s
        found.append(RunningRequest(flow.tenant, request.weight, arrived_s, lease.dispatched_s, service, lease.backend))
    return found


class PoolSample(NamedTuple):
    """The requests of one pool at one moment."""

    pool: str
    now: float
    ends: Sequence[EndedRequest]
    """Ends of every pool, the latest first, as far back as the first span begins."""
    running: Sequence[RunningRequest]
    waiting: Mapping[str, QueueSummary]


class UsualService:
    """Mean service of a request, by tenant. Estimates queued requests, whose service nobody knows yet."""

    def __init__(self) -> None:
        self._sums: defaultdict[str, list[float]] = defaultdict(lambda: [0.0, 0.0])
        """Requests and their service, by tenant and under "" of all tenants."""

    def note(self, tenant: str, service: float) -> None:
        if service:
            for each in (self._sums[tenant], self._sums[""]):
                each[0] += 1
                each[1] += service

    def estimate(self, tenant: str, requests: float) -> float:
        """Return the service of this number of requests of a tenant; infinite if no end with a charge is known."""
        count, service = self._sums.get(tenant) or self._sums[""]
        return requests * service / count if count else inf if requests else 0.0


class TenantSums:
    """Service, waits and outcomes of one tenant within one span, and its requests in queue and at engines now."""

    def __init__(self, weight: float) -> None:
        self.weight = weight
        self.received = 0.0
        self.waiting = 0.0
        """Service of the requests that waited at the end of the span, as far as it is known."""
        self.queued_requests = 0
        self.oldest_s = inf
        """Arrival of the request that has waited longest; inf if none waits."""
        self.running_requests = 0
        self.waits_s: list[float] = []
        self.refused_after_s: list[float] = []
        self.first_tokens_s: list[float] = []
        self.outcomes: Counter[str] = Counter()
        self.refused: Counter[str] = Counter()


def sums(sample: PoolSample, since_s: float, until_s: float) -> dict[str, TenantSums]:
    """Return the sums of each tenant of one pool between two times."""
    found: dict[str, TenantSums] = {}
    usual = UsualService()
    for end in sample.ends:
        if end.ended_s <= since_s:
            break
        if end.pool != sample.pool:
            continue
        usual.note(end.tenant, end.service)
        one = found.get(end.tenant) or _add_tenant(found, end.tenant, end.weight)
        one.received += end.service * part_within(since_s, until_s, end.dispatched_s, end.ended_s)
        if end.dispatched_s - end.queue_s < until_s < end.dispatched_s:
            one.waiting += end.service
        if end.ended_s > until_s:
            continue
        one.outcomes[end.outcome] += 1
        if end.outcome == Outcome.REFUSED:
            one.refused[end.reason] += 1
            one.refused_after_s.append(end.queue_s)
        else:
            one.waits_s.append(end.queue_s)
        if end.first_token_s is not None:
            one.first_tokens_s.append(end.first_token_s)
    for each in sample.running:
        name = payer(each.tenant)
        one = found.get(name) or _add_tenant(found, name, each.weight)
        one.weight = each.weight
        one.running_requests += 1
        one.received += each.service * part_within(since_s, until_s, each.dispatched_s, sample.now)
        if each.arrived_s < until_s < each.dispatched_s:
            one.waiting += each.service
    for leaf, waiting in sample.waiting.items():
        name = payer(leaf)
        one = found.get(name) or _add_tenant(found, name, waiting.weight)
        one.weight = waiting.weight
        one.queued_requests += waiting.requests
        one.oldest_s = min(one.oldest_s, waiting.oldest_s)
        if is_batch(leaf):
            continue  # Batch is due what others leave, so it is due what it received.
        # The queue is assumed to have grown evenly, so this part of it had come by then.
        came = waiting.requests * part_within(-inf, until_s, waiting.oldest_s, sample.now)
        one.waiting += usual.estimate(name, came)
    return found


def _add_tenant(found: dict[str, TenantSums], name: str, weight: float) -> TenantSums:
    """Add the sums of a tenant."""
    found[name] = one = TenantSums(weight)
    return one


def due(asked: Mapping[str, tuple[float, float, float]]) -> dict[str, float]:
    """Return the share due to each tenant, from its received service, its weight, and the service that it waits for.

    A tenant that asked for less than its part by weight is due what it asked for. The rest of that part goes to the
    other tenants, by weight. The shares add up to 1; all are 0 as long as no tenant has received anything.
    """
    total = sum(service for service, _, _ in asked.values())
    shares = dict.fromkeys(asked, 0.0)
    if not total:
        return shares
    left, open_ = total, dict(asked)
    while open_:
        weights = sum(weight for _, weight, _ in open_.values())
        content = {
            name: service + waiting
            for name, (service, weight, waiting) in open_.items()
            if (service + waiting) * weights < left * weight
        }
        if not content or len(content) == len(open_):
            for name, (_, weight, _) in open_.items():
                shares[name] = left * weight / weights / total
            break
        for name, service in content.items():
            shares[name] = service / total
            left -= service
            del open_[name]
    return shares


def shares_due(found: Mapping[str, TenantSums]) -> dict[str, float]:
    """Return the share of all received service that is due to each tenant."""
    return due({name: (one.received, one.weight, one.waiting) for name, one in found.items()})


def part_within(since_s: float, until_s: float, begun_s: float, ended_s: float) -> float:
    """Return the part of a service that was received between these times, if it was received evenly."""
    if ended_s <= begun_s:
        return 1.0 if since_s < ended_s <= until_s else 0.0
    return max(0.0, min(until_s, ended_s) - max(since_s, begun_s)) / (ended_s - begun_s)
