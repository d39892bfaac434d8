"""Who received how much, and who waited, within the last seconds?

The sums are made from the remembered ends and from the running and queued requests. So nothing is computed without a
reader.
"""

from __future__ import annotations

import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from itertools import chain
from math import inf
from statistics import fmean

from gateway.operator.snapshots.snapshot import GatewaySnapshot, PoolSnapshot
from gateway.telemetry.ends import EndedRequest
from gateway.telemetry.recent_requests import WINDOW_S, RecentRequests
from gateway.telemetry.record import Outcome
from policies.request import is_batch, payer


@dataclass(slots=True)
class TenantSums:
    """Service, waits and outcomes of one tenant within the window, and its requests in queue and at engines now."""

    weight: float = 0.0
    received: float = 0.0
    due: float = 0.0
    """Service due to the tenant, as far as all tenants together received it."""
    waiting: float = 0.0
    """Service of the requests that wait, as far as it is known."""
    queued_requests: int = 0
    oldest_s: float = inf
    """Arrival of the request that has waited longest; inf if none waits."""
    running_requests: int = 0
    waits_s: list[float] = field(default_factory=list)
    first_tokens_s: list[float] = field(default_factory=list)
    outcomes: Counter[str] = field(default_factory=Counter)
    refused: Counter[str] = field(default_factory=Counter)


Sums = Mapping[str, TenantSums]
"""Sums of one pool, by tenant."""


def sums_of_pools(
    snapshot: GatewaySnapshot, recent: RecentRequests, window_s: float = WINDOW_S
) -> tuple[Callable[[], dict[str, Sums]], float]:
    """Return a function that sums up each pool, and the seconds within the window for which the ends are known.

    Call the function in a thread: summing up a minute takes milliseconds.
    """
    ends, covered_s = recent.within(time.monotonic(), window_s)
    return lambda: {pool.pool: sums(pool, ends, snapshot.at_s, covered_s) for pool in snapshot.pools}, covered_s


def sums(pool: PoolSnapshot, ends: Iterable[EndedRequest], now: float, window_s: float) -> Sums:
    """Return the sums of one pool. `ends`: those of every pool within the window, the latest first."""
    found, known = defaultdict[str, TenantSums](TenantSums), defaultdict[str, list[float]](list)
    since_s = now - window_s
    for end in ends:
        if end.pool != pool.pool:
            continue
        if end.service:
            known[end.tenant].append(end.service)
        one = found[end.tenant]
        one.weight = one.weight or end.weight
        one.received += end.service * part_since(since_s, end.dispatched_s, end.ended_s)
        one.waits_s.append(end.queue_s)
        one.outcomes[end.outcome] += 1
        if end.outcome == Outcome.REFUSED:
            one.refused[end.reason] += 1
        if end.first_token_s is not None:
            one.first_tokens_s.append(end.first_token_s)
    for each in pool.running:
        one = found[payer(each.tenant)]
        one.weight = each.weight
        one.running_requests += 1
        one.received += each.service * part_since(since_s, each.dispatched_s, now)
    # The service of queued requests is not known yet: the mean of the tenant is taken, or else that of all.
    usual = {tenant: fmean(services) for tenant, services in known.items()}
    of_all = fmean(chain.from_iterable(known.values())) if known else inf
    for leaf, waiting in pool.waiting.items():
        one = found[payer(leaf)]
        one.weight = waiting.weight
        one.queued_requests += waiting.requests
        one.oldest_s = min(one.oldest_s, waiting.oldest_s)
        if not is_batch(leaf):  # Batch is due what others leave, so it is due what it received.
            one.waiting += waiting.requests * usual.get(leaf, of_all)
    set_due(found)
    return found


def set_due(found: Sums) -> None:
    """Divide the service that all tenants received: set what is due to each.

    A tenant that asked for less than its part by weight is due what it asked for. The rest of that part goes to the
    other tenants, by weight. All are due nothing as long as no tenant has received anything.
    """
    left, open_ = sum(one.received for one in found.values()), dict(found)
    while left and open_:
        weights = sum(one.weight for one in open_.values())
        content = [name for name, one in open_.items() if (one.received + one.waiting) * weights < left * one.weight]
        if not content or len(content) == len(open_):
            for one in open_.values():
                one.due = left * one.weight / weights
            return
        for name in content:
            one = open_.pop(name)
            one.due = one.received + one.waiting
            left -= one.due


def part_since(since_s: float, begun_s: float, ended_s: float) -> float:
    """Return the part of a service that was received since this time, if it was received evenly."""
    if ended_s <= begun_s:
        return 1.0
    return min(1.0, max(0.0, ended_s - since_s) / (ended_s - begun_s))
