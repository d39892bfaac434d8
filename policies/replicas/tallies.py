"""What did each member of a population do within a window, counted over several gateways?

Most requests are decided at once, by what the last exchange said. As long as a tenant is far from its limits, nothing
that all gateways admit before the next exchange can reach them. Near a limit the others are asked first (`is_sure`).
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Sequence
from functools import partial
from itertools import islice
from math import ceil
from typing import Final

from policies.limits.quotas import ENGINE, WINDOWS, Quotas
from policies.limits.sliding_counts import Count, SlidingCounts
from policies.replicas.messages import CountDelta, Counted
from policies.request import Request

RESERVED: Final = 4
"""Each gateway may use a part of what is left of an active tenant's limit without asking: 1 / (RESERVED * gateways)."""

Measures = tuple[int, int, int]
REPORTED: Final = (ENGINE, "requests", "tokens")
"""What they are of."""


class _ReportedCounts:
    """What the other gateways know of one count."""

    __slots__ = ("last", "sums")

    def __init__(self) -> None:
        self.sums: Measures | None = None
        """Includes what is reserved; None: nothing was reported yet."""
        self.last: Measures | None = None
        """The counts as of the last report."""


class SharedCounts:
    """One gateway's side of the exchange about the counts of one population."""

    def __init__(self, name: str, counts: SlidingCounts, *, epoch_s: float) -> None:
        counts.epoch_s = epoch_s
        counts.changed = {}
        self.counts = counts
        self._name = name
        self._asked: list[Count] = []

    def report(self, most: int, reserve: Callable[[Hashable], Measures] | None = None) -> list[CountDelta]:
        """What was counted since the last exchange, for at most `most` members.

        `reserve`: how much to report in advance as if it were counted, so that requests up to that amount need no
        asking. It is taken back when nothing more is counted.
        """
        self._asked = []
        tallies: list[CountDelta] = []
        changed = self.counts.changed or {}
        for count in list(islice(changed, most)):
            member, period = changed.pop(count), count.period
            reported = _reported_of(count)
            sums = reported.sums or (0, 0, 0)
            now = (count.engine_ms, count.requests, count.tokens)
            extra = (0, 0, 0)
            if reserve is not None and period == self.counts.period and reported.last != now:
                extra = reserve(member)
                if any(extra):
                    changed[count] = member
            reported.last = now
            reporting = (now[0] + extra[0], now[1] + extra[1], now[2] + extra[2])
            engine_ms, requests, tokens = reporting[0] - sums[0], reporting[1] - sums[1], reporting[2] - sums[2]
            name, ttl_s = f"{self._name}:{_joined(member)}", ceil(3 * self.counts.window_s)
            tallies.append(CountDelta(name, period, ttl_s, engine_ms, requests, tokens, sums, reported.sums is None))
            reported.sums = reporting
            self._asked.append(count)
        return tallies

    def receive(self, counted: Iterator[Counted]) -> None:
        """Take the sums of all gateways for the reported counts, which come next."""
        for count in self._asked:
            one = next(counted)
            _take(count, one[:3])
            if any(one[3:]):
                if count.before is None:
                    count.before = Count(None, count.period - 1)
                _take(count.before, one[3:])
        self._asked = []

    def own(self, member: Hashable, measure: str) -> tuple[float, float, bool]:
        """Of one measure: what is counted here and not reported yet, the sum that all gateways have reported, and
        whether that sum is known."""
        count, before, left = self.counts.counted(member)
        sums = _reported_of(count).sums if count.reported is not None else None
        reported = sums[REPORTED.index(measure)] if sums is not None else 0
        return getattr(count, measure) - reported, reported + getattr(before, measure) * left, sums is not None


class SharedQuotas:
    """The limits that hold at any time, counted over all gateways."""

    def __init__(self, quotas: Quotas, *, epoch_s: float) -> None:
        self.quotas = quotas
        self._windows = [
            SharedCounts(name, counts, epoch_s=epoch_s) for name, counts in zip(WINDOWS, quotas.windows, strict=True)
        ]
        self._gateways = 1

    def is_sure(self, request: Request, now: float) -> bool:
        """Will `refusal` give the same answer whatever the other gateways admit before the next exchange?"""
        members = self.quotas.members(request.flow.tenant, request.quota_names)
        limited = [member for member in members if self.quotas.rules(member)]
        if not limited or self.quotas.refusal(request, now) is not None:
            return True
        return all([self._has_left(member, 1, request.prompt_tokens, 0.0) for member in limited])

    def report(self, most: int) -> list[CountDelta]:
        """What was counted since the last exchange, for at most `most` tenants and groups in each window."""
        found = []
        for window, counts in enumerate(self._windows):
            found += counts.report(most, partial(self._reserve, window))
        return found

    def under_way(self) -> list[tuple[str, int]]:
        """Requests under way here, of tenants and groups with a limit on concurrent requests."""
        quotas = self.quotas
        return [
            item
            for item in quotas.under_way.items()
            if any([rule.measure == "concurrent" for rule in quotas.rules(item[0])])
        ]

    def receive(self, counted: Sequence[Counted], gateways: int, under_way: Sequence[tuple[str, int]]) -> None:
        """Take what all `gateways` counted together, and what is under way at the others."""
        sums = iter(counted)
        for counts in self._windows:
            counts.receive(sums)
        self._gateways = gateways
        self.quotas.may_have = None
        self.quotas.under_way_elsewhere = dict(under_way)

    def cut_off(self, *, refuses: bool) -> None:
        """No reply comes from the store: keep to an equal part of what was left. `refuses`: refuse every tenant with a
        limit.
        """

        def may_have(member: str, requests: int, tokens: int) -> bool:
            return not refuses and self._has_left(member, requests, tokens, 1 / self._gateways)

        self.quotas.may_have = may_have

    def _has_left(self, member: str, requests: int, tokens: int, part: float) -> bool:
        """Is this much more reserved? With a `part` above 0: does it fit into that part of what was left?"""
        for rule in self.quotas.rules(member):
            if rule.window >= 0:
                own, known, is_known = self._windows[rule.window].own(member, rule.measure)
                more = tokens if rule.measure == "tokens" else requests
                if own + more > (rule.most - known) * part or not (is_known or part):
                    return False
        return True

    def _reserve(self, window: int, member: Hashable) -> Measures:
        """A small part of what is left: what may be admitted before the next exchange. Nothing as long as it is not
        known what is left: it may be nothing."""
        parts = dict.fromkeys(REPORTED, 0)
        for rule in self.quotas.rules(str(member)):
            if rule.window == window:
                own, known, is_known = self._windows[window].own(member, rule.measure)
                parts[rule.measure] = is_known * max(0, int((rule.most - known - own) / (RESERVED * self._gateways)))
        return parts[ENGINE], parts["requests"], parts["tokens"]


def _take(count: Count, sums: Measures) -> None:
    """Take the sums of all gateways. Counts of this gateway that are not reported yet stay."""
    reported = _reported_of(count)
    known = reported.sums or (0, 0, 0)
    more = (sums[0] - known[0], sums[1] - known[1], sums[2] - known[2])
    count.engine_ms += more[0]
    count.requests += more[1]
    count.tokens += more[2]
    reported.sums = sums
    if reported.last is not None:
        reported.last = (reported.last[0] + more[0], reported.last[1] + more[1], reported.last[2] + more[2])


def _reported_of(count: Count) -> _ReportedCounts:
    reported: _ReportedCounts | None = count.reported
    if reported is None:
        reported = count.reported = _ReportedCounts()
    return reported


def _joined(member: Hashable) -> str:
    return "\x1f".join(member) if isinstance(member, tuple) else str(member)
