"""Behind how many requests did a tenant's requests wait? Shown to its own key."""

from __future__ import annotations

from bisect import bisect_left
from collections import defaultdict
from collections.abc import Iterable
from typing import Final

from gateway.operator.snapshots.spans import Running
from gateway.telemetry.ends import End
from policies.request import payer

OTHERS: Final = "other tenants"


class EngineTimes:
    """Times at which requests were at the engines of one pool, to count the requests that others waited behind."""

    def __init__(self, ends: Iterable[End], running: Iterable[Running], known_s: tuple[float, float]) -> None:
        """Sort the times, in milliseconds for thousands. `ends`: those of the pool in the time `known_s`."""
        self._known_s = known_s
        self._begun: defaultdict[str, list[float]] = defaultdict(list)
        """Sorted times by tenant, and under "" of all tenants."""
        self._ended: defaultdict[str, list[float]] = defaultdict(list)
        for end in ends:
            if end.backend:
                self._note(self._begun, end.tenant, end.dispatched_s)
                self._note(self._ended, end.tenant, end.ended_s)
        for each in running:
            self._note(self._begun, payer(each.tenant), each.dispatched_s)
        for times in (*self._begun.values(), *self._ended.values()):
            times.sort()

    @staticmethod
    def _note(times: defaultdict[str, list[float]], tenant: str, at_s: float) -> None:
        times[tenant].append(at_s)
        times[""].append(at_s)

    def behind(self, tenant: str, since_s: float, until_s: float) -> dict[str, int]:
        """Count the requests at engines while a request of this tenant waited; empty if the time is not covered."""
        if since_s < self._known_s[0] or until_s > self._known_s[1]:
            return {}
        own, all_ = (
            bisect_left(self._begun[name], until_s) - bisect_left(self._ended[name], since_s) for name in (tenant, "")
        )
        return {name: count for name, count in ((tenant, own), (OTHERS, all_ - own)) if count > 0}
