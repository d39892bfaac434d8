"""Which request is owed most? Tenants by weight, then the (app, user) flows inside a tenant, oldest request first.

Two levels of the same `Line`: a tenant that opens fifty flows still has one tenant's share, divided by fifty.
What a unit of service is, is the policy's business; here it only accumulates. With `leads`, requests inside an open
interaction go before others, as long as their tenant and flow are not further ahead than that.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from itertools import islice
from math import inf

from policies.queue.counters import Line, Member
from policies.replicas.messages import Charge, Standing
from policies.request import Flow, Request

__all__ = ["Backlog"]

TOLD_MAX = 256
"""Tenants and flows that other gateways hear of at a time; those beyond have their turn next time."""
TENANTS_TOLD = 8
TENANTS_ASKED = 16
FLOWS_ASKED = 8
"""Of so many tenants that are next, and of so many flows of the first of them, it is asked what they got elsewhere."""
USUAL_RATE = 0.05
AHEAD = 2.0
"""By so many usual requests somebody may go before one who waits elsewhere: enough that a place that becomes free
is seldom handed back and forth."""


class _FlowMember(Member):
    """The requests of one flow that wait, oldest first; with leads, those inside an interaction are apart."""

    __slots__ = ("flow", "inside", "requests", "tenant")

    def __init__(self, flow: Flow, tenant: _TenantMember) -> None:
        super().__init__((flow.app, flow.user))
        self.flow = flow
        self.tenant = tenant
        self.requests: OrderedDict[str, Request] = OrderedDict()
        self.inside: OrderedDict[str, Request] = OrderedDict()


class _TenantMember(Member):
    """A tenant and its flows; how many of its waiting requests are inside an interaction."""

    __slots__ = ("flows", "inside", "weight")

    def __init__(self, tenant: str, flows: Line[_FlowMember]) -> None:
        super().__init__((tenant,))
        self.flows = flows
        self.weight = 1.0
        self.inside = 0


class Backlog:
    """Every queued request, ordered by what its tenant and flow have received per weight.

    Tenants and flows together are remembered up to `flows_max`, not counting those with something queued or running.
    `lift` and `quantum` are those of `Line`, on both levels; a tenant's quantum counts service per weight. `leads` are
    those of a tenant and of a flow that has a request inside an interaction waiting, each in the unit of its counter.
    """

    def __init__(
        self, *, flows_max: int, lift: bool = True, quantum: float = 0.0, leads: tuple[float, float] | None = None
    ) -> None:
        self._flows_max = flows_max
        self._leads = leads
        self._lift = lift
        self._quantum = quantum
        self._line: Line[_TenantMember] = Line(lift=lift, quantum=quantum)
        self._tenants: dict[str, _TenantMember] = {}
        self._flows: dict[Flow, _FlowMember] = {}
        self._requests = 0
        self._untold: dict[Member, None] | None = None
        """Whose counters changed since other gateways heard of them, those that wait longest first; None: no others."""
        self._elsewhere: list[_TenantMember] = []
        """Tenants that wait at other gateways too."""
        self._usual = self._usual_of_flow = 0.0
        """What a request is charged in the end, to its tenant and to its flow."""

    def __len__(self) -> int:
        return self._requests

    def push(self, request: Request, *, front: bool = False, leads: bool = True) -> None:
        """Queue it. `front`: it was dispatched and came back, so it goes first in its flow.

        `leads`: it may go before others if it is inside an interaction.
        """
        tenant = self._tenants.get(request.flow.tenant) or self._new_tenant(request.flow.tenant)
        tenant.weight = request.weight
        self._line.queued(tenant)  # first, so that making room for its flow does not forget it
        flow = self._flows.get(request.flow) or self._new_flow(request.flow, tenant)
        tenant.flows.queued(flow)
        requests = flow.requests
        if leads and self._leads is not None and request.inside:
            requests = flow.inside
            tenant.inside += 1
            self._line.leads(tenant, self._leads[0])
            tenant.flows.leads(flow, self._leads[1])
        requests[request.id] = request
        if front:
            requests.move_to_end(request.id, last=False)
        self._requests += 1
        if self._untold is not None:
            self._changed(flow)

    def head(self) -> Request | None:
        """The oldest request of the least-served flow of the least-served tenant; one inside an interaction first."""
        tenant = self._line.least()
        flow = tenant.flows.least() if tenant is not None else None
        return next(iter((flow.inside or flow.requests).values())) if flow is not None else None

    def dispatch(self, request: Request) -> None:
        """Take it out of the queue: it goes to a backend, and `end` will follow."""
        flow = self._take(request)
        flow.tenant.flows.dispatched(flow)
        self._line.dispatched(flow.tenant)

    def withdraw(self, request: Request) -> None:
        """Take it out of the queue: nobody wants it any more."""
        flow = self._take(request)
        flow.tenant.flows.withdrawn(flow)
        self._line.withdrawn(flow.tenant)
        self._forget_beyond(self._flows_max, flow.tenant.flows)

    def charge(self, request: Request, service: float, normalised: float | None = None) -> None:
        """The service of a dispatched request is this much in all; tenant and flow are charged what is new in it.

        `normalised`: what the flow is charged instead, where the flows of a tenant are compared in another unit.
        """
        new = of_flow = service - request.charged
        request.charged = service
        if normalised is not None:
            of_flow = normalised - request.normalised
            request.normalised = normalised
        flow = self._flows[request.flow]
        flow.tenant.flows.charged(flow, of_flow)
        self._line.charged(flow.tenant, new / request.weight)
        if self._untold is not None:
            self._changed(flow)

    def end(self, request: Request) -> None:
        """A dispatched request is over (or comes back to the queue by `push` with `front`)."""
        flow = self._flows[request.flow]
        flow.tenant.flows.ended(flow)
        self._line.ended(flow.tenant)
        if self._untold is not None:
            self._usual += USUAL_RATE * (request.charged / request.weight - self._usual)
            self._usual_of_flow += USUAL_RATE * ((request.normalised or request.charged) - self._usual_of_flow)
        self._forget_beyond(self._flows_max, flow.tenant.flows)

    def waiting_of(self, tenant: str) -> int:
        """How many requests of this tenant wait?"""
        member = self._tenants.get(tenant)
        return member.queued if member is not None else 0

    def explain(self, flow: Flow) -> dict[str, float]:
        """Counters of a flow, relative to the next one of those waiting: 0 is next, more is further away."""
        tenant, member = self._tenants.get(flow.tenant), self._flows.get(flow)
        if tenant is None:
            return {"queued": 0.0, "running": 0.0}
        numbers = {
            "weight": tenant.weight,
            "tenant_ahead": tenant.counter - self._line.floor(),
            "tenant_queued": float(tenant.queued),
            "tenant_running": float(tenant.running),
        }
        if member is not None:
            numbers["flow_ahead"] = member.counter - tenant.flows.floor()
            numbers["queued"] = float(member.queued)
            numbers["running"] = float(member.running)
        return numbers

    def remembered(self) -> int:
        """Tenants and flows in memory, waiting or not."""
        return len(self._tenants) + len(self._flows)

    # --- with other gateways ---

    def share(self) -> None:
        """From now on there may be others, who are told what is charged here."""
        self._untold = {}

    def _changed(self, flow: _FlowMember) -> None:
        """Others are to hear of it. While nobody can be told, those that changed longest ago are given up first."""
        if self._untold is None:
            return
        self._untold[flow.tenant] = self._untold[flow] = None
        while len(self._untold) > self._flows_max + 2:
            del self._untold[next(iter(self._untold))]

    def standings(self) -> list[Standing]:
        """How much have those received that are next, one of each tenant?"""
        found = []
        for tenant in self._line.first(TENANTS_TOLD, within=inf):
            flow = tenant.flows.least()
            if flow is not None:
                served, flow_served = tenant.counter - tenant.lead, flow.counter - flow.lead
                found.append(Standing(tenant.name[0], _shared_name(flow), served, flow_served))
        return found

    def waits_elsewhere(self, standings: Sequence[Standing]) -> None:
        """Those that are next at other gateways: who comes here is not raised above one that waits there."""
        for tenant in self._elsewhere:
            tenant.flows.least_elsewhere = None
        self._elsewhere = []
        self._line.least_elsewhere = min([standing.served for standing in standings], default=None)
        for name, _, _, served in standings:
            tenant_here = self._tenants.get(name)
            if tenant_here is not None:
                flows = tenant_here.flows
                flows.least_elsewhere = served if flows.least_elsewhere is None else min(served, flows.least_elsewhere)
                self._elsewhere.append(tenant_here)

    def is_ahead(self, flow: Flow, elsewhere: Standing) -> bool:
        """Has this flow received more than one that waits elsewhere, by more than some usual requests?"""
        tenant, member = self._tenants[flow.tenant], self._flows[flow]
        if flow.tenant == elsewhere.tenant:
            ahead = member.counter - member.lead - elsewhere.flow_served
            return ahead > max(AHEAD * self._usual_of_flow, self._quantum)
        return tenant.counter - tenant.lead - elsewhere.served > max(AHEAD * self._usual, self._quantum)

    def tell(self) -> tuple[list[Member], list[Charge]]:
        """What was charged since the last time, and who else it is asked of: those that are next."""
        untold = self._untold if self._untold is not None else {}
        asked = dict.fromkeys(islice(untold, TOLD_MAX))
        for member in asked:
            del untold[member]
        for place, tenant in enumerate(self._line.first(TENANTS_ASKED, within=inf)):
            asked[tenant] = None
            if place < FLOWS_ASKED:
                asked.update(dict.fromkeys(tenant.flows.first(FLOWS_ASKED, within=inf)))
        charges = []
        for member in asked:
            service = member.counter - member.base
            charges.append(Charge(_shared_name(member), member.base, service, member.is_raised))
            member.base, member.is_raised = member.counter, False
        return list(asked), charges

    def hear(self, members: Sequence[Member], charges: Sequence[Charge], totals: Sequence[float]) -> None:
        """What all gateways together charged them, as of what was told."""
        for member, charge, total in zip(members, charges, totals, strict=True):
            told = charge.base + charge.service
            if isinstance(member, _FlowMember):
                member.tenant.flows.heard(member, total, told)
            elif isinstance(member, _TenantMember):
                self._line.heard(member, total, told)

    def _take(self, request: Request) -> _FlowMember:
        """Out of the queue; its flow."""
        flow = self._flows[request.flow]
        self._requests -= 1
        if not flow.inside or flow.inside.pop(request.id, None) is None:
            del flow.requests[request.id]
            return flow
        tenant = flow.tenant
        tenant.inside -= 1
        if not flow.inside:
            tenant.flows.leads(flow, 0.0)
        if not tenant.inside:
            self._line.leads(tenant, 0.0)
        return flow

    def _new_tenant(self, name: str) -> _TenantMember:
        self._forget_beyond(self._flows_max - 2, None)
        tenant = _TenantMember(name, Line(lift=self._lift, quantum=self._quantum))
        self._tenants[name] = tenant
        return tenant

    def _new_flow(self, flow: Flow, tenant: _TenantMember) -> _FlowMember:
        self._forget_beyond(self._flows_max - 1, tenant.flows)
        member = _FlowMember(flow, tenant)
        self._flows[flow] = member
        return member

    def _forget_beyond(self, remembered_max: int, flows: Line[_FlowMember] | None) -> None:
        """Forget who has been idle longest: one of these flows if there is any, else a tenant with all its flows."""
        while len(self._tenants) + len(self._flows) > remembered_max:
            flow = flows.forget_longest_idle() if flows is not None else None
            if flow is not None:
                del self._flows[flow.flow]
                continue
            tenant = self._line.forget_longest_idle()
            if tenant is None:
                return
            del self._tenants[tenant.name[0]]
            while (flow := tenant.flows.forget_longest_idle()) is not None:
                del self._flows[flow.flow]


def _shared_name(member: Member) -> str:
    """Tenants come first in a name, so that whatever a client calls its app and user stays within its tenant."""
    if isinstance(member, _FlowMember):
        return "\x1f".join((member.tenant.name[0], *member.name))
    return member.name[0]
