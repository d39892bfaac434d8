"""Which request is owed most? Tenants by weight, then the (app, user) flows inside a tenant, oldest request first.

Two levels of the same `Line`: a tenant that opens fifty flows still has one tenant's share, divided by fifty.
What a unit of service is, is the policy's business; here it only accumulates.
"""

from __future__ import annotations

from collections import OrderedDict

from policies.base import Flow, Request
from policies.line import Line, Member

__all__ = ["Backlog"]


class _FlowMember(Member):
    """The requests of one flow that wait, oldest first."""

    __slots__ = ("requests",)

    def __init__(self, name: tuple[str, ...]) -> None:
        super().__init__(name)
        self.requests: OrderedDict[str, Request] = OrderedDict()


class _TenantMember(Member):
    """A tenant and its flows."""

    __slots__ = ("flows", "weight")

    def __init__(self, name: tuple[str, ...], flows: Line[_FlowMember]) -> None:
        super().__init__(name)
        self.flows = flows
        self.weight = 1.0


class Backlog:
    """Every queued request, ordered by what its tenant and flow have received per weight.

    Tenants and flows together are remembered up to `flows_max`, not counting those with something queued or running.
    """

    def __init__(self, *, flows_max: int) -> None:
        self._flows_max = flows_max
        self._tenants: Line[_TenantMember] = Line()
        self._requests = 0
        self._remembered = 0

    def __len__(self) -> int:
        return self._requests

    def push(self, request: Request, *, front: bool = False) -> None:
        """Queue it. `front`: it was dispatched and came back, so it goes first in its flow."""
        tenant = self._tenant(request.flow)
        flow = self._flow(tenant, request.flow)
        tenant.weight = request.weight
        self._tenants.queued(tenant)
        tenant.flows.queued(flow)
        flow.requests[request.id] = request
        if front:
            flow.requests.move_to_end(request.id, last=False)
        self._requests += 1

    def head(self) -> Request | None:
        """The oldest request of the least-served flow of the least-served tenant."""
        tenant = self._tenants.least()
        flow = tenant.flows.least() if tenant is not None else None
        return next(iter(flow.requests.values())) if flow is not None else None

    def dispatch(self, request: Request) -> None:
        """Take it out of the queue: it goes to a backend, and `end` will follow."""
        tenant, flow = self._members(request.flow)
        del flow.requests[request.id]
        self._requests -= 1
        tenant.flows.dispatched(flow)
        self._tenants.dispatched(tenant)

    def withdraw(self, request: Request) -> None:
        """Take it out of the queue: nobody wants it any more."""
        tenant, flow = self._members(request.flow)
        del flow.requests[request.id]
        self._requests -= 1
        tenant.flows.withdrawn(flow)
        self._tenants.withdrawn(tenant)
        self._forget_beyond(self._flows_max, tenant.flows)

    def charge(self, request: Request, service: float) -> None:
        """The service of a dispatched request is this much in all; its flow is charged what is new in it."""
        new = service - request.charged
        if not new:
            return
        request.charged = service
        tenant, flow = self._members(request.flow)
        tenant.flows.charged(flow, new)
        self._tenants.charged(tenant, new / request.weight)

    def end(self, request: Request) -> None:
        """A dispatched request is over (or comes back to the queue by `push` with `front`)."""
        tenant, flow = self._members(request.flow)
        tenant.flows.ended(flow)
        self._tenants.ended(tenant)
        self._forget_beyond(self._flows_max, tenant.flows)

    def explain(self, flow: Flow) -> dict[str, float]:
        """Counters of a flow, relative to the least of those waiting: 0 is next, more is further away."""
        tenant = self._tenants.members.get((flow.tenant,))
        if tenant is None:
            return {"queued": 0.0, "running": 0.0}
        member = tenant.flows.members.get((flow.app, flow.user))
        numbers = {
            "weight": tenant.weight,
            "tenant_ahead": tenant.counter - self._tenants.floor(),
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
        return self._remembered

    def _members(self, flow: Flow) -> tuple[_TenantMember, _FlowMember]:
        tenant = self._tenants.members[(flow.tenant,)]
        return tenant, tenant.flows.members[(flow.app, flow.user)]

    def _tenant(self, flow: Flow) -> _TenantMember:
        name = (flow.tenant,)
        tenant = self._tenants.members.get(name)
        if tenant is None:
            tenant = _TenantMember(name, Line())
            self._forget_beyond(self._flows_max - 1, tenant.flows)
            self._tenants.add(tenant)
            self._remembered += 1
        return tenant

    def _flow(self, tenant: _TenantMember, flow: Flow) -> _FlowMember:
        name = (flow.app, flow.user)
        member = tenant.flows.members.get(name)
        if member is None:
            self._forget_beyond(self._flows_max - 1, tenant.flows)
            member = _FlowMember(name)
            tenant.flows.add(member)
            self._remembered += 1
        return member

    def _forget_beyond(self, remembered_max: int, line: Line[_FlowMember]) -> None:
        """Forget who has been idle longest: a flow of this line if it has one, else a tenant with all its flows."""
        while self._remembered > remembered_max:
            if line.forget_longest_idle() is None:
                tenant = self._tenants.forget_longest_idle()
                if tenant is None:
                    return
                self._remembered -= len(tenant.flows.members)
            self._remembered -= 1
