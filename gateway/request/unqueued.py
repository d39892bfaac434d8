"""Who asks too much beside the queue? Requests that take none of an engine's time, such as /tokenize, by tenant."""

from __future__ import annotations

from gateway.http.errors import ApiError, Reason
from policies.limits.leaky_counts import LeakyCounts


class Unqueued:
    """How many of them run at once, and how fast do they come? Who is beyond a limit gets an `ApiError`."""

    def __init__(self, at_once_max: int, per_s: float, tenants_max: int) -> None:
        self._tenants_max = tenants_max
        self._running: dict[str, int] = {}
        """By tenant, as long as there are any."""
        self.set(at_once_max, per_s)

    def set(self, at_once_max: int, per_s: float) -> None:
        """From now on these are the limits. What runs counts on."""
        self._at_once_max = at_once_max
        self._per_s = per_s
        self._rates = LeakyCounts(per_s, max(1.0, per_s), members_max=self._tenants_max)

    def come(self, tenant: str, now: float) -> None:
        """One more has come, and is not read yet."""
        wait_s = self._rates.take(tenant, now)
        if wait_s:
            message = f"more than {self._per_s:g} of your requests that need no queue came within a second; slow down"
            raise ApiError(Reason.RATE_LIMITED, message, retry_after_s=wait_s)

    def begin(self, tenant: str) -> None:
        """One more is sent to an engine."""
        running = self._running.get(tenant, 0)
        if running >= self._at_once_max:
            message = f"{running} of your requests that need no queue are running, and more may not at once; slow down"
            raise ApiError(Reason.TOO_MANY_AT_ONCE, message, retry_after_s=1.0)
        self._running[tenant] = running + 1

    def end(self, tenant: str) -> None:
        """One of them has its answer, or needs none."""
        left = self._running[tenant] - 1
        if left:
            self._running[tenant] = left
        else:
            del self._running[tenant]
