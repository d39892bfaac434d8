"""When will a tenant that comes and goes be back, and how long does it stay?

A slot that is kept free for a tenant serves nobody else meanwhile. Of few slots one is a large part, so it is kept only
when a tenant is due: about when its next request is expected, by the time between its requests, and no longer than such
requests take. What is kept is therefore bounded by what these tenants take themselves: their rate times their stay.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from typing import Final

__all__ = ["Visits"]

RATE: Final = 0.2
"""Weight of one request in a moving average."""
KNOWN_AFTER: Final = 4
"""Requests after which the time between them is known. Until then its tenant is always due."""
WIDTH: Final = 2.0
"""How much earlier or later than expected a request may come, in mean deviations of the time between them."""
WIDTH_MIN: Final = 0.02
"""The same as a fraction of that time: clients' clocks and networks are not exact."""
TENANTS_MAX: Final = 64
"""Of more tenants than these somebody is always due."""


class _Visitor:
    __slots__ = ("came_s", "deviation_s", "interval_s", "requests", "stay_s")

    def __init__(self, now: float) -> None:
        self.came_s = now
        self.requests = 1
        self.interval_s = 0.0
        self.deviation_s = 0.0
        self.stay_s = 0.0


class Visits:
    """The tenants seen lately, each with the time between its requests and how long they run."""

    def __init__(self, *, active_s: float = 30.0) -> None:
        self._active_s = active_s
        self._visitors: OrderedDict[str, _Visitor] = OrderedDict()

    # --- questions ---

    def __len__(self) -> int:
        return len(self._visitors)

    def due(self, now: float, ahead_s: float, is_absent: Callable[[str], bool]) -> int:
        """How many tenants that have nothing queued may come within `ahead_s` from now?"""
        if len(self._visitors) > TENANTS_MAX:
            return TENANTS_MAX
        return sum([_is_due(one, now, ahead_s) and is_absent(tenant) for tenant, one in self._visitors.items()])

    # --- events ---

    def came(self, tenant: str, now: float) -> None:
        """A request of this tenant was queued."""
        one = self._visitors.get(tenant)
        if one is None:
            self._visitors[tenant] = _Visitor(now)
        else:
            self._visitors.move_to_end(tenant)
            passed_s, one.came_s = now - one.came_s, now
            one.requests += 1
            # The first requests weigh more, so that a few are enough.
            share = max(RATE, 1.0 / (one.requests - 1))
            one.interval_s += share * (passed_s - one.interval_s)
            one.deviation_s += share * (abs(passed_s - one.interval_s) - one.deviation_s)
        if len(self._visitors) > TENANTS_MAX + 1:
            self._visitors.popitem(last=False)
        self.expire(now)

    def expire(self, now: float) -> None:
        """Time has passed: tenants that came last long ago are forgotten. O(1) on average."""
        while self._visitors and now - next(iter(self._visitors.values())).came_s > self._active_s:
            self._visitors.popitem(last=False)

    def stayed(self, tenant: str, stay_s: float) -> None:
        """A request of this tenant has ended, so long after it was dispatched."""
        one = self._visitors.get(tenant)
        if one is not None:
            one.stay_s += (RATE if one.stay_s else 1.0) * (stay_s - one.stay_s)


def _is_due(one: _Visitor, now: float, ahead_s: float) -> bool:
    if one.requests < KNOWN_AFTER:
        return True
    width_s = min(WIDTH * one.deviation_s + WIDTH_MIN * one.interval_s, one.stay_s)
    return abs(now + ahead_s / 2 - one.came_s - one.interval_s) <= width_s + ahead_s / 2
