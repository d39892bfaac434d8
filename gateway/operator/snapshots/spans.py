"""How was it within a span of time? Each point of what the page draws over time.

A point is made from the ends that are remembered, and from what runs and waits at the moment. So nothing is kept while
nobody looks, and who begins to look sees the last minute all the same.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Container, Mapping, Sequence
from math import inf
from typing import Any, Final, NamedTuple

from gateway.telemetry.ends import End
from gateway.telemetry.recent_requests import service_of
from gateway.telemetry.record import Outcome
from policies.admission.engine import AdmissionEngine
from policies.queue.bounds import Waiting
from policies.request import is_batch, payer

SPAN_S: Final = 5.0


class Running(NamedTuple):
    """One dispatched request, and what it has received so far."""

    tenant: str
    weight: float
    arrived_s: float
    dispatched_s: float
    service: float
    backend: str = ""


def running(engine: AdmissionEngine, of: str = "") -> list[Running]:
    """What is dispatched just now, of one tenant or of all. O(dispatched)."""
    found = []
    for lease in engine.requests.leases.values():
        request = lease.request
        if of and payer(request.flow.tenant) != of:
            continue
        service = service_of(request.progress.charged, request.prompt_tokens, lease.output_tokens)
        flow, arrived_s = request.flow, request.arrived_s
        found.append(Running(flow.tenant, request.weight, arrived_s, lease.dispatched_s, service, lease.backend))
    return found


class Taken(NamedTuple):
    """One pool at one moment."""

    pool: str
    now: float
    ends: Sequence[End]
    """Of every pool, the latest first, as far back as the first span begins."""
    running: Sequence[Running]
    waiting: Mapping[str, Waiting]


class Usual:
    """How much service does a request usually receive? For waiting requests: nobody knows yet what they will
    receive."""

    def __init__(self) -> None:
        self._sums: defaultdict[str, list[float]] = defaultdict(lambda: [0.0, 0.0])
        """By tenant, and by "" for all of them: requests, and their service."""

    def note(self, tenant: str, service: float) -> None:
        if service:
            for each in (self._sums[tenant], self._sums[""]):
                each[0] += 1
                each[1] += service

    def of(self, tenant: str, requests: float) -> float:
        """So many requests of a tenant. Without an end for which anything was charged, it is without bound."""
        count, service = self._sums.get(tenant) or self._sums[""]
        return requests * service / count if count else inf if requests else 0.0


class TenantSums:
    """Of one tenant within one span."""

    def __init__(self, weight: float) -> None:
        self.weight = weight
        self.received = 0.0
        self.waiting = 0.0
        """Service of the requests that waited when the span ended, as far as it is known."""
        self.queued_requests = 0
        self.running_requests = 0
        self.waits_s: list[float] = []
        self.refused_after_s: list[float] = []
        self.first_tokens_s: list[float] = []
        self.outcomes: Counter[str] = Counter()
        self.refused: Counter[str] = Counter()


def sums(taken: Taken, since_s: float, until_s: float) -> dict[str, TenantSums]:
    """By tenant, one pool between two times."""
    found: dict[str, TenantSums] = {}
    usual = Usual()
    for end in taken.ends:
        if end.ended_s <= since_s:
            break
        if end.pool != taken.pool:
            continue
        usual.note(end.tenant, end.service)
        one = found.get(end.tenant) or _new(found, end.tenant, end.weight)
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
    for each in taken.running:
        name = payer(each.tenant)
        one = found.get(name) or _new(found, name, each.weight)
        one.weight = each.weight
        one.running_requests += 1
        one.received += each.service * part_within(since_s, until_s, each.dispatched_s, taken.now)
        if each.arrived_s < until_s < each.dispatched_s:
            one.waiting += each.service
    for leaf, waiting in taken.waiting.items():
        name = payer(leaf)
        one = found.get(name) or _new(found, name, waiting.weight)
        one.weight = waiting.weight
        one.queued_requests += waiting.requests
        if is_batch(leaf):
            continue  # such work is due what others leave, so what it received
        # They came one after another: so many of them had come by then.
        came = waiting.requests * part_within(-inf, until_s, waiting.oldest_s, taken.now)
        one.waiting += usual.of(name, came)
    return found


def _new(found: dict[str, TenantSums], name: str, weight: float) -> TenantSums:
    found[name] = one = TenantSums(weight)
    return one


def due(asked: Mapping[str, tuple[float, float, float]]) -> dict[str, float]:
    """By tenant, from what it received, its weight, and how much more of the same it asked for and waits for.

    A tenant that asked for less than its part by weight is due what it asked for. The rest of that part goes to the
    other tenants, by weight. The shares add up to 1; all are 0 as long as nobody has received anything.
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
    """By tenant, of all that was received."""
    return due({name: (one.received, one.weight, one.waiting) for name, one in found.items()})


def point(taken: Taken, since_s: float, until_s: float, drawn: Container[str]) -> dict[str, Any]:
    """One pool between two times. `drawn`: the tenants whose shares are said; the others are summed up."""
    found = sums(taken, since_s, until_s)
    tenants = found.values()
    return {
        "tenants": _shares(found, drawn),
        "ended": sum(one.outcomes.total() for one in tenants),
        "refused": dict(sum((one.refused for one in tenants), Counter())),
        "tenant_wait_p95_s": {
            name: percentile(one.waits_s, 0.95) for name, one in found.items() if one.waits_s and name in drawn
        },
        **_percentiles("wait", [wait_s for one in tenants for wait_s in one.waits_s]),
        **_percentiles("first_token", [first_s for one in tenants for first_s in one.first_tokens_s]),
    }


def _shares(found: Mapping[str, TenantSums], drawn: Container[str]) -> list[tuple[str, float, float]]:
    """Tenant, share received, share due. The last, called "", is what all others have together."""
    total = sum(one.received for one in found.values())
    if not total:
        return []
    shares = shares_due(found)
    shares_drawn = []
    others_received = others_due = 0.0
    for name, one in found.items():
        if name in drawn:
            shares_drawn.append((name, round(one.received / total, 4), round(shares[name], 4)))
        else:
            others_received += one.received / total
            others_due += shares[name]
    return [*shares_drawn, ("", round(others_received, 4), round(others_due, 4))]


def part_within(since_s: float, until_s: float, begun_s: float, ended_s: float) -> float:
    """Which part of a service was received between these times, if it was received evenly?"""
    if ended_s <= begun_s:
        return 1.0 if since_s < ended_s <= until_s else 0.0
    return max(0.0, min(until_s, ended_s) - max(since_s, begun_s)) / (ended_s - begun_s)


def _percentiles(name: str, seconds: list[float]) -> dict[str, float | None]:
    return {f"{name}_p50_s": percentile(seconds, 0.5), f"{name}_p95_s": percentile(seconds, 0.95)}


def percentile(values: Sequence[float], part: float) -> float | None:
    """Nearest rank, in milliseconds' precision; None of nothing."""
    ordered = sorted(values)
    return round(ordered[min(len(ordered) - 1, int(part * len(ordered)))], 3) if ordered else None
