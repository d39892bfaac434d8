"""Which request is owed most service? Tenants by weight, then the (app, user) flows of a tenant, oldest request first.

Both levels use the same `Counters`. A tenant that opens fifty flows still has one tenant's fair share, divided by
fifty. The policy defines the unit of service; here it only accumulates.

Work that can wait (class batch) has a line of its own, beside the tenants of other work: it goes when nothing else may.
While both wait, it is owed its guaranteed part of the service, and goes first as long as something is owed. So what it
receives over such an interval is at least that part of the whole, less what is dispatched at once.

One window answers on each level who may go before whom. The candidates are the members whose counter is at most the
window above the least one that waits. Of these, the ones with a call inside an interaction go first, and otherwise
the least (`Counters`). Inside a flow the requests go in the order in which they came, but calls inside interactions
and what an engine has cached may pass others. The window there is a number of requests: while the oldest request has
been passed by `CALLS_PASSED` newer ones, nothing passes. Whatever passes a request also passes all older ones, so no
request is passed by more than `CALLS_PASSED` of its own flow.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Callable, Iterable, Iterator, Mapping
from heapq import nsmallest
from itertools import islice
from math import inf
from typing import Final

from policies.averages import USUAL
from policies.queue.counters import Counters, Member
from policies.queue.tenants_and_flows import FlowMember, TenantMember, sleeps_as
from policies.request import Flow, Request, is_batch

TRIED: Final = 8
"""Requests that are tried in one decision instead of the next one: of half as many tenants where it does not fit."""


class Backlog:
    """Every queued request, ordered by the service per weight of its tenant and flow.

    At most `flows_max` tenants and flows together are remembered, not counting those with something queued or running.
    `lift` and `quantum` are those of `Counters`, on both levels. A tenant's quantum counts service per weight.
    `windows` are those of tenants and of flows, in the units of their counters.
    """

    def __init__(
        self, *, flows_max: int, lift: bool = True, quantum: float = 0.0, windows: tuple[float, float] = (0.0, 0.0)
    ) -> None:
        self.batch_share = 0.0
        """The part of the service that work that can wait gets while other work waits."""
        self._owed = 0.0
        """Service that this work is owed by other work, at all gateways together."""
        self.newly_owed = 0.0
        """The part that is not reported to other gateways yet."""
        self._flows_max = flows_max
        self._lift = lift
        self._window_of_flows = windows[1]
        self.quantum = quantum
        self.tenants: Counters[TenantMember] = Counters(lift=lift, quantum=quantum, window=windows[0])
        self.batch: Counters[TenantMember] = Counters(lift=lift, quantum=quantum, window=windows[0])
        """The same of work that can wait: it goes when nothing else may, or when it is owed."""
        self._by_tenant: dict[str, TenantMember] = {}
        self._by_flow: dict[Flow, FlowMember] = {}
        self.queued = 0
        self.starts: dict[TenantMember, list[tuple[bool, float, str, Request]]] = {}
        """Starts that sleep until the working set has room for them, by tenant, in order: calls of parked interactions
        before others, and then as they came.
        """
        self.full: dict[str, dict[TenantMember, None]] = {}
        """Tenants that sleep until a node of the tree has room, by the name of the node."""
        self.changed: dict[Member, None] | None = None
        """Members that were queued or charged, the oldest change first. The code that reports to other gateways takes
        them out. Bounded: the oldest changes are dropped. None: no one takes them."""
        self.usual = self.usual_of_flow = self.usual_service = 0.0
        """Final charge of a usual request, to its tenant and to its flow, and before it is divided by the weight:
        moving averages."""

    def __len__(self) -> int:
        return self.queued

    def push(self, request: Request, *, front: bool = False, is_inside: bool = False, goes_first: bool = False) -> None:
        """Queue the request. `front`: it was dispatched and came back, so it goes first in its flow.

        `is_inside`: it goes before the starts of its flow. `goes_first`: its flow and tenant go before others, within
        the window.
        """
        tenant = self._by_tenant.get(request.flow.tenant) or self._new_tenant(request.flow.tenant)
        tenant.weight = request.weight
        tenant.going_first += goes_first
        # First, so that making room for its flow does not forget the tenant.
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
        """The next request of the next flow of the next tenant, but for what sleeps."""
        for line in self.lines():
            tenant = line.least()
            if tenant is not None:
                return tenant.next()
        return None

    def lines(self) -> tuple[Counters[TenantMember], Counters[TenantMember]]:
        """In the order in which they go."""
        return (self.batch, self.tenants) if self.owes_batch else (self.tenants, self.batch)

    def _owe(self, service: float) -> None:
        """So much more. Work that can wait and may not start is owed two usual requests, and no more."""
        if service > 0.0:
            service = min(service, max(0.0, 2.0 * self.usual_service - self._owed))
        self._owed += service
        self.newly_owed += service

    def owe_in_all(self, owed: float) -> None:
        """All gateways together owe so much, without what is `newly_owed` here."""
        self._owed = owed + self.newly_owed

    @property
    def owes_batch(self) -> bool:
        """Is it the turn of work that can wait? A whole request of it must be owed."""
        return self._owed > self.usual_service

    # --- what sleeps, for which reason, until which event ---

    def sleep_start(self, start: Request) -> None:
        """The working set has no room for this start. It sleeps by itself, and holds up nothing else."""
        flow = self._by_flow[start.flow]
        flow.tenant.going_first -= start.id in flow.going_first
        flow.sleep(start)
        insort(self.starts.setdefault(flow.tenant, []), (*sleeps_as(start), start))
        self._rest(flow)

    def wake_starts(self, has_room: Callable[[Request], bool]) -> None:
        """The working set may have room again. The starts of the tenants that have received least are asked first."""
        for tenant in nsmallest(TRIED // 2, self.starts, key=_counter):
            starts = [one[3] for one in self.starts[tenant][: TRIED // 2] if has_room(one[3])]
            for start in starts:
                flow = self._by_flow[start.flow]
                self._forget_start(flow, start)
                tenant.going_first += flow.wake(start)
                self._woke(flow)

    def first_start(self) -> Request | None:
        """The oldest start that sleeps, of the tenant that has received least. What becomes free is kept for it."""
        tenants = [tenant for tenant in self.starts if tenant.line is self.tenants] or self.starts
        least = min(tenants, key=_counter, default=None)
        return self.starts[least][0][3] if least is not None else None

    def is_ahead(self, tenant: str) -> bool:
        """Has this tenant received more than one with a start that sleeps, or that waits at another gateway, by more
        than the window?
        """
        own = self._by_tenant.get(tenant)
        if own is None:
            return False
        least = min([one.counter for one in self.starts if one.line is own.line], default=inf)
        return own.counter - min(least, own.line.least_counter_elsewhere()) > own.line.window

    def sleep_at(self, request: Request, node: str, *, is_floor: bool = False) -> None:
        """Let the tenant of this request sleep until this node of the tree has room. `is_floor`: its own prefill is
        all that it waits for, so tenants that begin to wait are raised to it.
        """
        tenant = self._by_flow[request.flow].tenant
        tenant.full = node
        self.full.setdefault(node, {})[tenant] = None
        tenant.line.sleep(tenant, is_absent=not is_floor, is_floor=is_floor)

    def wake_at(self, has_room: Callable[[Request], bool]) -> None:
        """Of each node that has room again, the tenant that has received least may go, of the line that goes first."""
        for tenants in [*self.full.values()]:
            tenant = self._first_of(tenants)
            request = tenant.next()
            if request is None or not has_room(request):
                continue
            # To have all that it may have banks no credit, but for the request that follows the one that ended.
            line = tenant.line
            by = line.floor() - self.usual - tenant.counter
            for one in [one for one in tenants if one.line is line and by > 0.0]:
                one.counter += by
                one.lifted += by
            self._leave_node(tenant)
            line.wake(tenant)

    def asleep_at(self) -> Iterator[tuple[Request, str]]:
        """Of each full node, the next request of the tenant that has received least, of work that cannot wait."""
        for node, tenants in self.full.items():
            least = min([one for one in tenants if one.line is self.tenants], key=_counter, default=None)
            request = least.next() if least is not None else None
            if request is not None:
                yield request, node

    def asleep(self) -> Request | None:
        """The next request of what sleeps; None: nothing does."""
        firsts = [self._first_of(tenants) for tenants in self.full.values()]
        return self.first_start() or (min(firsts, key=_counter).next() if firsts else None)

    def _first_of(self, tenants: Iterable[TenantMember]) -> TenantMember:
        first = self.lines()[0]
        return min(tenants, key=lambda one: (one.line is not first, one.counter))

    def _leave_node(self, tenant: TenantMember) -> None:
        tenants = self.full[tenant.full]
        del tenants[tenant]
        if not tenants:
            del self.full[tenant.full]
        tenant.full = ""

    def _forget_start(self, flow: FlowMember, start: Request) -> None:
        starts = self.starts[flow.tenant]
        del starts[bisect_left(starts, sleeps_as(start))]
        if not starts:
            del self.starts[flow.tenant]

    def _rest(self, flow: FlowMember) -> None:
        """A start went to sleep, or something beside starts that sleep has left."""
        tenant = flow.tenant
        if flow.queued and not flow.requests:
            tenant.flows.sleep(flow)
        else:
            tenant.flows.prefer(flow, len(flow.going_first) > 0)
        if not len(tenant.flows):
            if tenant.full:
                self._leave_node(tenant)
            tenant.line.sleep(tenant)
        else:
            tenant.line.prefer(tenant, tenant.going_first > 0)

    def _woke(self, flow: FlowMember) -> None:
        """Something of this flow may go, as far as the working set is concerned."""
        tenant = flow.tenant
        tenant.flows.wake(flow)
        tenant.flows.prefer(flow, len(flow.going_first) > 0)
        if not tenant.full:
            tenant.line.wake(tenant)
        tenant.line.prefer(tenant, tenant.going_first > 0)

    def others(self, head: Request) -> Iterator[Request]:
        """The requests to try where the head has no room: the next ones of some tenants and flows, in order."""
        for tenant in (*self.tenants.first(TRIED // 2, within=inf), *self.batch.first(TRIED // 2, within=inf)):
            for flow in tenant.flows.first(2, within=inf):
                for request in islice(flow.requests.values(), 2):
                    if request is not head and flow.may_go(request):
                        yield request
                        break

    def may_pass(self, request: Request, head: Request) -> bool:
        """May this waiting request go instead of the head, because of what an engine has cached?

        Its tenant, its flow and itself are within the window, and a call inside an interaction is passed by another one
        only.
        """
        flow, next_flow = self._by_flow[request.flow], self._by_flow[head.flow]
        tenant, next_tenant = flow.tenant, next_flow.tenant
        if tenant.line is not next_tenant.line or (
            head.id in next_flow.going_first and request.id not in flow.going_first
        ):
            return False
        if tenant is not next_tenant:
            least = tenant.flows.least()
            if least is None or not tenant.line.may_pass(tenant, next_tenant):
                return False
            next_flow = least
        return tenant.flows.may_pass(flow, next_flow) and flow.may_go(request)

    def take(self, request: Request, *, is_served: bool = True) -> None:
        """Take the request out of the queue. `is_served`: it goes to a backend, and `end` will follow."""
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
        # A member that leaves the queue keeps its rank: newcomers begin there.
        if flow.requests:
            tenant.flows.prefer(flow, len(flow.going_first) > 0)
        if tenant.queued > 1:
            tenant.line.prefer(tenant, tenant.going_first > 0)
        if tenant.full and tenant.queued == 1:
            self._leave_node(tenant)
        tenant.flows.left(flow, is_served=is_served)
        tenant.line.left(tenant, is_served=is_served)
        if tenant in self.starts:
            self._rest(flow)
        if not is_served:
            self._forget_beyond(self._flows_max, tenant.flows)

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
        tenant = flow.tenant
        tenant.line.charged(tenant, new / request.weight)
        if self.batch.waits_anywhere and self.tenants.waits_anywhere:
            if tenant.line is self.tenants:
                self._owe(self.batch_share * new)
            else:
                # What was charged ahead while nothing else waited is taken back without being owed.
                self._owe(min((self.batch_share - 1.0) * new, max(0.0, -self._owed)))
        if self.changed is not None:
            self._note_change(flow)

    def end(self, request: Request) -> None:
        """A dispatched request ended, or comes back to the queue by `push` with `front`."""
        flow = self._by_flow[request.flow]
        flow.tenant.flows.ended(flow)
        flow.tenant.line.ended(flow.tenant)
        charged = request.progress.charged
        self.usual += USUAL * (charged / request.weight - self.usual)
        self.usual_service += USUAL * (charged - self.usual_service)
        self.usual_of_flow += USUAL * ((request.progress.normalised or charged) - self.usual_of_flow)
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
            tenant.line.resume(tenant, known)
        for line, known_line in ((self.tenants, before.tenants), (self.batch, before.batch)):
            last = known_line.last_left
            line.last_left = None if last is None else self._by_tenant.get(last.name[0])
        self.usual, self.usual_service = before.usual, before.usual_service
        if not with_flows:
            return
        self.usual_of_flow = before.usual_of_flow
        for flow, theirs in before._by_flow.items():
            own = self._by_flow.get(flow) or self._new_flow(flow, self._by_tenant[flow.tenant])
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
        """The tenant of this name, if it is remembered."""
        return self._by_tenant.get(name)

    def tenant_names(self) -> list[str]:
        """Names of the tenants that are remembered now."""
        return list(self._by_tenant)

    def flow(self, flow: Flow) -> FlowMember | None:
        """This flow, if it is remembered."""
        return self._by_flow.get(flow)

    def active(self) -> int:
        """Tenants that have something waiting or running."""
        return len(self._by_tenant) - self.tenants.idle() - self.batch.idle()

    def remembered(self) -> int:
        """Tenants and flows in memory, waiting or not."""
        return len(self._by_tenant) + len(self._by_flow)

    def _note_change(self, flow: FlowMember) -> None:
        assert self.changed is not None
        self.changed[flow.tenant] = self.changed[flow] = None
        while len(self.changed) > self._flows_max + 2:
            del self.changed[next(iter(self.changed))]

    def _new_tenant(self, name: str) -> TenantMember:
        self._forget_beyond(self._flows_max - 2, None)
        flows: Counters[FlowMember] = Counters(lift=self._lift, quantum=self.quantum, window=self._window_of_flows)
        tenant = TenantMember(name, self.batch if is_batch(name) else self.tenants, flows)
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
            tenant = self.batch.forget_longest_idle() or self.tenants.forget_longest_idle()
            if tenant is None:
                return
            del self._by_tenant[tenant.name[0]]
            while (flow := tenant.flows.forget_longest_idle()) is not None:
                del self._by_flow[flow.flow]
            tenant.flows.last_left = None  # else its flow and it would keep each other, and nothing looks for cycles


def _counter(tenant: TenantMember) -> float:
    return tenant.counter
