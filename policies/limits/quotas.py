"""Is a tenant beyond a limit that holds at any time? These are the classic rate limits, off by default.

They count whole tenants, under every policy. They do not look at interactions: a request beyond them is refused in the
middle of an interaction too.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from policies.limits.sliding_counts import Count, SlidingCounts
from policies.request import Limit, Refusal, Refused, Request
from policies.settings import COUNT_MAX, Contradiction, check_bounds, setting

MINUTE_S = 60.0
DAY_S = 86_400.0


def _limit(doc: str) -> Any:
    return setting(None, doc, kind=int, least=1, most=COUNT_MAX)


@dataclass(frozen=True, slots=True)
class Quota:
    """What one tenant may have. None: no limit."""

    requests_per_minute: int | None = _limit("Requests in any 60 seconds.")
    tokens_per_minute: int | None = _limit("Tokens in any 60 seconds, prompt and output.")
    concurrent: int | None = _limit("Requests queued or running at once.")
    tokens_per_day: int | None = _limit("Tokens in any 24 hours, prompt and output. At least tokens_per_minute.")

    def __post_init__(self) -> None:
        check_bounds(self)
        if (self.tokens_per_minute or 0) > (self.tokens_per_day or float("inf")):
            message = f"{self.tokens_per_day} is less than tokens_per_minute ({self.tokens_per_minute}): never reached"
            raise Contradiction("tokens_per_day", message)


UNLIMITED = Quota()


class Quotas:
    """The limits of every tenant, and how much each has used. One object may serve several pools."""

    def __init__(
        self, default: Quota = UNLIMITED, tenants: Mapping[str, Quota] | None = None, *, tenants_max: int = 100_000
    ) -> None:
        """`tenants_max`: tenants that are counted in a window."""
        self._default = default
        self._tenants = dict(tenants or {})
        self.minute = SlidingCounts(MINUTE_S, members_max=tenants_max)
        self.day = SlidingCounts(DAY_S, members_max=tenants_max)
        self.under_way: dict[str, int] = {}
        """By tenant: requests queued and dispatched."""
        self.under_way_elsewhere: Mapping[str, int] = {}
        """The same at other gateways."""
        self.may_have: Callable[[str, int, int], bool] | None = None
        """May this tenant have this many more requests and tokens? Set while other gateways count the same limits but
        cannot be asked. None: there are none, or they can be asked."""

    @property
    def is_off(self) -> bool:
        """Has no tenant a limit?"""
        return self._default == UNLIMITED and not any(quota != UNLIMITED for quota in self._tenants.values())

    def set(self, other: Quotas) -> None:
        """From now on the limits are the other's. What was counted counts on."""
        self._default, self._tenants = other._default, other._tenants

    def refusal(self, request: Request, now: float) -> Refused | None:
        """Is its tenant beyond a limit? None: it is not."""
        return self._refusal(request, request.prompt_tokens, 1, now)

    def _refusal(self, request: Request, tokens: int, requests: int, now: float) -> Refused | None:
        """Would its tenant be beyond a limit with this many more tokens and requests? None: it would not."""
        tenant = request.flow.tenant
        self.minute.at(now)
        self.day.at(now)
        limits = self._standing(tenant, tokens, now, requests)
        for limit in limits:
            if limit.reset_s:
                return Refused(Refusal.RATE_LIMITED, max(1.0, limit.reset_s), limit)
        if limits and self.may_have is not None and not self.may_have(tenant, requests, tokens):
            return Refused(Refusal.RATE_LIMITED, 1.0, min(limits, key=lambda limit: limit.remaining))
        return None

    def admitted(self, request: Request, now: float) -> None:
        """The request was queued."""
        tenant = request.flow.tenant
        self.under_way[tenant] = self.under_way.get(tenant, 0) + 1
        self.minute.at(now)
        self.day.at(now)
        counted = request.progress.counted = (self.minute.of(tenant), self.day.of(tenant))
        self._add(tenant, counted, 1, request.prompt_tokens)

    def ended(self, request: Request, tokens: int, now: float) -> None:
        """The request ended, in whatever way, and took this many tokens.

        Tokens beyond the estimate count now. What was counted and not taken is taken back from the periods in which it
        was counted: else the limits of a later period would let through as much more.
        """
        tenant = request.flow.tenant
        counted = self._left(request, now)
        more = tokens - request.prompt_tokens
        if more > 0:
            counted = (self.minute.of(tenant), self.day.of(tenant))
        self._add(tenant, counted, 0, more)

    def withdrawn(self, request: Request, now: float) -> None:
        """The request was counted, but is not served: undo the count."""
        self._add(request.flow.tenant, self._left(request, now), -1, -request.prompt_tokens)

    def _left(self, request: Request, now: float) -> tuple[Count, Count]:
        """The request is under way no longer. Returns the counts that it was added to."""
        tenant, progress = request.flow.tenant, request.progress
        self.minute.at(now)
        self.day.at(now)
        under_way = self.under_way[tenant] - 1
        if under_way:
            self.under_way[tenant] = under_way
        else:
            del self.under_way[tenant]
        counted: tuple[Count, Count] = progress.counted
        progress.counted = None
        return counted

    def standing(self, tenant: str, now: float) -> list[Limit]:
        """Every limit of this tenant, and how much of it is used."""
        return self._standing(tenant, 1, now)

    def overrun(self, request: Request, now: float) -> Refused | None:
        """Is its tenant beyond a limit, now that this request has been counted?"""
        return self._refusal(request, 0, 0, now)

    def go_on(self, tenant: str, tokens_before: int, tokens: int, now: float) -> None:
        """What a tenant used on the day before and on this one, as it was written down by a gateway that has ended."""
        self.day.at(now)
        count = self.day.of(tenant)
        if count.before is None:
            count.before = Count(None, count.period - 1)
        count.before.tokens += tokens_before
        count.tokens += tokens

    def quota(self, tenant: str) -> Quota:
        """What this tenant may have."""
        return self._tenants.get(tenant, self._default)

    def _add(self, tenant: str, counted: tuple[Count, Count], requests: int, tokens: int) -> None:
        for counts, count in zip((self.minute, self.day), counted, strict=True):
            count.requests += requests
            count.tokens += tokens
            if counts.changed is not None and self.quota(tenant) is not UNLIMITED:
                counts.note_change(tenant, count)

    def _standing(self, tenant: str, prompt_tokens: int, now: float, requests: int = 1) -> list[Limit]:
        quota = self.quota(tenant)
        if quota is UNLIMITED:
            return []
        limits = []
        if quota.requests_per_minute is not None:
            limits.append(self.minute.limit("requests", "requests", tenant, requests, quota.requests_per_minute, now))
        if quota.tokens_per_minute is not None:
            limits.append(self.minute.limit("tokens", "tokens", tenant, prompt_tokens, quota.tokens_per_minute, now))
        if quota.concurrent is not None:
            left = quota.concurrent - self.under_way.get(tenant, 0) - self.under_way_elsewhere.get(tenant, 0)
            limits.append(Limit("concurrent", quota.concurrent, max(0, left), 0.0 if left >= requests else 1.0))
        if quota.tokens_per_day is not None:
            limits.append(self.day.limit("tokens_per_day", "tokens", tenant, prompt_tokens, quota.tokens_per_day, now))
        return limits
