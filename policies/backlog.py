"""Which request is owed most? Tenants by weight, then the (app, user) flows inside a tenant, oldest request first.

Two levels of the same `Line`: a tenant that opens fifty flows still has one tenant's share, divided by fifty.
What a unit of service is, is the policy's business; here it only accumulates. With `leads`, requests inside an open
interaction go before others, as long as their tenant and flow are not further ahead than that.
"""

from __future__ import annotations

from collections import OrderedDict

from policies.base import Flow, Request
from policies.line import Line, Member

__all__ = ["Backlog"]


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

    def end(self, request: Request) -> None:
        """A dispatched request is over (or comes back to the queue by `push` with `front`)."""
        flow = self._flows[request.flow]
        flow.tenant.flows.ended(flow)
        self._line.ended(flow.tenant)
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
