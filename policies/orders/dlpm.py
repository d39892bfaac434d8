"""Deficit Longest Prefix Match: the request with the longest cached prefix goes next, within a quantum for each flow.

("Locality-aware Fair Scheduling in LLM Serving", arXiv 2501.14312, algorithm 1.) Each tenant has a deficit, and each
flow inside it. A deficit is refilled by a quantum (a tenant's times its weight) when nobody that waits beside it has
any deficit left. Among the flows with deficit left, the request with the longest cached prefix goes first. Only input
that the cache lacks is charged (`cached_weight`): as estimated at dispatch, and as the engine reports it at the end.

Rounds of refilling are not simulated. This order is `orders.rr` with matches deciding inside a round: a flow that has
received c has deficit left in round floor(c / quantum). So refills of any depth are one division. A flow that leaves
keeps its debt, because its counter stays. A flow that returns has no more credit than one round gives, because it is
raised to the beginning of the present round.

A request that does not fit blocks only its own flow, up to a limit. Others may overtake it until they have used up the
next round as well. Then they wait until it fits, so nothing is overtaken for ever.

The order is kept in two levels of heaps. Each flow has a heap of its requests, ordered by the match that they had when
they came. Flows and tenants are ordered by (round, best match). When a request reaches the top, its match is looked up
again, and the request goes back if its prefix has been evicted. A dispatch makes the matches of its siblings longer:
waiting requests with the same beginning, found by a few of their block hashes. Some of them are looked up again at
once. So a `pop` costs O(log flows + log requests of the flow), and never sorts the queue.

Bound, at a gateway (theorem 4.1, with the dispatched tokens in place of the running batch): two tenants that are both
backlogged over an interval receive extend service, per weight, that differs by at most 2 (U + Q), with

    U = (w_e * (L_in + E) + w_q * O) / (least weight)

L_in is the longest prompt. O is the output of all requests that may be dispatched at once. E is the part of their input
that was expected to be cached and was not. The paper's scheduler sees the cache (E = 0); a gateway learns of a miss
with the answer. Where requests that did not fit were overtaken, the bound is 2 (U + 2 Q). The proof is that of
`orders.rr`: matching only chooses among the flows of one round.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from heapq import heapify, heappop, heappush
from typing import Final

from policies.orders.cost import CACHED_WEIGHT, LONG_PROMPT, ServiceParams
from policies.orders.vtc import CounterOrder
from policies.placements.prefix_index import Prefix, PrefixIndex, tokens_of_blocks
from policies.placements.siblings import SamePrefixRequests
from policies.queue.backlog import TRIED, Backlog
from policies.queue.tenants_and_flows import TenantMember
from policies.request import Flow, Request
from policies.settings import setting

_CAME_BITS: Final = 40
"""Bits of the arrival number in a place. A place is one number: a longer match goes first, then an earlier arrival."""
_FRONT: Final = 1 << 72


class _QueuedRequest:
    """A queued request and its place among the requests of its flow."""

    __slots__ = ("came", "place", "request", "version")

    def __init__(self, request: Request, came: int) -> None:
        self.request = request
        self.came = came
        """Arrival number; negative for a request that was dispatched and came back, so that the request goes first."""
        self.place = 0
        """Place in the heap, which no other request has; 0 if the request is not queued."""
        self.version = -1
        """Version of the prefix index when the match was looked up."""


class _MatchedBacklog(Backlog):
    """Backlog whose flows are ranked, within a round, by their longest cached prefix."""

    def __init__(self, prefixes: PrefixIndex, backend: str | None, *, flows_max: int, quantum: float) -> None:
        super().__init__(flows_max=flows_max, quantum=quantum)
        self._siblings = SamePrefixRequests()
        self._prefixes = prefixes
        self._backend = backend
        self._waiting: dict[str, _QueuedRequest] = {}
        self._heaps: dict[Flow, list[tuple[int, _QueuedRequest]]] = {}
        """Places and requests by flow. An entry is stale if its request has another place by now."""
        self._newest = 0

    def push(self, request: Request, *, front: bool = False, is_inside: bool = False, goes_first: bool = False) -> None:
        super().push(request, front=front, is_inside=is_inside, goes_first=goes_first)
        self._newest += 1
        waiting = self._waiting[request.id] = _QueuedRequest(request, self._newest - (_FRONT if front else 0))
        if request.prefix:
            self._siblings.add(waiting.request)
        self._match(waiting)

    def take(self, request: Request, *, is_served: bool = True) -> None:
        super().take(request, is_served=is_served)
        self._waiting.pop(request.id).place = 0
        if request.prefix:
            self._siblings.remove(request)
        self._moved(request.flow)

    def take_over(self, before: Backlog, *, with_flows: bool) -> None:
        super().take_over(before, with_flows=with_flows)
        for flow in list(self._heaps):
            self._moved(flow)

    def head(self) -> Request | None:
        """Return the best-matched request of the earliest round."""
        looks = TRIED
        for line in self.lines():
            while (tenant := line.least()) is not None:
                member = tenant.flows.least()
                assert member is not None  # a tenant waits as long as one of its flows does
                waiting = self._best(member.flow)
                if waiting.version != self._prefixes.version and waiting.request.prefix and looks:
                    looks -= 1
                    self._match(waiting)
                elif tenant.turn == member.turn:
                    return waiting.request
                else:
                    tenant.turn = member.turn
        return None

    def _next_of(self, tenant: TenantMember) -> Request | None:
        flow = tenant.flows.least()
        return self._best(flow.flow).request if flow is not None else None

    def others(self, head: Request) -> Iterator[Request]:
        """Yield the requests to try if the head does not fit: the heads of some flows in this round and the next."""
        for tenant in (*self.tenants.first(TRIED // 2), *self.batch.first(TRIED // 2)):
            for member in tenant.flows.first(2):
                yield self._best(member.flow).request

    def rematch_siblings(self, prefix: Prefix) -> None:
        """Look up some waiting requests that begin like this prefix, which a cache now holds."""
        for request in self._siblings.nearest(prefix):
            self._match(self._waiting[request.id])

    def _match(self, waiting: _QueuedRequest) -> None:
        """Look up how much of the request's prompt is cached, and give the request its place."""
        request = waiting.request
        waiting.version = self._prefixes.version
        place = waiting.came
        if request.prefix and place > 0:
            place -= tokens_of_blocks(self._depth(request.prefix), request.prefix, request.prompt_tokens) << _CAME_BITS
        if place == waiting.place:
            return
        waiting.place = place
        heap = self._heaps.setdefault(request.flow, [])
        heappush(heap, (place, waiting))
        if len(heap) > 2 * self._by_flow[request.flow].queued + 8:
            heap[:] = [entry for entry in heap if entry[1].place == entry[0]]
            heapify(heap)
        self._moved(request.flow)

    def _depth(self, prefix: Prefix) -> int:
        if self._backend is not None:
            return self._prefixes.depth(prefix, self._backend)
        return max(self._prefixes.depths(prefix).values(), default=0)

    def _best(self, flow: Flow) -> _QueuedRequest:
        """Return the best-matched request of a flow."""
        heap = self._heaps[flow]
        while heap[0][1].place != heap[0][0]:
            heappop(heap)
        return heap[0][1]

    def _moved(self, flow: Flow) -> None:
        """Update the places of this flow and its tenant after the flow's best request may have changed."""
        member = self._by_flow.get(flow)
        if member is None or not member.queued:
            del self._heaps[flow]
            return
        member.turn = self._best(flow).place
        tenant = member.tenant
        tenant.flows.moved(member)
        least = tenant.flows.least()
        if least is not None:
            tenant.turn = least.turn
            tenant.line.moved(tenant)


@dataclass(frozen=True, slots=True)
class DlpmParams(ServiceParams):
    """Settings of `Dlpm`: cost, and the service of a turn."""

    cached_weight: float = setting(0.0, CACHED_WEIGHT, least=0, most=1)
    quantum: float = setting(
        LONG_PROMPT, "Service that a flow receives per turn and weight before the next one's turn.", least=1, most=1e9
    )


class Dlpm(CounterOrder):
    """The order by longest cached prefix, among flows with deficit left.

    With `engine`, the order of that engine's own queue: only matches at this engine count.
    """

    reads_prefixes = True
    reserves = False

    def __init__(
        self,
        params: DlpmParams | None = None,
        *,
        flows_max: int = 10_000,
        prefixes: PrefixIndex | None = None,
        engine: str | None = None,
    ) -> None:
        params = params or DlpmParams()
        self._prefixes = prefixes if prefixes is not None else PrefixIndex()
        self._matched = _MatchedBacklog(self._prefixes, engine, flows_max=flows_max, quantum=params.quantum)
        super().__init__(params, flows_max, self._matched)

    def beside(self, engine: str) -> Dlpm:
        return Dlpm(self._params, flows_max=self._flows_max, prefixes=self._prefixes, engine=engine)

    def sent(self, prefix: Prefix) -> None:
        self._matched.rematch_siblings(prefix)
