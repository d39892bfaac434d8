"""Which request is owed most service? Tenants by weight, then the (app, user) flows of a tenant, oldest request first.

Both levels use the same `Counters`. A tenant that opens fifty flows still has one tenant's fair share, divided by
fifty. The policy defines the unit of service; here it only accumulates. With `leads`, requests inside an open
interaction go before others, as long as their tenant and flow are not ahead by more than that lead.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping
from typing import Final

from policies.queue.counters import Counters, Member
from policies.request import Flow, Request

__all__ = ["Backlog", "FlowMember", "TenantMember"]

USUAL_RATE: Final = 0.05
PASSED_MAX: Final = 64
"""The oldest request of a flow is passed by later ones this often, then it goes first."""


class FlowMember(Member):
    """The waiting requests of one flow, oldest first. With leads, those inside an interaction are kept apart."""

    __slots__ = ("flow", "inside", "passed", "requests", "tenant")

    def __init__(self, flow: Flow, tenant: TenantMember) -> None:
        super().__init__((flow.app, flow.user))
        self.flow = flow
        self.tenant = tenant
        self.requests: OrderedDict[str, Request] = OrderedDict()
        self.inside: OrderedDict[str, Request] = OrderedDict()
        self.passed = 0
        """How often a later one of its requests went before the oldest."""

    def next(self) -> Request | None:
        """The oldest one that waits. One inside an interaction goes first."""
        return next(iter((self.inside or self.requests).values()), None)


class TenantMember(Member):
    """A tenant and its flows, and how many of its waiting requests are inside an interaction."""

    __slots__ = ("flows", "inside", "weight")

    def __init__(self, tenant: str, flows: Counters[FlowMember]) -> None:
        super().__init__((tenant,))
        self.flows = flows
        self.weight = 1.0
        self.inside = 0


class Backlog:
    """Every queued request, ordered by the service per weight of its tenant and flow.

    At most `flows_max` tenants and flows together are remembered, not counting those with something queued or running.
    `lift` and `quantum` are those of `Counters`, on both levels. A tenant's quantum counts service per weight. `leads`
    are the leads of a tenant and of a flow that have a waiting request inside an interaction, in the units of their
    counters.
    """

    def __init__(
        self, *, flows_max: int, lift: bool = True, quantum: float = 0.0, leads: tuple[float, float] | None = None
    ) -> None:
        self._flows_max = flows_max
        self._leads = leads
        self._lift = lift
        self.quantum = quantum
        self.tenants: Counters[TenantMember] = Counters(lift=lift, quantum=quantum)
        self._by_tenant: dict[str, TenantMember] = {}
        self._by_flow: dict[Flow, FlowMember] = {}
        self._requests = 0
        self.changed: dict[Member, None] | None = None
        """Members that were queued or charged, the oldest change first. The code that tells other gateways takes them
        out. Bounded: the oldest changes are dropped. None: no one takes them."""
        self.usual = self.usual_of_flow = 0.0
        """Final charge of a usual request, to its tenant and to its flow: moving averages."""

    def __len__(self) -> int:
        return self._requests

    def push(self, request: Request, *, front: bool = False, leads: bool = True) -> None:
        """Queue the request. `front`: it was dispatched and came back, so it goes first in its flow.

        `leads`: it may go before others if it is inside an interaction.
        """
        tenant = self._by_tenant.get(request.flow.tenant) or self._new_tenant(request.flow.tenant)
        tenant.weight = request.weight
        self.tenants.queued(tenant)  # first, so that making room for its flow does not forget the tenant
        flow = self._by_flow.get(request.flow) or self._new_flow(request.flow, tenant)
        tenant.flows.queued(flow)
        requests = flow.requests
        if leads and self._leads is not None and request.progress.inside:
            requests = flow.inside
            tenant.inside += 1
            self.tenants.leads(tenant, self._leads[0])
            tenant.flows.leads(flow, self._leads[1])
        requests[request.id] = request
        if front:
            requests.move_to_end(request.id, last=False)
        self._requests += 1
        if self.changed is not None:
            self._note_change(flow)

    def head(self) -> Request | None:
        """The next request of the least-served flow of the least-served tenant."""
        tenant = self.tenants.least()
        flow = tenant.flows.least() if tenant is not None else None
        return flow.next() if flow is not None else None

    def may_pass(self, request: Request, slack: tuple[float, float]) -> bool:
        """May this waiting request go instead of the head?

        Its tenant and flow have received at most so much more than those that they pass, and have no more running per
        weight. Inside a flow the oldest request is passed a bounded number of times, and none inside an interaction by
        one that is not.
        """
        flow = self._by_flow[request.flow]
        tenant, next_tenant = flow.tenant, self.tenants.least()
        if next_tenant is None:
            return False
        if tenant is not next_tenant and (
            tenant.counter - tenant.lead > next_tenant.counter - next_tenant.lead + slack[0]
            or tenant.running * next_tenant.weight > next_tenant.running * tenant.weight
        ):
            return False
        next_flow = tenant.flows.least()
        if next_flow is None or (
            flow is not next_flow
            and (
                flow.counter - flow.lead > next_flow.counter - next_flow.lead + slack[1]
                or flow.running > next_flow.running
            )
        ):
            return False
        requests = flow.inside or flow.requests
        return request.id in requests and (flow.passed < PASSED_MAX or next(iter(requests)) == request.id)

    def dispatch(self, request: Request) -> None:
        """Take the request out of the queue: it goes to a backend, and `end` will follow."""
        flow = self._by_flow[request.flow]
        is_oldest = next(iter(flow.inside or flow.requests)) == request.id
        flow.passed = 0 if is_oldest else flow.passed + 1
        self._take(request)
        flow.tenant.flows.dispatched(flow)
        self.tenants.dispatched(flow.tenant)

    def withdraw(self, request: Request) -> None:
        """Take the request out of the queue without service."""
        flow = self._take(request)
        flow.tenant.flows.withdrawn(flow)
        self.tenants.withdrawn(flow.tenant)
        self._forget_beyond(self._flows_max, flow.tenant.flows)

    def charge(self, request: Request, service: float, normalised: float | None = None) -> None:
        """Set the total service of a dispatched request. Its tenant and flow are charged the difference.

        `normalised`: total service for the flow, where the flows of a tenant are compared in another unit.
        """
        new = of_flow = service - request.progress.charged
        request.progress.charged = service
        if normalised is not None:
            of_flow = normalised - request.progress.normalised
            request.progress.normalised = normalised
        flow = self._by_flow[request.flow]
        flow.tenant.flows.charged(flow, of_flow)
        self.tenants.charged(flow.tenant, new / request.weight)
        if self.changed is not None:
            self._note_change(flow)

    def end(self, request: Request) -> None:
        """A dispatched request ended, or comes back to the queue by `push` with `front`."""
        flow = self._by_flow[request.flow]
        flow.tenant.flows.ended(flow)
        self.tenants.ended(flow.tenant)
        charged = request.progress.charged
        self.usual += USUAL_RATE * (charged / request.weight - self.usual)
        self.usual_of_flow += USUAL_RATE * ((request.progress.normalised or charged) - self.usual_of_flow)
        self._forget_beyond(self._flows_max, flow.tenant.flows)

    def reweigh(self, weights: Mapping[str, float]) -> None:
        """These tenants have these weights from now on. What they have received counts as it did."""
        for name, weight in weights.items():
            tenant = self._by_tenant.get(name)
            if tenant is not None:
                tenant.weight = weight

    def resume(self, before: Backlog, *, with_flows: bool) -> None:
        """Let tenants, and flows if asked, go on with the counters of another backlog, which count the same."""
        for name, known in before._by_tenant.items():
            tenant = self._by_tenant.get(name) or self._new_tenant(name)
            tenant.weight = known.weight
            self.tenants.resume(tenant, known)
        last = before.tenants.last_left
        self.tenants.last_left = None if last is None else self._by_tenant.get(last.name[0])
        self.usual = before.usual
        if not with_flows:
            return
        self.usual_of_flow = before.usual_of_flow
        for flow, theirs in before._by_flow.items():
            own = self._by_flow.get(flow) or self._new_flow(flow, self._by_tenant[flow.tenant])
            own.passed = theirs.passed
            own.tenant.flows.resume(own, theirs)
            last_flow = theirs.tenant.flows.last_left
            if last_flow is theirs:
                own.tenant.flows.last_left = own

    def explain(self, flow: Flow) -> dict[str, float]:
        """Counters of a flow, relative to the next one that waits. 0 is next, larger is further away."""
        tenant, member = self._by_tenant.get(flow.tenant), self._by_flow.get(flow)
        if tenant is None:
            return {"queued": 0.0, "running": 0.0}
        numbers = {
            "weight": tenant.weight,
            "tenant_ahead": tenant.counter - self.tenants.floor(),
            "tenant_queued": float(tenant.queued),
            "tenant_running": float(tenant.running),
        }
        if member is not None:
            numbers["flow_ahead"] = member.counter - tenant.flows.floor()
            numbers["queued"] = float(member.queued)
            numbers["running"] = float(member.running)
        return numbers

    def tenant(self, name: str) -> TenantMember | None:
        """The tenant of this name, if it is remembered."""
        return self._by_tenant.get(name)

    def tenant_names(self) -> list[str]:
        """Names of the tenants that are remembered now."""
        return list(self._by_tenant)

    def flow(self, flow: Flow) -> FlowMember | None:
        """This flow, if it is remembered."""
        return self._by_flow.get(flow)

    def remembered(self) -> int:
        """Tenants and flows in memory, waiting or not."""
        return len(self._by_tenant) + len(self._by_flow)

    def _note_change(self, flow: FlowMember) -> None:
        assert self.changed is not None
        self.changed[flow.tenant] = self.changed[flow] = None
        while len(self.changed) > self._flows_max + 2:
            del self.changed[next(iter(self.changed))]

    def _take(self, request: Request) -> FlowMember:
        """Take the request out of the queue, and return its flow."""
        flow = self._by_flow[request.flow]
        self._requests -= 1
        if self.changed is not None:
            self._note_change(flow)
        if not flow.inside or flow.inside.pop(request.id, None) is None:
            del flow.requests[request.id]
            return flow
        tenant = flow.tenant
        tenant.inside -= 1
        if not flow.inside:
            tenant.flows.leads(flow, 0.0)
        if not tenant.inside:
            self.tenants.leads(tenant, 0.0)
        return flow

    def _new_tenant(self, name: str) -> TenantMember:
        self._forget_beyond(self._flows_max - 2, None)
        tenant = TenantMember(name, Counters(lift=self._lift, quantum=self.quantum))
        self._by_tenant[name] = tenant
        return tenant

    def _new_flow(self, flow: Flow, tenant: TenantMember) -> FlowMember:
        self._forget_beyond(self._flows_max - 1, tenant.flows)
        member = FlowMember(flow, tenant)
        self._by_flow[flow] = member
        return member

    def _forget_beyond(self, remembered_max: int, flows: Counters[FlowMember] | None) -> None:
        """Forget what has been idle longest: one of these flows if possible, else a tenant with all its flows."""
        while len(self._by_tenant) + len(self._by_flow) > remembered_max:
            flow = flows.forget_longest_idle() if flows is not None else None
            if flow is not None:
                del self._by_flow[flow.flow]
                continue
            tenant = self.tenants.forget_longest_idle()
            if tenant is None:
                return
            del self._by_tenant[tenant.name[0]]
            while (flow := tenant.flows.forget_longest_idle()) is not None:
                del self._by_flow[flow.flow]
            tenant.flows.last_left = None  # else its flow and it would keep each other, and nothing looks for cycles
