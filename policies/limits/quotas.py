"""Is a tenant beyond a limit that holds at any time? The classic limits, for those who want them; off by default.

They count whole tenants, whatever policy orders the queue, and they do not look at interactions: a request beyond them
is refused in the middle of one too.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass

from policies.limits.sliding_counts import Count, SlidingCounts
from policies.replicas.messages import Tally
from policies.request import Limit, Refusal, Refused, Request

__all__ = ["Quota", "Quotas"]

MINUTE_S = 60.0
DAY_S = 86_400.0
RESERVED = 4
"""Of what is left of a limit each gateway may use a part without asking while its tenant is active: one in so many
times the number of gateways."""
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
        self._under_way_elsewhere: dict[str, int] = {}
        self._gateways = 1
        self._is_shared = self._is_alone = self._refuses = False

    @property
    def is_off(self) -> bool:
        """Has nobody a limit?"""
        return self._default == UNLIMITED and not any(quota != UNLIMITED for quota in self._tenants.values())

    def refusal(self, request: Request, now: float) -> Refused | None:
        """Is its tenant beyond a limit? None: it is not."""
        return self._refusal(request, request.prompt_tokens, 1, now)

    def _refusal(self, request: Request, tokens: int, requests: int, now: float) -> Refused | None:
        """Would its tenant be beyond a limit with so much more? None: it would not."""
        tenant = request.flow.tenant
        limits = self._standing(tenant, tokens, now, requests)
        for limit in limits:
            if limit.reset_s:
                return Refused(Refusal.RATE_LIMITED, max(1.0, limit.reset_s), limit)
        if limits and self._is_alone and (self._refuses or not self._is_within(tenant, requests, tokens)):
            return Refused(Refusal.RATE_LIMITED, 1.0, min(limits, key=lambda limit: limit.remaining))
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

    # --- with other gateways ---

    def share(self, epoch_s: float) -> None:
        """From now on there may be others, with a clock that is so much ahead."""
        self._is_shared = True
        self._minute.share("minute", epoch_s)
        self._day.share("day", epoch_s)

    def is_sure(self, request: Request, now: float) -> bool:
        """Is the answer to `refusal` the same whatever other gateways admit until they are heard again?"""
        tenant = request.flow.tenant
        if not self._is_shared or self._of(tenant) is UNLIMITED:
            return True
        return self.refusal(request, now) is not None or self._is_within(tenant, 1, request.prompt_tokens)

    def overrun(self, request: Request, now: float) -> Refused | None:
        """Is its tenant beyond a limit now that it has been counted?"""
        return self._refusal(request, 0, 0, now)

    def withdrawn(self, request: Request, now: float) -> None:
        """It was counted, and is not served after all."""
        self.ended(request, 0, now)
        self._count(request.flow.tenant, -1, 0, now)

    def tell(self, most: int) -> tuple[list[Count], list[Tally]]:
        """What was counted since the last time, of at most so many tenants."""
        counts, tallies = self._minute.tell(most, self._reserve_of_minute)
        of_day, tallies_of_day = self._day.tell(most, self._reserve_of_day)
        return counts + of_day, tallies + tallies_of_day

    def _reserve_of_minute(self, tenant: Hashable, count: Count) -> tuple[int, int, int]:
        quota = self._of(str(tenant))
        requests = self._part_left(self._minute, tenant, "requests", quota.requests_per_minute)
        return 0, requests, self._part_left(self._minute, tenant, "tokens", quota.tokens_per_minute)

    def _reserve_of_day(self, tenant: Hashable, count: Count) -> tuple[int, int, int]:
        return 0, 0, self._part_left(self._day, tenant, "tokens", self._of(str(tenant)).tokens_per_day)

    def _part_left(self, counts: SlidingCounts, tenant: Hashable, measure: str, limit: int | None) -> int:
        """A small part of what is left: what may be admitted before the others are heard again."""
        if limit is None:
            return 0
        own, known, _ = counts.own(tenant, measure)
        return max(0, int((limit - known - own) / (RESERVED * self._gateways)))

    def under_way(self) -> list[tuple[str, int]]:
        """Requests here of those that may have so many at once."""
        return [item for item in self._under_way.items() if self._of(item[0]).concurrent is not None]

    def heard(self, gateways: int, under_way: Sequence[tuple[str, int]]) -> None:
        """So many gateways there are, and so much is under way at the others."""
        self._gateways, self._is_alone = gateways, False
        self._under_way_elsewhere = dict(under_way)

    def cut_off(self, *, refuses: bool) -> None:
        """Others cannot be heard: keep to an equal part of what was left, or refuse whoever has a limit."""
        self._is_alone, self._refuses = True, refuses

    def _is_within(self, tenant: str, requests: int, tokens: int) -> bool:
        """Is so much more reserved? Or, alone: within an equal part of what was left?"""
        quota = self._of(tenant)
        for counts, measure, more, limit in (
            (self._minute, "requests", requests, quota.requests_per_minute),
            (self._minute, "tokens", tokens, quota.tokens_per_minute),
            (self._day, "tokens", tokens, quota.tokens_per_day),
        ):
            if limit is not None:
                own, known, is_heard = counts.own(tenant, measure)
                room = (limit - known) / self._gateways if self._is_alone else 0.0
                if own + more > room or not (is_heard or self._is_alone):
                    return False
        return True

    def _of(self, tenant: str) -> Quota:
        return self._tenants.get(tenant, self._default)

    def _count(self, tenant: str, requests: int, tokens: int, now: float) -> None:
        for counts in (self._minute, self._day):
            counts.at(now)
            count = counts.of(tenant, 1.0)
            count.requests += requests
            count.tokens += tokens
            if self._is_shared and self._of(tenant) is not UNLIMITED:
                counts.changed(tenant, count)

    def _standing(self, tenant: str, prompt_tokens: int, now: float, requests: int = 1) -> list[Limit]:
        quota = self._of(tenant)
        if quota is UNLIMITED:
            return []
        self._minute.at(now)
        self._day.at(now)
        limits = []
        if quota.requests_per_minute is not None:
            limits.append(self._minute.limit("requests", "requests", tenant, requests, quota.requests_per_minute))
        if quota.tokens_per_minute is not None:
            limits.append(self._minute.limit("tokens", "tokens", tenant, prompt_tokens, quota.tokens_per_minute))
        if quota.concurrent is not None:
            left = quota.concurrent - self._under_way.get(tenant, 0) - self._under_way_elsewhere.get(tenant, 0)
            limits.append(Limit("concurrent", quota.concurrent, max(0, left), 0.0 if left >= requests else 1.0))
        if quota.tokens_per_day is not None:
            limits.append(self._day.limit("tokens_per_day", "tokens", tenant, prompt_tokens, quota.tokens_per_day))
        return limits
