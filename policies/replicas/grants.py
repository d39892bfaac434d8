"""What does one gateway among several tell the others, and what does it make of what it hears?

Each owns part of every backend (`Grant`) until the next exchange, and dispatches within it without asking. What comes
free is used again by whoever freed it, unless one that waits elsewhere has received less, by more than some usual
requests: then it is handed back with the next exchange, and goes there.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from policies.capacity.fair_shares import Shares
from policies.capacity.ledger import BackendLedger
from policies.limits.sliding_counts import Count, hear
from policies.orders.contract import Policy
from policies.queue.counters import Member
from policies.replicas.messages import Charge, Grant, Heard, Standing, Told
from policies.request import Request

__all__ = ["Replica"]

TALLIES_MAX = 256
"""Members of each population that others hear of at a time."""
WAITS_S = 0.3
"""Who waited elsewhere so long ago is no reason to hold back."""
AHEAD_S = 0.1
"""Where the order is that of arrival, somebody may go before one elsewhere who came so much earlier."""


class Replica:
    """One gateway's side of the exchange, for one engine."""

    def __init__(
        self, policy: Policy, backends: Mapping[str, BackendLedger], shares: Shares, *, epoch_s: float
    ) -> None:
        """`epoch_s`: by how much a clock that all gateways have in common is ahead of this one's."""
        self._epoch_s = epoch_s
        self._populations = policy.share_counts(epoch_s)
        self._counts: list[Count] = []
        self._backlog = policy.backlog()
        if self._backlog is not None:
            self._backlog.share()
        self._backends = backends
        self._shares = shares
        self._next_elsewhere: Standing | None = None
        self._told_s = self._heard_s = float("-inf")
        self._members: Sequence[Member] = ()
        self._charges: Sequence[Charge] = ()
        for ledger in backends.values():
            ledger.grant = Grant(0, 0)

    def is_ahead(self, request: Request, now: float) -> bool:
        """Does one that waits elsewhere go before it?"""
        elsewhere = self._next_elsewhere
        if elsewhere is None or now > self._heard_s + WAITS_S:
            return False
        if self._backlog is None:
            return request.arrived_s + self._epoch_s > elsewhere.served + AHEAD_S
        return self._backlog.is_ahead(request.flow, elsewhere)

    def is_news(self, request: Request) -> bool:
        """Has it come since the others were told?"""
        return request.arrived_s >= self._told_s

    def tell(self, head: Request | None, waiting: int, now: float) -> Told:
        """What the others are to know. `head`: the next one of those that wait, `waiting` in all."""
        self._told_s = now
        backlog, shares = self._backlog, self._shares
        if backlog is None:
            standings = [] if head is None else [Standing("", "", head.arrived_s + self._epoch_s, 0.0)]
        else:
            standings = backlog.standings()
            self._members, self._charges = backlog.tell()
        spare, absent = head is not None and shares.is_below(head), shares.someone_is_absent()
        holdings = [
            ledger.holding(head, waiting, now, spare=spare, absent=absent) for ledger in self._backends.values()
        ]
        self._counts, tallies = [], []
        for population in self._populations:
            counts, of_population = population.tell(TALLIES_MAX)
            self._counts += counts
            tallies += of_population
        return Told(standings, shares.presence(), holdings, list(self._charges), tallies, [], [])

    def hear(self, heard: Heard, asked_s: float) -> None:
        """What came of what was told last, asked at this time."""
        self._heard_s = asked_s
        self._next_elsewhere = heard.next_elsewhere
        self._shares.elsewhere(heard.presence, {standing.tenant for standing in heard.standings})
        if self._backlog is not None:
            self._backlog.hear(self._members, self._charges, heard.totals)
            self._backlog.waits_elsewhere(heard.standings)
        self._members = self._charges = ()
        hear(self._counts, heard.counted)
        for ledger, grant in zip(self._backends.values(), heard.grants, strict=True):
            ledger.granted(grant, asked_s)

    def cut_off(self) -> None:
        """The others cannot be heard: go on alone, with what was ours of late."""
        self._next_elsewhere = None
        if self._backlog is not None:
            self._backlog.waits_elsewhere(())
        for ledger in self._backends.values():
            ledger.cut_off()
