"""Is a tenant beyond a limit that holds at any time? The classic limits, for those who want them; off by default.

They count whole tenants, whatever policy orders the queue, and they do not look at interactions: a request beyond them
is refused in the middle of one too.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from policies.base import Limit, Refusal, Refused, Request
from policies.limits import SlidingCounts

__all__ = ["Quota", "Quotas"]

MINUTE_S = 60.0
DAY_S = 86_400.0
NAMES = ("requests_per_minute", "tokens_per_minute", "concurrent", "tokens_per_day")


@dataclass(frozen=True, slots=True)
class Quota:
    """What one tenant may have. None: as much as there is."""

    requests_per_minute: int | None = None
    tokens_per_minute: int | None = None
    concurrent: int | None = None
    """Queued and dispatched at once."""
    tokens_per_day: int | None = None

    def __post_init__(self) -> None:
        for name in NAMES:
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ValueError(f"{name} is {value}; the least is 1")
        if (self.tokens_per_minute or 0) > (self.tokens_per_day or float("inf")):
            raise ValueError(f"{self.tokens_per_minute} tokens_per_minute are more than {self.tokens_per_day} per day")


UNLIMITED = Quota()


class Quotas:
    """The limits of every tenant, and where each stands. One object may serve several pools."""

    def __init__(self, default: Quota = UNLIMITED, tenants: Mapping[str, Quota] | None = None) -> None:
        self._default = default
        self._tenants = dict(tenants or {})
        self._minute = SlidingCounts(MINUTE_S)
        self._day = SlidingCounts(DAY_S)
        self._under_way: dict[str, int] = {}

    @property
    def is_off(self) -> bool:
        """Has nobody a limit?"""
        return self._default == UNLIMITED and not any(quota != UNLIMITED for quota in self._tenants.values())

    def refusal(self, request: Request, now: float) -> Refused | None:
        """Is its tenant beyond a limit? None: it is not."""
        tenant = request.flow.tenant
        for limit in self._standing(tenant, request.prompt_tokens, now):
            if limit.reset_s:
                return Refused(Refusal.RATE_LIMITED, max(1.0, limit.reset_s), limit)
        return None

    def admitted(self, request: Request, now: float) -> None:
        """It is queued."""
        tenant = request.flow.tenant
        self._under_way[tenant] = self._under_way.get(tenant, 0) + 1
        self._count(tenant, 1, request.prompt_tokens, now)

    def ended(self, request: Request, tokens: int, now: float) -> None:
        """It is over, in whatever way, and took so many tokens."""
        tenant = request.flow.tenant
        under_way = self._under_way[tenant] - 1
        if under_way:
            self._under_way[tenant] = under_way
        else:
            del self._under_way[tenant]
        self._count(tenant, 0, tokens - request.prompt_tokens, now)

    def standing(self, tenant: str, now: float) -> list[Limit]:
        """Every limit that this tenant has."""
        return self._standing(tenant, 1, now)

    def _count(self, tenant: str, requests: int, tokens: int, now: float) -> None:
        for counts in (self._minute, self._day):
            counts.at(now)
            count = counts.of(tenant, 1.0)
            count.requests += requests
            count.tokens += tokens

    def _standing(self, tenant: str, prompt_tokens: int, now: float) -> list[Limit]:
        quota = self._tenants.get(tenant, self._default)
        if quota is UNLIMITED:
            return []
        self._minute.at(now)
        self._day.at(now)
        limits = []
        if quota.requests_per_minute is not None:
            limits.append(self._minute.limit("requests", "requests", tenant, 1, quota.requests_per_minute))
        if quota.tokens_per_minute is not None:
            limits.append(self._minute.limit("tokens", "tokens", tenant, prompt_tokens, quota.tokens_per_minute))
        if quota.concurrent is not None:
            left = quota.concurrent - self._under_way.get(tenant, 0)
            limits.append(Limit("concurrent", quota.concurrent, max(0, left), 0.0 if left > 0 else 1.0))
        if quota.tokens_per_day is not None:
            limits.append(self._day.limit("tokens_per_day", "tokens", tenant, prompt_tokens, quota.tokens_per_day))
        return limits
