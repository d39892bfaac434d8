"""What did each member of a population do within a window, counted over several gateways?

When a gateway reports a count, it also reserves a small part of what is left: the store counts that as used. Requests
within a reservation are admitted at once, because no other gateway can use the reservation before the next sync round.
Until the reply, others may still use what is newly reserved: only what the last report had reserved already is sure.
Other requests wait for a sync round (`is_sure`), for example near a limit, where nothing is left to reserve.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Sequence
from functools import partial
from itertools import islice
from math import ceil
from typing import Final

from policies.limits.quotas import WINDOWS, Quotas, wanted
from policies.limits.sliding_counts import LOST, NOTHING, PLACES, TAKES_BACK, Measures, SlidingCounts
from policies.replicas.messages import CountDelta, Counted
from policies.request import Request
from policies.tree.node import SEQUENCES, NodeUsage

RESERVED: Final = 4
"""Divisor of reservations: a gateway reserves 1 / (RESERVED * gateways) of what is left of an active member's limit."""


class SharedCounts:
    """A gateway's side of the sync rounds about the counts of one population."""

    def __init__(self, name: str, counts: SlidingCounts, *, epoch_s: float) -> None:
        counts.epoch_s = epoch_s
        counts.pending = {}
        self.counts = counts
        self._name = name
        self._asked: list[tuple[Hashable, int]] = []
        """Member and first bucket of each expected entry of the reply."""
        self._unconfirmed: dict[Hashable, Measures] = {}
        """Amounts that the last report reserved and the one before had not, until the reply."""

    def report(self, most: int, reserve: Callable[[Hashable], Measures] | None = None) -> list[CountDelta]:
        """Return the counts since the last sync round, for at most `most` members.

        `reserve`: function for the amounts to report in advance as if they were counted. The next report takes them
        back.
        """
        self._asked = []
        tallies: list[CountDelta] = []
        counts, pending = self.counts, self.counts.pending or {}
        for member in list(islice(pending, most)):
            if len(tallies) >= most:
                break
            before = [self.read_counts(member, place)[0] for place in PLACES]
            for bucket, (*own, why) in sorted(pending.pop(member).items()):
                if bucket < counts.oldest:
                    continue
                extra = reserve(member) if reserve is not None and why and bucket == counts.bucket else NOTHING
                known = counts.measures(member, bucket)
                name, ttl_s = f"{self._name}:{_joined(member)}", ceil(2 * counts.window.longest_s)
                more = _measures([own[place] + extra[place] for place in PLACES])
                base = _measures([known[place] - own[place] for place in PLACES])
                tally = CountDelta(name, bucket, ttl_s, more, base, self._since(member, bucket), why == LOST)
                if any(extra):
                    counts.pend(member, bucket, TAKES_BACK)[:-1] = [-each for each in extra]
                    newly = [max(0, extra[place] + min(0, before[place])) for place in PLACES]
                    self._unconfirmed[member] = _measures(newly)
                tallies.append(tally)
                self._asked.append((member, tally.first))
        return tallies

    def receive(self, counted: Iterator[Counted], *, is_forgotten: bool) -> None:
        """Take the sums of all gateways for the reported counts from the iterator.

        `is_forgotten`: the store has lost its data, and all counts are to be reported again.
        """
        self._unconfirmed = {}
        for member, first in self._asked:
            sums = next(counted)
            for bucket, known in enumerate(sums, first):
                if not is_forgotten or bucket == first + len(sums) - 1:
                    self.counts.apply_reply(member, bucket, known)
        self._asked = []
        if is_forgotten:
            self.counts.pend_all()

    def read_counts(self, member: Hashable, place: int) -> tuple[int, int, bool]:
        """Return the unreported count of one measure, the sum that all gateways reported, and whether that is known.

        The unreported count is negative while a confirmed reservation is left.
        """
        counts = self.counts
        own = sum([each[place] for each in counts.unreported(member).values()])
        confirmed = own + self._unconfirmed.get(member, NOTHING)[place]
        return confirmed, counts.sums(member)[place] - own, counts.answered(member) >= counts.bucket

    def _since(self, member: Hashable, bucket: int) -> int:
        """Return the first bucket to ask for: others may take back reservations in the last two answered buckets."""
        answered = self.counts.answered(member)
        return bucket if answered >= bucket else max(0, self.counts.oldest, answered - 1)


class SharedQuotas:
    """A gateway's side of the sync rounds about quotas, the limits that also hold without overload."""

    def __init__(self, quotas: Quotas, *, epoch_s: float, workers: int = 1) -> None:
        """Count with other gateways. `workers`: number of gateways that are known to count, even before any reply."""
        self.quotas = quotas
        windows = zip(WINDOWS, quotas.windows, strict=True)
        self._windows = [SharedCounts(name, counts, epoch_s=epoch_s) for name, counts in windows]
        self._workers = self._gateways = workers

    def is_sure(self, request: Request, now: float) -> bool:
        """Return whether the other gateways cannot change the result of `find_rejection` before the next sync round.

        That round reports the counts of a request beyond a limit anew: the others may have taken back reservations.
        """
        members = self.quotas.members(request.flow.tenant, request.quota_names)
        limited = [member for member in members if self.quotas.rules(member)]
        if not limited:
            return True
        if self.quotas.find_rejection(request, now) is not None:
            for member in limited:
                for rule in self.quotas.rules(member):
                    if rule.window >= 0:
                        counts = self._windows[rule.window].counts
                        counts.pend(member, counts.bucket, TAKES_BACK)
            return True
        return all([self._has_left(member, wanted(request), 0.0) for member in limited])

    def report(self, most: int) -> list[CountDelta]:
        """Return the counts since the last sync round, for at most `most` members in each window."""
        found = []
        for window, counts in enumerate(self._windows):
            found += counts.report(most, partial(self._reserve, window))
        return found

    def usage(self) -> list[NodeUsage]:
        """Return the requests under way here, of members with a limit on concurrent requests."""
        quotas = self.quotas
        rows = [NodeUsage(member, SEQUENCES, requests) for member, requests in quotas.under_way.items()]
        return [row for row in rows if any([rule.window < 0 for rule in quotas.rules(row.node)])]

    def receive(
        self, counted: Sequence[Counted], gateways: int, usage: Sequence[NodeUsage], *, is_forgotten: bool = False
    ) -> None:
        """Take the counts of all `gateways` together, and the requests under way at the others."""
        sums = iter(counted)
        for counts in self._windows:
            counts.receive(sums, is_forgotten=is_forgotten)
        self._gateways = max(self._workers, gateways)
        self.quotas.may_have = None
        self.quotas.under_way_elsewhere = {row.node: int(row.amount) for row in usage}

    def cut_off(self, *, refuses: bool) -> None:
        """Keep to an equal part of what was left of each limit over time, while no reply comes from the store.

        `refuses`: reject every request of a member with a limit.
        """

        def may_have(member: str, more: Measures) -> bool:
            return not refuses and self._has_left(member, more, 1 / self._gateways)

        self.quotas.may_have = may_have

    def _has_left(self, member: str, more: Measures, part: float) -> bool:
        """Return whether these amounts are reserved or, with a `part` above 0, fit into that part of what was left."""
        for rule in self.quotas.rules(member):
            if rule.window >= 0:
                own, known, is_known = self._windows[rule.window].read_counts(member, rule.place)
                if own + more[rule.place] > (rule.most - known) * part or not (is_known or part):
                    return False
        return True

    def _reserve(self, window: int, member: Hashable) -> Measures:
        """Return the amounts to reserve: a small part of what is left, or nothing while that is not known."""
        parts = [*NOTHING]
        for rule in self.quotas.rules(str(member)):
            if rule.window == window:
                own, known, is_known = self._windows[window].read_counts(member, rule.place)
                parts[rule.place] = is_known * max(0, int((rule.most - known - own) / (RESERVED * self._gateways)))
        return _measures(parts)


def _measures(each: list[int]) -> Measures:
    return each[0], each[1], each[2], each[3]


def _joined(member: Hashable) -> str:
    return "\x1f".join(member) if isinstance(member, tuple) else str(member)
