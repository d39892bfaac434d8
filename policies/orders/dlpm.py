"""Deficit Longest Prefix Match: who shares most with what the engine has cached goes next, within a quantum each.

("Locality-aware Fair Scheduling in LLM Serving", arXiv 2501.14312, algorithm 1.) Each flow has a deficit, refilled by
a quantum (times its tenant's weight) when nobody who waits has any left. Among those that have some, the request with
the longest cached prefix goes first. Only input that the cache lacks is charged (`ExtendCost`), as estimated at
dispatch and as the engine reports at the end.

Rounds of refilling are not played (see `orders.rr`, which this is but for the order inside a round): a flow that has
received c has deficit left in round floor(c / quantum). So a refill of any depth is one division; who leaves keeps its
debt, since the counter stays; who returns has no more credit than one round gives, since it is raised to the
beginning of the one that is being served.

A request that does not fit holds up nobody but its own flow, up to a limit: others may overtake it until they have used
the round that follows, then they wait until it fits. Nothing is overtaken for ever.

Order is kept by two heaps and one look: each flow has a heap of its requests by the match they had when they came, and
lines of flows and of tenants are ordered by (round, best match). The match of a request that has come to the top is
looked up again, and it goes back if its prefix has been evicted since. A dispatch makes the matches of its siblings
longer: those that wait with the same beginning, found by a few of their block hashes, are looked up again then. So a
`pop` costs O(log flows + log requests of the flow), and never a sort of the queue.

Bound, at a gateway (theorem 4.1 with the dispatched tokens in the place of the running batch): two tenants that are
both backlogged over an interval receive extend service, per weight, that differs by at most 2 (U + Q), with

    U = (w_e * (L_in + E) + w_q * O) / (least weight)

where L_in is the longest prompt, O the output of what may be dispatched at once, and E the input of it that was taken
to be cached and was not: the paper's scheduler sees the cache (E = 0), a gateway learns of a miss with the answer.
Where requests that did not fit were overtaken, 2 (U + 2 Q). Proof as for `orders.rr`: matching only picks among the
flows of one round.
"""

from __future__ import annotations

from collections.abc import Iterator
from heapq import heapify, heappop, heappush
from typing import Any, Final, NamedTuple

from policies.orders.contract import ClusterView, Policy, Selection
from policies.orders.cost import Cost, ExtendCost
from policies.placements.prefix_index import Prefix, PrefixIndex, blocks_of_tokens, tokens_of_blocks
from policies.queue.backlog import Backlog
from policies.request import Flow, Pressure, Refused, Request, ServiceTokens

__all__ = ["QUANTUM", "Dlpm"]

QUANTUM: Final = 20_000.0
"""About the cost of loading one long document: a smaller one evicts hot prefixes before they were used."""
TENANTS_TRIED: Final = 4
FLOWS_TRIED: Final = 2
"""Where the next request does not fit, the heads of so many tenants, and of so many flows of each, are tried."""
SIBLINGS_REMATCHED: Final = 4
"""By each dispatch. They are the next ones of their like, and will look after the others."""
REMATCHED_MAX: Final = 16
"""Requests looked up again in one `pop` at most."""

_CAME_BITS: Final = 40
"""A place in order is one number: the longer match first, then the earlier arrival, a serial of so many bits."""
_FRONT: Final = 1 << 72


class _Waiting:
    """A queued request and its place among those of its flow."""

    __slots__ = ("came", "entry", "request", "version")

    def __init__(self, request: Request, came: int) -> None:
        self.request = request
        self.came = came
        """Serial of its arrival; negative if it was dispatched and came back, so that it goes first."""
        self.entry: _Entry = None
        """Its valid heap entry; None when it has left."""
        self.version = -1
        """Of the index when it was matched."""


_Entry = Any
"""(place, serial, request): serials differ, so requests are never compared. Told apart by identity, as in `Line`."""


class _Siblings:
    """Which queued requests begin alike? Known by the blocks at depths 1, 2, 4, 8, ..., so O(log blocks) for each."""

    def __init__(self) -> None:
        self._waiting: dict[int, dict[str, _Waiting]] = {}

    def add(self, waiting: _Waiting) -> None:
        for block in _landmarks(waiting.request.prefix):
            self._waiting.setdefault(block, {})[waiting.request.id] = waiting

    def remove(self, waiting: _Waiting) -> None:
        for block in _landmarks(waiting.request.prefix):
            alike = self._waiting[block]
            del alike[waiting.request.id]
            if not alike:
                del self._waiting[block]

    def nearest(self, prefix: Prefix, most: int) -> Iterator[_Waiting]:
        """At most so many, those that share most first; within that, as they came."""
        found: set[str] = set()
        for block in reversed(_landmarks(prefix)):
            for request_id, waiting in self._waiting.get(block, {}).items():
                if request_id not in found:
                    found.add(request_id)
                    yield waiting
                    if len(found) == most:
                        return

    def depth(self, prefix: Prefix) -> int:
        """How many leading blocks are shared with somebody who waits? To within a factor of two."""
        depth, shared = 1, 0
        for block in _landmarks(prefix):
            if block not in self._waiting:
                break
            depth, shared = 2 * depth, depth
        return shared


def _landmarks(prefix: Prefix) -> list[int]:
    marks, depth = [], 1
    while depth <= len(prefix):
        marks.append(prefix[depth - 1])
        depth *= 2
    return marks


class _MatchedBacklog(Backlog):
    """A backlog in which `turn`, the place among those of one round, is that of the flow's best-matched request."""

    def __init__(self, prefixes: PrefixIndex, backend: str | None, *, flows_max: int, quantum: float) -> None:
        super().__init__(flows_max=flows_max, quantum=quantum)
        self.siblings = _Siblings()
        self._prefixes = prefixes
        self._backend = backend
        self._waiting: dict[str, _Waiting] = {}
        self._heaps: dict[Flow, list[_Entry]] = {}
        self._serial = 0

    def push(self, request: Request, *, front: bool = False, leads: bool = True) -> None:
        super().push(request, front=front, leads=leads)
        self._serial += 1
        waiting = self._waiting[request.id] = _Waiting(request, self._serial - (_FRONT if front else 0))
        if request.prefix:
            self.siblings.add(waiting)
        self._match(waiting)

    def dispatch(self, request: Request) -> None:
        super().dispatch(request)
        self._leave(request)

    def withdraw(self, request: Request) -> None:
        self._leave(request)
        super().withdraw(request)

    def head(self) -> Request | None:
        """The best-matched request of those in the earliest round."""
        looks = REMATCHED_MAX
        while (tenant := self._line.least()) is not None:
            member = tenant.flows.least()
            assert member is not None  # a tenant waits for as long as one of its flows does
            waiting = self._best(self._heaps[member.flow])
            if waiting.version != self._prefixes.version and waiting.request.prefix and looks:
                looks -= 1
                self._match(waiting)
            elif tenant.turn == member.turn:
                return waiting.request
            else:
                tenant.turn = member.turn
        return None

    def others(self) -> Iterator[Request]:
        """Who is tried where the head does not fit: the heads of some flows of this round and of the next."""
        for tenant in self._line.first(TENANTS_TRIED):
            for member in tenant.flows.first(FLOWS_TRIED):
                yield self._best(self._heaps[member.flow]).request

    def rematch_siblings(self, prefix: Prefix) -> None:
        """This is in a cache now, so those that begin alike have a longer match."""
        for waiting in list(self.siblings.nearest(prefix, SIBLINGS_REMATCHED)):
            self._match(waiting)

    def _match(self, waiting: _Waiting) -> None:
        """Look up how much of it is cached, and give it the place that follows from that."""
        request = waiting.request
        waiting.version = self._prefixes.version
        place = waiting.came
        if request.prefix and place > 0:
            place -= tokens_of_blocks(self._depth(request.prefix), request.prefix, request.prompt_tokens) << _CAME_BITS
        if waiting.entry is not None and waiting.entry[0] == place:
            return
        self._serial += 1
        waiting.entry = (place, self._serial, waiting)
        heap = self._heaps.setdefault(request.flow, [])
        heappush(heap, waiting.entry)
        if len(heap) > 2 * self._flows[request.flow].queued + 8:
            heap[:] = [entry for entry in heap if entry[2].entry is entry]
            heapify(heap)
        self._moved(request.flow)

    def _depth(self, prefix: Prefix) -> int:
        if self._backend is not None:
            return self._prefixes.depth(prefix, self._backend)
        return max(self._prefixes.depths(prefix).values(), default=0)

    def _best(self, heap: list[_Entry]) -> _Waiting:
        while heap[0][2].entry is not heap[0]:
            heappop(heap)
        best: _Waiting = heap[0][2]
        return best

    def _leave(self, request: Request) -> None:
        waiting = self._waiting.pop(request.id)
        waiting.entry = None
        if request.prefix:
            self.siblings.remove(waiting)
        self._moved(request.flow)

    def _moved(self, flow: Flow) -> None:
        """The best of this flow may be another one: bring the lines of flows and of tenants up to it."""
        member = self._flows[flow]
        heap = self._heaps[flow]
        while heap and heap[0][2].entry is not heap[0]:
            heappop(heap)
        if not heap:
            del self._heaps[flow]
            return
        member.turn = heap[0][0]
        tenant = member.tenant
        tenant.flows.moved(member)
        least = tenant.flows.least()
        if least is not None:
            tenant.turn = least.turn
            self._line.moved(tenant)


class _Placed(NamedTuple):
    """Where a dispatched request went, and how many of its leading blocks were taken to be cached there."""

    backend: str
    blocks: int


class Dlpm(Policy):
    """Who finds most of its prompt in the cache, among those that have deficit left?

    With `backend`, matches are those at this backend only: one engine's local order, as `orders.d2lpm` uses it.
    """

    reads_prefixes = True

    def __init__(
        self,
        *,
        cost: Cost | None = None,
        quantum: float | None = None,
        flows_max: int = 10_000,
        prefixes: PrefixIndex | None = None,
        backend: str | None = None,
    ) -> None:
        self.prefixes = prefixes if prefixes is not None else PrefixIndex()
        self._cost = cost if cost is not None else ExtendCost()
        self._backlog = _MatchedBacklog(
            self.prefixes, backend, flows_max=flows_max, quantum=QUANTUM if quantum is None else quantum
        )
        self._placed: dict[str, _Placed] = {}

    def refusal(self, request: Request, now: float, pressure: Pressure) -> Refused | None:
        return None

    def push(self, request: Request, now: float, *, front: bool = False) -> None:
        self._backlog.push(request, front=front)

    def pop(self, now: float, view: ClusterView) -> Selection | None:
        request = self._backlog.head()
        if request is None:
            return None
        backend = self._backend(request, view)
        if backend is None:
            for request in self._backlog.others():
                backend = self._backend(request, view)
                if backend is not None:
                    break
            else:
                return None
        self._dispatch(request, backend)
        return Selection(request, backend)

    def remove(self, request: Request, now: float) -> None:
        self._backlog.withdraw(request)

    def charge(self, request: Request, service: ServiceTokens, now: float, *, final: bool) -> None:
        placed, reported = self._placed[request.id], service.cached
        if reported is None and placed.blocks:
            cached = tokens_of_blocks(placed.blocks, request.prefix, service.prompt)
            service = ServiceTokens(service.prompt, service.output, cached)
        self._backlog.charge(request, self._cost(service))
        if not final:
            return
        del self._placed[request.id]
        self._backlog.end(request)
        if not request.prefix:
            return
        if not service.prompt:
            self.prefixes.forget(request.prefix, placed.backend, placed.blocks)  # refused: it never got there
        elif reported is not None:
            found = blocks_of_tokens(reported, request.prefix, service.prompt)
            self.prefixes.reported(placed.backend, placed.blocks, found)

    def backlog(self) -> Backlog:
        return self._backlog

    def next_eligible(self, now: float) -> float | None:
        return None

    def explain(self, flow: Flow, now: float) -> dict[str, float]:
        return self._backlog.explain(flow)

    def remembered(self) -> int:
        """Tenants and flows in memory."""
        return self._backlog.remembered()

    def shared_depth(self, request: Request) -> int:
        """How many leading blocks does it share with one that waits here? To within a factor of two."""
        return self._backlog.siblings.depth(request.prefix)

    def __len__(self) -> int:
        return len(self._backlog)

    def _backend(self, request: Request, view: ClusterView) -> str | None:
        """Where it fits and most of it is cached; the least loaded of those where nothing is. None: it fits nowhere."""
        free = view.place(request)
        if free is None or not request.prefix:
            return free
        depths = self.prefixes.depths(request.prefix)
        for depth, backend in sorted(((-depth, name) for name, depth in depths.items())):
            if -depth <= depths.get(free, 0):
                break
            if view.fits(request, backend):
                return backend
        return free

    def _dispatch(self, request: Request, backend: str) -> None:
        self._backlog.dispatch(request)
        if not request.prefix:
            self._placed[request.id] = _Placed(backend, 0)
        else:
            self._placed[request.id] = _Placed(backend, self.prefixes.depth(request.prefix, backend))
            self.prefixes.insert(request.prefix, backend)
            self._backlog.rematch_siblings(request.prefix)
