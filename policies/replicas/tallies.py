"""What each member of a population did within a window, counted over several gateways.

Most requests are decided at once, by what the last exchange said: as long as a tenant is far from its limits, what all
gateways admit until the next exchange cannot reach them. Near a limit others must be asked first (`is_sure`).
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from itertools import islice
from math import ceil
from typing import Final

from policies.limits.quotas import UNLIMITED, Quotas
from policies.limits.sliding_counts import MEASURES, Count, SlidingCounts
from policies.replicas.messages import Counted, Tally
from policies.request import Request

__all__ = ["SharedCounts", "SharedQuotas"]

RESERVED: Final = 4
"""Of what is left of a limit each gateway may use a part without asking while its tenant is active: one in so many
times the number of gateways."""

Measures = tuple[int, int, int]
"""Starts, requests and tokens."""


class _Told:
    """What others know of one count."""

    __slots__ = ("last", "sums")

    def __init__(self) -> None:
        self.sums: Measures | None = None
        """With what is reserved; None: nothing yet."""
        self.last: Measures | None = None
        """What was counted when they were told."""


class SharedCounts:
    """One gateway's side of the exchange about the counts of one population."""

    def __init__(self, name: str, counts: SlidingCounts, *, epoch_s: float) -> None:
        counts.epoch_s = epoch_s
        counts.changed = {}
        counts.begin_anew()
        self.counts = counts
        self._name = name
        self._asked: list[Count] = []

    def tell(self, most: int, reserve: Callable[[Hashable], Measures] | None = None) -> list[Tally]:
        """What was counted since the last time, of at most so many.

        `reserve`: how much is to be told as if it were counted, so that so much may be without asking? It is taken back
        when nothing is counted any more.
        """
        self._asked = []
        tallies: list[Tally] = []
        changed = self.counts.changed or {}
        for count in list(islice(changed, most)):
            member, period = changed.pop(count)
            told = _told_of(count)
            sums = told.sums or (0, 0, 0)
            now = (count.starts, count.requests, count.tokens)
            extra = (0, 0, 0)
            if reserve is not None and period == self.counts.period and told.last != now:
                extra = reserve(member)
                if any(extra):
                    changed[count] = (member, period)
            told.last = now
            telling = (now[0] + extra[0], now[1] + extra[1], now[2] + extra[2])
            starts, requests, tokens = telling[0] - sums[0], telling[1] - sums[1], telling[2] - sums[2]
            name, ttl_s = f"{self._name}:{_joined(member)}", ceil(3 * self.counts.window_s)
            tallies.append(Tally(name, period, ttl_s, starts, requests, tokens, sums, told.sums is None))
            told.sums = telling
            self._asked.append(count)
        return tallies

    def hear(self, counted: Sequence[Counted]) -> None:
        """What all gateways together counted, as of what was told."""
        for count, (starts, requests, tokens, *before) in zip(self._asked, counted, strict=True):
            told = _told_of(count)
            sums = told.sums or (0, 0, 0)
            more = (starts - sums[0], requests - sums[1], tokens - sums[2])
            count.starts += more[0]
            count.requests += more[1]
            count.tokens += more[2]
            told.sums = (starts, requests, tokens)
            if told.last is not None:
                told.last = (told.last[0] + more[0], told.last[1] + more[1], told.last[2] + more[2])
            if any(before):
                earlier = count.before = Count(None, count.weight)
                earlier.starts, earlier.requests, earlier.tokens = before
        self._asked = []

    def own(self, member: Hashable, measure: str) -> tuple[float, float, bool]:
        """Of a measure: what was counted here beyond what was told; what all told, and whether that is known at all."""
        count, before, left = self.counts.counted(member)
        sums = _told_of(count).sums if count.told is not None else None
        told = sums[MEASURES.index(measure)] if sums is not None else 0
        return getattr(count, measure) - told, told + getattr(before, measure) * left, sums is not None


class SharedQuotas:
    """The limits that hold at any time, counted by all gateways."""

    def __init__(self, quotas: Quotas, *, epoch_s: float) -> None:
        self.quotas = quotas
        self._minute = SharedCounts("minute", quotas.minute, epoch_s=epoch_s)
        self._day = SharedCounts("day", quotas.day, epoch_s=epoch_s)
        self._gateways = 1
        self._tallies_of_minute = 0

    def is_sure(self, request: Request, now: float) -> bool:
        """Is the answer to `refusal` the same whatever other gateways admit until they are heard again?"""
        tenant = request.flow.tenant
        if self.quotas.quota(tenant) is UNLIMITED:
            return True
        return self.quotas.refusal(request, now) is not None or self._has_left(tenant, 1, request.prompt_tokens, 0.0)

    def tell(self, most: int) -> list[Tally]:
        """What was counted since the last time, of at most so many tenants and windows."""
        minute = self._minute.tell(most, self._reserve_of_minute)
        self._tallies_of_minute = len(minute)
        return minute + self._day.tell(most, self._reserve_of_day)

    def under_way(self) -> list[tuple[str, int]]:
        """Requests here of those that may have so many at once."""
        quotas = self.quotas
        return [item for item in quotas.under_way.items() if quotas.quota(item[0]).concurrent is not None]

    def hear(self, counted: Sequence[Counted], gateways: int, under_way: Sequence[tuple[str, int]]) -> None:
        """So many gateways there are; this is what they counted, and what is under way at the others."""
        self._minute.hear(counted[: self._tallies_of_minute])
        self._day.hear(counted[self._tallies_of_minute :])
        self._gateways = gateways
        self.quotas.may_have = None
        self.quotas.under_way_elsewhere = dict(under_way)

    def cut_off(self, *, refuses: bool) -> None:
        """Others cannot be heard: keep to an equal part of what was left, or refuse whoever has a limit."""

        def may_have(tenant: str, requests: int, tokens: int) -> bool:
            return not refuses and self._has_left(tenant, requests, tokens, 1 / self._gateways)

        self.quotas.may_have = may_have

    def _has_left(self, tenant: str, requests: int, tokens: int, part: float) -> bool:
        """Is so much more reserved? With a part: is it within that part of what was left?"""
        quota = self.quotas.quota(tenant)
        for counts, measure, more, limit in (
            (self._minute, "requests", requests, quota.requests_per_minute),
            (self._minute, "tokens", tokens, quota.tokens_per_minute),
            (self._day, "tokens", tokens, quota.tokens_per_day),
        ):
            if limit is not None:
                own, known, is_heard = counts.own(tenant, measure)
                if own + more > (limit - known) * part or not (is_heard or part):
                    return False
        return True

    def _reserve_of_minute(self, tenant: Hashable) -> Measures:
        quota = self.quotas.quota(str(tenant))
        requests = self._part_left(self._minute, tenant, "requests", quota.requests_per_minute)
        return 0, requests, self._part_left(self._minute, tenant, "tokens", quota.tokens_per_minute)

    def _reserve_of_day(self, tenant: Hashable) -> Measures:
        return 0, 0, self._part_left(self._day, tenant, "tokens", self.quotas.quota(str(tenant)).tokens_per_day)

    def _part_left(self, counts: SharedCounts, tenant: Hashable, measure: str, limit: int | None) -> int:
        """A small part of what is left: what may be admitted before the others are heard again."""
        if limit is None:
            return 0
        own, known, _ = counts.own(tenant, measure)
        return max(0, int((limit - known - own) / (RESERVED * self._gateways)))


def _told_of(count: Count) -> _Told:
    told: _Told | None = count.told
    if told is None:
        told = count.told = _Told()
    return told


def _joined(member: Hashable) -> str:
    return "\x1f".join(member) if isinstance(member, tuple) else str(member)
