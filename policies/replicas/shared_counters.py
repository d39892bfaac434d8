"""Service counters of tenants and flows across several gateways: one gateway's reports, and the use of replies.

The store keeps one sum for each counter. A gateway reports its charges since its last report, and the reply has the new
sum. Each charge is therefore counted once, and none is lost. A tenant or flow that returns while nothing waits at any
gateway is lifted to the counter of the member that left last at any gateway, not only at this one. So idling banks no
credit across gateways either. Example: A left this gateway with counter 50, and B left another gateway later with 80.
When C returns here with counter 10, the store lifts it to 80.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import islice
from math import inf
from typing import Final, TypeVar

from policies.queue.backlog import TRIED, Backlog
from policies.queue.counters import CounterMember, Counters
from policies.queue.tenants_and_flows import FlowMember, TenantMember
from policies.replicas.messages import REPORTED_MAX, Charge, Departure, Standing, line_name
from policies.replicas.schedule import ALONE_S, IDLE_S, INTERVAL_S
from policies.request import BATCH, Flow, Request, is_batch

AHEAD: Final = 2.0
"""Lead, in usual requests, up to which a request may go before one that waits at another gateway. Without a tolerance a
free slot would pass back and forth between gateways. If it is more, the lead is the service that a waiting member
receives in AHEAD sync rounds: counters of other gateways are one round old, and with a narrower lead fast engines would
idle until the next reply. AHEAD is more than 1, so that the lead grows with the pace that it allows."""
AHEAD_S: Final = IDLE_S
"""Time by which a request may be younger than one of its flow at another gateway and still go first."""
OWED: Final = "\x1cowed"
"""Name of the counter of the service that all gateways owe batch. No tenant has such a name."""
GROWTH_S: Final = 10 * INTERVAL_S
"""Time over which the service received in a sync round is averaged."""


M = TypeVar("M", bound=CounterMember)


class _Growth:
    """Moving average of the service that a waiting tenant or flow receives between two rounds, over all gateways."""

    __slots__ = ("_members", "_sum", "usual")

    def __init__(self) -> None:
        self.usual = 0.0
        self._sum = 0.0
        self._members = 0

    def add(self, service: float) -> None:
        """Count the service of a waiting member since the last sync round."""
        self._sum += service
        self._members += 1

    def end(self, since_s: float) -> None:
        """End a sync round, `since_s` after the last one. Long rounds count more, because they need the lead.

        Service received while the gateway was alone counts as 0.
        """
        mean = self._sum / self._members if self._members and since_s <= ALONE_S else 0.0
        self.usual += min(1.0, max(0.0, since_s) / GROWTH_S) * (max(0.0, mean) - self.usual)
        self._sum = 0.0
        self._members = 0


class SharedCounters:
    """A gateway's side of the sync rounds about its backlog."""

    def __init__(self, backlog: Backlog, *, epoch_s: float) -> None:
        backlog.changed = {}
        self._backlog = backlog
        self.quantum = backlog.quantum
        """Size of a round in service units; 0 if the order has no rounds."""
        self._epoch_s = epoch_s
        self._waiting_elsewhere: list[TenantMember] = []
        """Tenants that are known here and also wait at other gateways."""
        self._reported: list[tuple[CounterMember, float | None]] = []
        """Members of the last report, each with its counter before; None for a member that was reported for the first
        time or that the store may lift."""
        self._owed = 0.0
        """Service that all gateways owe batch, as of the last reply."""
        self._growth = _Growth()
        self._growth_of_flows = _Growth()
        self._last_left: Departure | None = None
        self._to_report_again: Iterator[str] = iter(())

    def standings(self, now: float) -> list[Standing]:
        """Return the standings of the tenants that go next, with the next flow of each.

        The last standing is that of the first start without room in the working set.
        """
        tenants = [tenant for line in self._backlog.lines() for tenant in line.first(TRIED, within=inf)]
        flows = [tenant.flows.least() for tenant in tenants[:TRIED]]
        standings = [self._standing(flow, now) for flow in flows if flow is not None]
        held, start = self._held(), self._backlog.first_start()
        standings.append(self._standing(held, now, start) if held is not None else None)
        return [standing for standing in standings if standing is not None]

    def is_ahead(self, flow: Flow, elsewhere: Standing, now: float) -> bool:
        """Return whether this flow has received more than a flow at another gateway, beyond the tolerance (`AHEAD`).

        A flow that waits at both places has one counter, so the arrival of its requests decides. `now`: the time of
        the reply that named the other flow.
        """
        backlog = self._backlog
        member = backlog.flow(flow)
        own = self._standing(member, now) if member is not None else None
        if own is None:
            return False
        if own.flow == elsewhere.flow:
            return elsewhere.is_earlier(own, by_s=AHEAD_S)
        if is_batch(own.tenant) != is_batch(elsewhere.tenant):
            # Owed batch goes before other work, but not before batch elsewhere that has received less.
            least = backlog.batch.least_counter_elsewhere() if own.is_owed else inf
            return elsewhere.goes_first(own) or own.served - least > self._tolerated(backlog.usual, self._growth)
        if own.tenant == elsewhere.tenant:
            tolerated = self._tolerated(backlog.usual_of_flow, self._growth_of_flows)
            return own.flow_served - elsewhere.flow_served > tolerated
        return own.served - elsewhere.served > self._tolerated(backlog.usual, self._growth)

    def _tolerated(self, usual_request: float, growth: _Growth) -> float:
        return max(AHEAD * usual_request, self._backlog.quantum, AHEAD * growth.usual)

    def report(self, now: float) -> tuple[list[Charge], list[Departure]]:
        """Return the charges since the last sync round, and the members that left.

        The charges also name tenants and flows that go next without a new charge, so that the reply has their sums: of
        `2 * TRIED` tenants in each line, and of `TRIED` flows of each of the first `TRIED`.
        """
        backlog = self._backlog
        changed = backlog.changed if backlog.changed is not None else {}
        asked = dict.fromkeys(islice(changed, REPORTED_MAX))
        for member in asked:
            del changed[member]
        for line in backlog.lines():
            for place, tenant in enumerate(line.first(2 * TRIED, within=inf)):
                asked[tenant] = None
                if place < TRIED:
                    asked.update(dict.fromkeys(tenant.flows.first(TRIED, within=inf)))
        held = self._held()
        if held is not None:
            asked[held.tenant] = asked[held] = None
        charges: list[Charge] = []
        self._reported = reported = []
        for member in asked:
            is_known = member.reported is not None and not member.is_sole
            charge = _charge(member)
            charges.append(charge)
            reported.append((member, charge.base if is_known else None))
        if backlog.batch.waits_anywhere:
            charges.append(Charge(OWED, self._owed, backlog.newly_owed, raises=False))
            backlog.newly_owed = 0.0
        return charges, self._lefts(asked, now)

    def receive(self, totals: Sequence[float], left: Departure | None, since_s: float, *, is_forgotten: bool) -> None:
        """Take the sums of all gateways for the reported counters, with the lifts that the store applied.

        `since_s`: the time between the last report and the one before it.
        """
        for (member, before), total in zip(self._reported, totals, strict=False):
            if before is not None and member.queued:
                (self._growth_of_flows if isinstance(member, FlowMember) else self._growth).add(total - before)
            counter, lifted = member.reported
            correction = total - counter
            member.reported = total, lifted
            if isinstance(member, FlowMember):
                member.tenant.flows.charged(member, correction)
                _confirmed(member.tenant.flows, member)
            elif isinstance(member, TenantMember):
                member.line.charged(member, correction)
                _confirmed(member.line, member)
        if len(totals) > len(self._reported):
            self._owed = totals[-1]
            self._backlog.owed = self._owed + self._backlog.newly_owed
        self._reported = []
        self._growth.end(since_s)
        self._growth_of_flows.end(since_s)
        self._last_left = left
        if is_forgotten:
            self._to_report_again = iter(self._backlog.tenant_names())

    def wait_elsewhere(self, standings: Sequence[Standing], gateways: int = 1) -> None:
        """Set the standings at other gateways: an arrival here is lifted at most to the least counter there.

        `gateways`: number of gateways that count together, this one included.
        """
        self._backlog.sharers = gateways
        for tenant in self._waiting_elsewhere:
            tenant.flows.wait_elsewhere(None)
        self._waiting_elsewhere = []
        for line, name in ((self._backlog.tenants, ""), (self._backlog.batch, BATCH)):
            ranks = [(one.served, one.inside) for one in standings if line_name(one.tenant) == name]
            rank, is_preferred = min(ranks, default=(None, False))
            line.wait_elsewhere(rank, is_preferred=is_preferred)
        for standing in standings:
            tenant_here = self._backlog.tenant(standing.tenant)
            if tenant_here is not None:
                flows, served = tenant_here.flows, standing.flow_served
                if flows.least_elsewhere is None or served < flows.least_elsewhere:
                    flows.wait_elsewhere(served, is_preferred=standing.inside)
                self._waiting_elsewhere.append(tenant_here)

    def _held(self) -> FlowMember | None:
        """Return the flow of the first start that waits for the working set, or None."""
        start = self._backlog.first_start()
        return self._backlog.flow(start.flow) if start is not None else None

    def _standing(self, flow: FlowMember, now: float, start: Request | None = None) -> Standing | None:
        """Return the standing of a flow; None if nothing of it waits. `start`: a sleeping start to take instead."""
        request, tenant = start or flow.next(), flow.tenant
        if request is None:
            return None
        served, flow_served = tenant.line.rank(tenant), tenant.flows.rank(flow)
        return Standing(
            tenant.name[0], _name(flow), served, flow_served, now - request.arrived_s, request.id in flow.going_first,
            tenant.line is self._backlog.batch and self._backlog.owes_batch,
        )  # fmt: skip

    def _lefts(self, reported: dict[CounterMember, None], now: float) -> list[Departure]:
        """Return who left last: the tenant at any gateway as far as is known here, the batch node here, and flows here.

        Flows are those of the reported tenants.
        """
        left_s = now + self._epoch_s
        own = _left("", self._backlog.tenants, left_s, again=False)
        if own is not None:
            self._last_left = own
        lefts = [] if self._last_left is None else [self._last_left]
        of_batch = _left(BATCH, self._backlog.batch, left_s, again=False)
        if of_batch is not None:
            lefts.append(of_batch)
        again = set(islice(self._to_report_again, REPORTED_MAX))
        names = {member.name[0]: None for member in reported if isinstance(member, TenantMember)}
        for name in [*names, *sorted(again - names.keys())]:
            tenant = self._backlog.tenant(name)
            if tenant is None:
                continue
            left = _left(name, tenant.flows, left_s, again=name in again)
            if left is not None:
                lefts.append(left)
        return lefts


def _left(among: str, counters: Counters[M], now_s: float, *, again: bool) -> Departure | None:
    """Return the member that left last here; None if it is reported already. `again`: report it once more."""
    last = counters.last_left
    times, left_s = counters.reported or (0, 0.0)
    if last is None or (times == counters.times_left and not again):
        return None
    if times != counters.times_left:
        left_s = now_s
        counters.reported = counters.times_left, left_s
    return Departure(among, _name(last), last.counter, left_s)


def _confirmed(counters: Counters[M], member: M) -> None:
    """Mark a member's lift as counted at all gateways, unless the member has begun to wait anew since the report."""
    if not member.is_sole:
        counters.unconfirmed.pop(member.name, None)


def _charge(member: CounterMember) -> Charge:
    """Return the charge since the last report of this member, and count it as reported."""
    known, lifted = member.reported or (0.0, 0.0)
    base = known + member.lifted - lifted
    charge = Charge(_name(member), base, member.counter - base, member.lifted != lifted, member.is_sole)
    member.reported = member.counter, member.lifted
    member.is_sole = False
    return charge


def _name(member: CounterMember) -> str:
    """Return the name of a member's counter.

    The name begins with the tenant, so that no app or user name of a client can name another tenant's counter.
    """
    if isinstance(member, FlowMember):
        return "\x1f".join((member.tenant.name[0], *member.name))
    return member.name[0]
