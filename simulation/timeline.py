"""Service and waiting of each tenant in the course of a run, in ticks, so that a long run fits in memory."""

from __future__ import annotations

from bisect import bisect_left
from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping
from itertools import accumulate, combinations
from math import ceil

from policies.orders.cost import LinearCost
from policies.request import ServiceTokens
from simulation.run import Record
from simulation.statistics import jain

Amounts = defaultdict[int, float]
"""Amounts by tick."""
TICKS_MAX = 600
"""Ticks of a run. A longer run doubles their length."""


class Timeline:
    """Service (prompt at dispatch, output as it passes the gateway) and waiting of each tenant, by tick.

    A tenant waits throughout a period if the queue had one of its requests at every tick.
    """

    def __init__(self, tenants: Collection[str], tick_s: float) -> None:
        self.tick_s = tick_s
        self._ticks = 0
        """Ticks until the last service or wait of any tenant."""
        self._service: dict[str, Amounts] = {tenant: defaultdict(float) for tenant in tenants}
        self._waiting: dict[str, Amounts] = {tenant: defaultdict(float) for tenant in tenants}
        """Changes of the number of waiting requests, at the beginnings of ticks."""
        self._price = LinearCost()

    def add(self, tenant: str, record: Record) -> None:
        """Add an ended request's service and queue time under this name."""
        arrival = record.arrival
        queued_until_s = record.finished_s if record.dispatched_s is None else record.dispatched_s
        last_s = record.finished_s or 0.0
        while last_s / self.tick_s >= TICKS_MAX:
            self._coarsen()
        if queued_until_s is not None:
            self._add_wait(tenant, arrival.arrived_s, queued_until_s)
        if record.dispatched_s is None:
            return
        self._add_service(tenant, record.dispatched_s, self._price(ServiceTokens(arrival.prompt_tokens, 0)))
        per_token = self._price(ServiceTokens(0, 1))
        token_s, index = record.token_s, 0
        while index < len(token_s):
            end_s = (token_s[index] // self.tick_s + 1) * self.tick_s
            after = max(bisect_left(token_s, end_s, index), index + 1)
            self._add_service(tenant, token_s[index], per_token * (after - index))
            index = after

    def rates(self, tenant: str, window_s: float) -> list[tuple[float, float]]:
        """Return (middle of a tick, service per second in the window around it), until the last service of any
        tenant."""
        totals, ticks = self._totals(tenant), self._ticks
        half = max(1, round(window_s / self.tick_s)) // 2
        course = []
        for tick in range(ticks):
            first, after = max(0, tick - half), min(ticks, tick + half + 1)
            rate = (totals[after] - totals[first]) / ((after - first) * self.tick_s)
            course.append(((tick + 0.5) * self.tick_s, rate))
        return course

    def gaps(self, weights: Mapping[str, float]) -> list[tuple[float, float]]:
        """Return (end of a tick, largest difference of service per weight that two tenants reached while both waited).

        Theorem 4.4 of VTC bounds this difference over any period in which both have requests waiting.
        """
        totals = {tenant: self._totals(tenant) for tenant in weights}
        common: dict[tuple[str, str], tuple[float, float]] = {}
        course = []
        for tick, waiting in enumerate(self._waiting_throughout()):
            before, common = common, {}
            for one, other in combinations(sorted(waiting & weights.keys()), 2):
                at = [
                    totals[one][edge] / weights[one] - totals[other][edge] / weights[other] for edge in (tick, tick + 1)
                ]
                low, high = before.get((one, other), (at[0], at[0]))
                common[one, other] = min(low, at[1]), max(high, at[1])
            course.append(((tick + 1) * self.tick_s, max((high - low for low, high in common.values()), default=0.0)))
        return course

    def jain(self, weights: Mapping[str, float], window_s: float) -> float | None:
        """Return Jain's index of the service per weight of tenants that waited throughout, averaged over windows with
        two.

        Return None without such a window: then no tenants competed.
        """
        ticks = max(1, round(window_s / self.tick_s))
        waiting, totals = list(self._waiting_throughout()), {tenant: self._totals(tenant) for tenant in weights}
        found = []
        for begin in range(0, len(waiting) - ticks + 1, ticks):
            tenants = set.intersection(*waiting[begin : begin + ticks]) & weights.keys()
            if len(tenants) > 1:
                received = {tenant: totals[tenant][begin + ticks] - totals[tenant][begin] for tenant in tenants}
                found.append(jain([service / weights[tenant] for tenant, service in received.items()]))
        return sum(found) / len(found) if found else None

    def _totals(self, tenant: str) -> list[float]:
        """Return the service of a tenant until each beginning of a tick, and until the end."""
        return [0.0, *accumulate(self._service[tenant].get(tick, 0.0) for tick in range(self._ticks))]

    def _waiting_throughout(self) -> Iterator[set[str]]:
        """Yield for each tick the tenants that waited at both its ends."""
        courses = {
            tenant: list(accumulate(changes.get(tick, 0.0) for tick in range(self._ticks + 1)))
            for tenant, changes in self._waiting.items()
        }
        for tick in range(self._ticks):
            yield {tenant for tenant, course in courses.items() if course[tick] and course[tick + 1]}

    def _add_service(self, tenant: str, time_s: float, amount: float) -> None:
        """Add service to the tick of this time."""
        tick = int(time_s / self.tick_s)
        self._service[tenant][tick] += amount
        self._ticks = max(self._ticks, tick + 1)

    def _add_wait(self, tenant: str, from_s: float, until_s: float) -> None:
        """Add one waiting request to every tick within this period."""
        first, after = ceil(from_s / self.tick_s), ceil(until_s / self.tick_s)
        if after > first:
            self._waiting[tenant][first] += 1
            self._waiting[tenant][after] -= 1
            self._ticks = max(self._ticks, after)

    def _coarsen(self) -> None:
        """Double the length of a tick, and merge pairs of ticks."""
        self.tick_s *= 2
        self._ticks = (self._ticks + 1) // 2
        for tables, offset in ((self._service, 0), (self._waiting, 1)):
            for tenant, amounts in tables.items():
                merged = tables[tenant] = defaultdict(float)
                for tick, amount in amounts.items():
                    merged[(tick + offset) // 2] += amount
