"""Limits of requests that need no admission, such as /tokenize, by tenant."""

from __future__ import annotations

from collections import Counter

from gateway.http.errors import ApiError, Reason
from policies.limits.leaky_counts import LeakyCounts


class BypassLimiter:
    """Per-tenant limiter of concurrency and rate for requests that bypass admission."""

    def __init__(self, at_once_max: int, per_s: float, tenants_max: int) -> None:
        self._tenants_max = tenants_max
        self._running: Counter[str] = Counter()
        """Running requests by tenant; a tenant without any has no entry."""
        self.set(at_once_max, per_s)

    def set(self, at_once_max: int, per_s: float) -> None:
        """Replace the limits. Running requests stay counted."""
        self._at_once_max = at_once_max
        self._per_s = per_s
        self._rates = LeakyCounts(per_s, max(1.0, per_s), members_max=self._tenants_max)

    def count_arrival(self, tenant: str, now: float) -> None:
        """Count an arrival. Raise ApiError if the tenant's requests come too fast."""
        wait_s = self._rates.take(tenant, now)
        if wait_s:
            message = f"more than {self._per_s:g} of your requests that need no queue came within a second; slow down"
            raise ApiError(Reason.RATE_LIMITED, message, retry_after_s=wait_s)

    def begin(self, tenant: str) -> None:
        """Count a request that begins to run, at an engine or in the gateway. Raise ApiError if too many run."""
        running = self._running[tenant]
        if running >= self._at_once_max:
            message = f"{running} of your requests that need no queue are running, and more may not at once; slow down"
            raise ApiError(Reason.TOO_MANY_AT_ONCE, message, retry_after_s=1.0)
        self._running[tenant] = running + 1

    def end(self, tenant: str) -> None:
        """Count the end of a running request."""
        self._running[tenant] -= 1
        if not self._running[tenant]:
            del self._running[tenant]
