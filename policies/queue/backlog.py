"""Which request is owed most service? Tenants by weight, then the (app, user) flows of a tenant, oldest request first.

Both levels use a `CounterHeap`. A tenant that opens fifty flows still has one tenant's fair share, divided by fifty.
The policy defines the unit of service; the backlog only accumulates it.

Batch work has a line of its own, beside the line of interactive tenants: it goes when no interactive request may. While
both lines wait, batch work is owed its guaranteed share of the service, and goes first as long as a usual request is
owed. So over such an interval it receives at least that share of the whole, less what is dispatched at once.

One window bounds on each level who may go before whom. The candidates are the members whose counter is at most the
window above the least waiting one. Of these, members with a call inside an interaction go first, and otherwise the
least. Inside a flow requests go in order of arrival, but a call inside an interaction or a request with a
cached prompt may pass all older ones. The window there is a number of requests: once `CALLS_PASSED` newer requests have
passed the oldest one, nothing passes it. So no request is passed by more than `CALLS_PASSED` of its own flow.

Requests that cannot start for a reason of their own *sleep*, so that they hold up no others: a start until the working
set has room, and a tenant until a full node of the tree, or the tenant's part of the prefill, has room.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Callable, Iterator
from heapq import nsmallest
from itertools import islice
from math import inf
from operator import attrgetter, itemgetter
from typing import Final

from policies.averages import USUAL
from policies.queue.counters import CounterHeap, CounterMember
from policies.queue.tenants_and_flows import FlowMember, TenantMember, start_sort_key
from policies.request import Flow, Request, is_batch

_counter: Final = attrgetter("counter")
TRIED: Final = 8
"""Bound of the search for alternatives to the next request. A search by tenant reads half as many of each class."""


class Backlog:
    """Every queued request, ordered by the service per weight of its tenant and flow.

    Nothing wakes a sleeper by itself: each call of `schedule` asks again whether there is room.

        without room in             sleeps           in        is woken by
        a full node of the tree     tenant           `full`    `wake_at`
        a tenant's prefill part     tenant           `full`    `wake_at`
        the working set             single start     `starts`  `wake_starts`

    Idle tenants and flows are forgotten while more than `flows_max` tenants and flows together are remembered.
    `quantum` is that of a `CounterHeap`, on both levels. A tenant's quantum counts service per weight.
    `windows`: those of tenants and of flows, in the units of their counters.
    """

    def __init__(self, *, flows_max: int, quantum: float = 0.0, windows: tuple[float, float] = (0.0, 0.0)) -> None:
        self.batch_share = 0.0
        """Share of the service that batch work is guaranteed while interactive work waits."""
        self.owed = 0.0
        """Service that interactive work owes to batch work, at all gateways together."""
        self.newly_owed = 0.0
        """Part of `owed` that is not yet reported to other gateways."""
        self._flows_max = flows_max
        self._window_of_flows = windows[1]
        self.quantum = quantum
        self.tenants: CounterHeap[TenantMember] = CounterHeap(quantum=quantum, window=windows[0])
        self.batch: CounterHeap[TenantMember] = CounterHeap(quantum=quantum, window=windows[0])
        """Tenant nodes of batch work."""
        self._by_tenant: dict[str, TenantMember] = {}
        self._by_flow: dict[Flow, FlowMember] = {}
        self.queued = 0
        self.sharers = 1
        """Gateways that count these tenants together."""
        self.starts: dict[TenantMember, list[tuple[bool, bool, float, str, Request]]] = {}
        """Starts that sleep until the working set has room for them, by tenant, in order: calls of parked interactions
        before others, single questions before agents, then by arrival."""
        self.full: dict[str | TenantMember, dict[TenantMember, None]] = {}
        """Sleeping tenants by the name of the full node of the tree; by themselves if their prefill part is used up."""
        self.changed: dict[CounterMember, None] | None = None
        """Members to report to other gateways. The oldest changes are dropped. None if nothing is reported."""
        self.usual = self.usual_of_flow = self.usual_service = 0.0
        """Moving averages of a request's final charge: to its tenant (per weight), to its flow, and before the division
        by weight."""

    def __len__(self) -> int:
        return self.queued

    def push(self, request: Request, *, front: bool = False, is_inside: bool = False, goes_first: bool = False) -> None:
        """Queue the request.

        `front`: it goes first in its flow, because it was queued before. `is_inside`: it goes before the starts of its
        flow. `goes_first`: its flow and tenant go before others, within the window.
        """
        tenant = self._by_tenant.get(request.flow.tenant) or self._new_tenant(request.flow.tenant)
        tenant.weight = request.weight
        tenant.going_first += goes_first
        # Before the flow is created, so that making room for the flow does not forget the tenant.
        tenant.line.queued(tenant, preferred=tenant.going_first > 0)
        flow = self._by_flow.get(request.flow) or self._new_flow(request.flow, tenant)
        flow.add(request, is_inside=is_inside, front=front)
        if goes_first:
            flow.going_first.add(request.id)
        tenant.flows.queued(flow, preferred=len(flow.going_first) > 0)
        if flow.is_asleep or tenant.is_asleep:
            self._woke(flow)
        self.queued += 1
        if self.changed is not None:
            self._note_change(flow)

    def head(self) -> Request | None:
        """Return the next request of the next flow of the next tenant that is awake, or None."""
        for line in self.lines():
            tenant = line.least()
            if tenant is not None:
                return self._next_of(tenant)
        return None

    def _next_of(self, tenant: TenantMember) -> Request | None:
        """Return the next request of a tenant, asleep or not; None if only sleeping starts wait."""
        flow = tenant.flows.least()
        return flow.next() if flow is not None else None

    def lines(self) -> tuple[CounterHeap[TenantMember], CounterHeap[TenantMember]]:
        """Return the counters of both classes, in the order in which the classes go."""
        return (self.batch, self.tenants) if self.owes_batch else (self.tenants, self.batch)

    def _owe(self, service: float) -> None:
        """Add to the service owed to batch work, capped at two usual requests."""
        if service > 0.0:
            service = min(service, max(0.0, 2.0 * self.usual_service - self.owed))
        self.owed += service
        self.newly_owed += service

    @property
    def owes_batch(self) -> bool:
        """Return whether batch work goes first, because more than a usual request is owed to it."""
        return self.owed > self.usual_service

    # --- sleep ---

    def sleep_start(self, start: Request) -> None:
        """Let a start sleep for which the working set has no room. Other requests of its flow may go."""
        flow = self._by_flow[start.flow]
        flow.tenant.going_first -= start.id in flow.going_first
        flow.sleep(start)
        insort(self.starts.setdefault(flow.tenant, []), (*start_sort_key(start), start))
        self._rest(flow)

    def wake_starts(self, has_room: Callable[[Request], bool]) -> None:
        """Wake the starts that have room in the working set, out of the first few of the few least served tenants."""
        for tenant in nsmallest(TRIED // 2, self.starts, key=_counter):
            starts = [one[-1] for one in self.starts[tenant][: TRIED // 2] if has_room(one[-1])]
            for start in starts:
                flow = self._by_flow[start.flow]
                self._forget_start(flow, start)
                tenant.going_first += flow.wake(start)
                self._woke(flow)

    def has_sleeping_starts(self, tenant: str) -> bool:
        """Return whether starts of this tenant sleep."""
        return bool(self.starts) and self._by_tenant.get(tenant) in self.starts

    def first_start(self) -> Request | None:
        """Return the first sleeping start of the least served tenant, interactive if possible.

        The working set keeps its free room for that start.
        """
        tenants = [tenant for tenant in self.starts if tenant.line is self.tenants] or self.starts
        least = min(tenants, key=_counter, default=None)
        return self.starts[least][0][-1] if least is not None else None

    def may_pass_starts(self, tenant: str) -> bool:
        """Return whether a tenant is within the window above all of its class with starts, here and elsewhere."""
        own = self._by_tenant.get(tenant)
        if own is None:
            return True
        least = min([one.counter for one in self.starts if one.line is own.line], default=inf)
        return own.line.is_within(own, min(least, own.line.least_counter_elsewhere()))

    def sleep_at(self, request: Request, node: str) -> None:
        """Let the request's tenant sleep until `wake_at` finds room.

        `node`: the full node; "" if the tenant's prefill part is used up. Then the tenant still bounds the floor.
        """
        tenant = self._by_flow[request.flow].tenant
        key = tenant.full = node or tenant
        self.full.setdefault(key, {})[tenant] = None
        tenant.line.sleep(tenant, is_absent=node != "", is_floor=node == "")

    def wake_at(self, has_room: Callable[[Request], bool]) -> None:
        """Wake the least served tenant of each class under each name that has room for its next request again."""
        for key, tenant, request in self._first_at_nodes():
            if not has_room(request):
                continue
            # A tenant at its ceiling banks no credit, except for the request that replaces the one that ended.
            line = tenant.line
            by = line.find_floor() - self.usual - tenant.counter
            for one in [one for one in self.full[key] if one.line is line and by > 0.0]:
                one.counter += by
                one.lifted += by
            self._leave_node(tenant)
            line.wake(tenant)

    def sleeping_heads(self, *, has_one_engine: bool) -> list[tuple[Request, str]]:
        """Return the full nodes in order: the next request of the least served interactive tenant there, and the node.

        `has_one_engine`: the queue is that of one engine, where the next awake request holds up all that go after it.
        """
        line, head = self.tenants, self.tenants.least()
        most = line.rank(head) if has_one_engine and head is not None else inf
        found = [
            (line.rank(tenant), request, key)
            for key, tenant, request in self._first_at_nodes()
            if tenant.line is line and isinstance(key, str)
        ]
        return [(request, key) for rank, request, key in sorted(found, key=itemgetter(0)) if rank <= most]

    def asleep(self) -> Request | None:
        """Return the first sleeping start, or else the next request of a sleeping tenant; None if nothing sleeps."""
        first, sleeping = self.lines()[0], [(one, request) for _, one, request in self._first_at_nodes()]
        least = min(sleeping, key=lambda each: (each[0].line is not first, each[0].counter), default=None)
        return self.first_start() or (least[1] if least is not None else None)

    def _first_at_nodes(self) -> Iterator[tuple[str | TenantMember, TenantMember, Request]]:
        """Iterate over the names in `full`: the least served tenant of each class there, with its next request."""
        for key, tenants in [*self.full.items()]:
            for line in self.lines():
                tenant = min([one for one in tenants if one.line is line], key=_counter, default=None)
                request = self._next_of(tenant) if tenant is not None else None
                if tenant is not None and request is not None:
                    yield key, tenant, request

    def _leave_node(self, tenant: TenantMember) -> None:
        key, tenant.full = tenant.full, None
        assert key is not None
        tenants = self.full[key]
        del tenants[tenant]
        if not tenants:
            del self.full[key]

    def _forget_start(self, flow: FlowMember, start: Request) -> None:
        starts = self.starts[flow.tenant]
        del starts[bisect_left(starts, start_sort_key(start))]
        if not starts:
            del self.starts[flow.tenant]

    def _rest(self, flow: FlowMember) -> None:
        """Let a flow and its tenant sleep if only sleeping starts are left. Otherwise update who goes first."""
        tenant = flow.tenant
        if flow.queued and not flow.requests:
            tenant.flows.sleep(flow)
        else:
            tenant.flows.prefer(flow, len(flow.going_first) > 0)
        if not len(tenant.flows):
            if tenant.full is not None:
                self._leave_node(tenant)
            tenant.line.sleep(tenant)
        else:
            tenant.line.prefer(tenant, tenant.going_first > 0)

    def _woke(self, flow: FlowMember) -> None:
        """Wake a flow, and its tenant unless that sleeps in `full`. Update who goes first."""
        tenant = flow.tenant
        tenant.flows.wake(flow)
        tenant.flows.prefer(flow, len(flow.going_first) > 0)
        if tenant.full is None:
            tenant.line.wake(tenant)
        tenant.line.prefer(tenant, tenant.going_first > 0)

    def others(self, head: Request) -> Iterator[Request]:
        """Iterate over alternatives to a head without room: the next requests of a few tenants and flows, in order."""
        for tenant in (*self.tenants.first(TRIED // 2, within=inf), *self.batch.first(TRIED // 2, within=inf)):
            for flow in tenant.flows.first(2, within=inf):
                for request in islice(flow.requests.values(), 2):
                    if request is not head and flow.may_go(request):
                        yield request
                        break

    def may_pass(self, request: Request, head: Request) -> bool:
        """Return whether this waiting request may go instead of the head, because an engine has cached its prompt.

        The request, its flow and its tenant must be within the window. Only a request that goes first passes another
        that goes first.
        """
        flow, next_flow = self._by_flow[request.flow], self._by_flow[head.flow]
        tenant, next_tenant = flow.tenant, next_flow.tenant
        is_second = head.id in next_flow.going_first and request.id not in flow.going_first
        if is_second or tenant.line is not next_tenant.line:
            return False
        if tenant is not next_tenant:
            least = tenant.flows.least()
            if least is None or not tenant.line.may_pass(tenant, next_tenant):
                return False
            next_flow = least
        return tenant.flows.may_pass(flow, next_flow) and flow.may_go(request)

    def take(self, request: Request, *, is_served: bool = True) -> None:
        """Remove the request from the queue. `is_served`: it is dispatched, and `end` will follow."""
        flow = self._by_flow[request.flow]
        tenant = flow.tenant
        if request.id in flow.asleep:
            self._forget_start(flow, request)
        else:
            flow.requests[request.id]  # KeyError, and nothing has changed
        self.queued -= 1
        if self.changed is not None:
            self._note_change(flow)
        tenant.going_first -= request.id in flow.going_first
        flow.take(request, is_served=is_served)
        # A member that leaves the queue keeps its preference, because newcomers are raised to its rank.
        if flow.requests:
            tenant.flows.prefer(flow, len(flow.going_first) > 0)
        if tenant.queued > 1:
            tenant.line.prefer(tenant, tenant.going_first > 0)
        if tenant.full is not None and tenant.queued == 1:
            self._leave_node(tenant)
        tenant.flows.left(flow, is_served=is_served)
        tenant.line.left(tenant, is_served=is_served)
        if self.starts and tenant in self.starts:
            self._rest(flow)
        if not is_served:
            self._forget_beyond(self._flows_max, tenant.flows)

    def charge(self, request: Request, service: float, normalised: float | None = None) -> None:
        """Set the total service of a dispatched request. Charge the difference to its tenant and flow.

        `normalised`: total service for the flow, where the flows of a tenant are compared in a unit of their own.
        """
        new = of_flow = service - request.progress.charged
        request.progress.charged = service
        if normalised is not None:
            of_flow = normalised - request.progress.normalised
            request.progress.normalised = normalised
        flow = self._by_flow[request.flow]
        tenant = flow.tenant
        flow.counter += of_flow
        tenant.counter += new / request.weight
        if of_flow < 0.0 or new < 0.0:
            tenant.flows.fell(flow)
            tenant.line.fell(tenant)
        if self.batch.waits_anywhere and self.tenants.waits_anywhere:
            if tenant.line is self.tenants:
                self._owe(self.batch_share * new)
            else:
                # A refund creates no debt, because its charge may have come while only batch work waited.
                self._owe(min((self.batch_share - 1.0) * new, max(0.0, -self.owed)))
        if self.changed is not None:
            self._note_change(flow)

    def end(self, request: Request) -> None:
        """Count the end of a dispatched request. `push` with `front` follows if the request returns to the queue."""
        flow = self._by_flow[request.flow]
        flow.tenant.flows.ended(flow)
        flow.tenant.line.ended(flow.tenant)
        charged = request.progress.charged
        self.usual += USUAL * (charged / request.weight - self.usual)
        self.usual_service += USUAL * (charged - self.usual_service)
        self.usual_of_flow += USUAL * ((request.progress.normalised or charged) - self.usual_of_flow)
        self._forget_beyond(self._flows_max, flow.tenant.flows)

    def reweigh(self, name: str, known: float, weight: float) -> None:
        """Replace the weight of a tenant node, `known` before, and convert its lead to the new units.

        The lead is over the next tenant. If several gateways count a lead together, each gateway converts its part.
        """
        if known != weight and (tenant := self._by_tenant.get(name)) is not None:
            lead = max(0.0, tenant.line.rank(tenant) - tenant.line.find_floor())
            tenant.line.charged(tenant, lead * (known / weight - 1.0) / self.sharers)
            tenant.weight = weight
            if self.changed is not None:
                self.changed[tenant] = None

    def take_over(self, before: Backlog, *, with_flows: bool) -> None:
        """Copy the counters of tenants, and of flows if asked, from another backlog with equal units."""
        for name, known in before._by_tenant.items():
            tenant = self._by_tenant.get(name) or self._new_tenant(name)
            tenant.weight = known.weight
            tenant.line.take_over(tenant, known)
        for line, known_line in ((self.tenants, before.tenants), (self.batch, before.batch)):
            last = known_line.last_left
            line.last_left = None if last is None else self._by_tenant.get(last.name[0])
        self.usual, self.usual_service = before.usual, before.usual_service
        if not with_flows:
            return
        self.usual_of_flow = before.usual_of_flow
        for flow, theirs in before._by_flow.items():
            own = self._by_flow.get(flow) or self._new_flow(flow, self._by_tenant[flow.tenant])
            own.tenant.flows.take_over(own, theirs)
            last_flow = theirs.tenant.flows.last_left
            if last_flow is theirs:
                own.tenant.flows.last_left = own

    def explain(self, flow: Flow) -> dict[str, float]:
        """Return numbers on a flow and its tenant by name. `*_ahead`: distance from the member that goes next."""
        tenant, member = self._by_tenant.get(flow.tenant), self._by_flow.get(flow)
        if tenant is None:
            return {"queued": 0.0, "running": 0.0}
        numbers = {
            "weight": tenant.weight,
            "tenant_ahead": tenant.line.ahead(tenant),
            "tenant_queued": float(tenant.queued),
            "tenant_running": float(tenant.running),
        }
        if member is not None:
            numbers["flow_ahead"] = tenant.flows.ahead(member)
            numbers["queued"] = float(member.queued)
            numbers["running"] = float(member.running)
        return numbers

    def tenant(self, name: str) -> TenantMember | None:
        """Return the tenant of this name, if it is remembered."""
        return self._by_tenant.get(name)

    def tenant_names(self) -> list[str]:
        """Return the names of the remembered tenants."""
        return list(self._by_tenant)

    def flow(self, flow: Flow) -> FlowMember | None:
        """Return the member of this flow, if it is remembered."""
        return self._by_flow.get(flow)

    def remembered(self) -> int:
        """Return the number of tenants and flows in memory."""
        return len(self._by_tenant) + len(self._by_flow)

    def _note_change(self, flow: FlowMember) -> None:
        assert self.changed is not None
        self.changed[flow.tenant] = self.changed[flow] = None
        while len(self.changed) > self._flows_max + 2:
            del self.changed[next(iter(self.changed))]

    def _new_tenant(self, name: str) -> TenantMember:
        self._forget_beyond(self._flows_max - 2, None)
        flows: CounterHeap[FlowMember] = CounterHeap(quantum=self.quantum, window=self._window_of_flows)
        line = self.batch if is_batch(name) else self.tenants
        tenant = self._by_tenant[name] = TenantMember(name, line, flows)
        return tenant

    def _new_flow(self, flow: Flow, tenant: TenantMember) -> FlowMember:
        self._forget_beyond(self._flows_max - 1, tenant.flows)
        member = self._by_flow[flow] = FlowMember(flow, tenant)
        return member

    def _forget_beyond(self, remembered_max: int, flows: CounterHeap[FlowMember] | None) -> None:
        """Forget the members idle for longest: one of `flows` if possible, else a tenant with all its flows."""
        while len(self._by_tenant) + len(self._by_flow) > remembered_max:
            flow = flows.forget_longest_idle() if flows is not None else None
            if flow is not None:
                del self._by_flow[flow.flow]
                continue
            tenant = self.batch.forget_longest_idle() or self.tenants.forget_longest_idle()
            if tenant is None:
                return
            del self._by_tenant[tenant.name[0]]
            while (flow := tenant.flows.forget_longest_idle()) is not None:
                del self._by_flow[flow.flow]
            tenant.flows.last_left = None  # breaks a cycle, since full garbage collections are rare
