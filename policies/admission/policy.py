"""WHO goes next and WHERE: an order and a placement, side by side. Any order works with any placement.

A `Policy` has one queue in front of all engines. Where the placement assigns requests to engines at arrival, each
engine has a queue with an order of its own (`admission.assigned`). Both policies maintain the index of cached prefixes
if the order or the placement reads it.

One dispatch: `pop` asks the order for the next request. The order offers requests to a `QueueRoom`, which asks
`Engines` for those with room (WHEN) and lets the placement choose one of them (WHERE). The result is a `Selection`, or
`Blocked` with the obstacles of the next in order.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Final, Protocol

from policies.capacity.gauges import Gauges
from policies.capacity.obstacle import Blocked, Obstacle
from policies.orders.order import Order, Selection
from policies.placements.homes import Homes, is_local
from policies.placements.least_loaded import LeastLoaded
from policies.placements.placement import EngineLoad, Placement
from policies.placements.prefix_index import Prefix, PrefixIndex, blocks_of_tokens, tokens_of_blocks
from policies.request import Flow, Placed, Request, ServiceTokens

LEAST_LOADED: Final = LeastLoaded()


class Engines(Protocol):
    """The engines of a pool, and the requests that they can start now."""

    def with_room(self, request: Request) -> Sequence[EngineLoad] | Blocked:
        """Return the engines that can start a request now, at least one; or the obstacle at each engine."""

    def full_beside(self) -> dict[str, Obstacle]:
        """Return the obstacles at the other engines, after `with_room` has found engines with room."""

    def reserve(self, blocked: Blocked) -> str | None:
        """Return the engine that is reserved for the next request, which no engine can start (`Room.reserve`)."""

    def may_begin(self, request: Request) -> bool:
        """Return whether the working set of the pool has room for a request."""

    def at_ceiling(self, request: Request) -> str | None:
        """Return the name of the full node of the tree that keeps a request from starting, or None."""

    def has_part(self, request: Request, engine: str | None) -> bool:
        """Return whether the tenant has a part of the prefill left at this engine, or with None at any engine."""

    def obstacle_at(self, request: Request, engine: str) -> Obstacle | None:
        """Return the obstacle that keeps this engine from starting a request now, or None."""

    def loads(self) -> dict[str, int]:
        """Return the number of requests dispatched to each engine in service."""


class QueueRoom:
    """Engines as the order of one queue sees them: checks obstacles, then applies the placement (`Room`)."""

    def __init__(
        self,
        engines: Engines | None,
        *,
        only: str | None = None,
        placement: Placement = LEAST_LOADED,
        prefixes: PrefixIndex | None = None,
        homes: Homes | None = None,
    ) -> None:
        """Create a room. `only`: the engine that owns the queue; without `engines`, each request is placed there."""
        self.engines = engines
        self._only = only
        self._placement = placement
        self._prefixes = prefixes
        self._homes = homes

    def place(self, request: Request, *, but: str | None = None) -> str | Blocked:
        engines, only = self.engines, self._only
        if only is not None:
            obstacle = engines.obstacle_at(request, only) if engines is not None else None
            if obstacle is None:
                return only
            blocked = Blocked(request, {only: obstacle})
            if obstacle is Obstacle.CEILING and engines is not None:
                blocked.ceiling = engines.at_ceiling(request) or ""
            return blocked
        assert engines is not None
        found = engines.with_room(request)
        if isinstance(found, Blocked):
            return found
        if but is not None:
            found = [engine for engine in found if engine.name != but]
            if not found:
                return Blocked(request, engines.full_beside())
        engine, request.progress.placed = self._placement.choose(request, found)
        return engine

    def reserve(self, blocked: Blocked) -> str | None:
        return self.engines.reserve(blocked) if self.engines is not None and self._only is None else None

    def may_begin(self, request: Request) -> bool:
        return self.engines is None or self.engines.may_begin(request)

    def may_wake(self, request: Request) -> bool:
        engines = self.engines
        return engines is None or (engines.at_ceiling(request) is None and engines.has_part(request, self._only))

    def nearest(self, head: Request, engine: str, may_pass: Callable[[Request, Request], bool]) -> Request:
        prefixes, homes = self._prefixes, self._homes
        if prefixes is None or homes is None or homes.is_alone(head):
            return head
        if is_local(prefixes.depth(head.prefix, engine), head.prefix):
            return head
        assert self.engines is not None
        found: list[tuple[int, int, Request]] = []
        for request in homes.at(engine):
            depth = prefixes.depth(request.prefix, engine)
            if is_local(depth, request.prefix) and may_pass(request, head):
                tokens = tokens_of_blocks(depth, request.prefix, request.prompt_tokens)
                found.append((-tokens, len(found), request))
        found.sort()
        for _, _, request in found:
            if self.engines.obstacle_at(request, engine) is None:
                request.progress.placed = Placed.PASSED
                return request
        return head


class Policy:
    """An order and a placement, with one queue in front of all engines."""

    def __init__(
        self, order: Order, placement: Placement | None = None, *, prefixes: PrefixIndex | None = None
    ) -> None:
        """Create a policy. `prefixes`: index of cached prompts; None if neither order nor placement reads it."""
        self.order = order
        self.placement = placement if placement is not None else LEAST_LOADED
        self.prefixes = prefixes
        self.on_sent: Callable[[Prefix, str], None] | None = None
        """Callback for the prefix and the engine of each dispatch, where other gateways must know of it."""
        self._homes = Homes(prefixes) if prefixes is not None and order.passes else None
        self._room = QueueRoom(None, placement=self.placement, prefixes=prefixes, homes=self._homes)

    @property
    def reads_prefixes(self) -> bool:
        """Return whether requests must carry the hashes of their prompt's blocks."""
        return self.prefixes is not None

    def may_pass_starts(self, tenant: str) -> bool:
        """Return whether a tenant may begin before the starts that wait for the working set, in any queue."""
        return all([order.backlog is None or order.backlog.may_pass_starts(tenant) for order in self.queues().values()])

    def first_start(self) -> Request | None:
        """Return the first start that waits for the working set (`Backlog.first_start`); None if none waits."""
        for order in self.queues().values():
            if order.backlog is not None and order.backlog.starts:
                return order.backlog.first_start()
        return None

    def queues(self) -> Mapping[str, Order]:
        """Return the order of each queue by its engine; "" is the one queue in front of all engines."""
        return {"": self.order}

    def queue(self, name: str) -> Order | None:
        """Return the order of the queue with this name (`queues`), created if missing; None if there can be none."""
        return None if name else self.order

    def push(self, request: Request, now: float, *, front: bool = False) -> None:
        """Queue the request. `front`: it goes first in its flow, because it was queued before."""
        self.order.push(request, now, front=front)
        if self._homes is not None:
            self._homes.add(request)

    def pop(self, now: float, engines: Engines) -> Selection | Blocked | None:
        """Remove and return the next request that can start; `Blocked` if none can; None if the queue is empty."""
        self._room.engines = engines
        selection = self.order.pop(now, self._room)
        return self._sent(selection, self.order) if isinstance(selection, Selection) else selection

    def remove(self, request: Request, now: float) -> None:
        """Remove a request that leaves the queue without a dispatch."""
        self.order.remove(request, now)
        if self._homes is not None:
            self._homes.remove(request)

    def charge(self, request: Request, service: ServiceTokens, now: float, *, final: bool) -> None:
        """Set the total service that a dispatched request has received so far (not the increment)."""
        progress = request.progress
        order: Order = progress.order
        if self.prefixes is None or not request.prefix:
            order.charge(request, service, now, final=final)
            return
        expected_blocks = progress.cached_blocks
        if service.cached is not None:
            # An engine's report is believed within possible bounds.
            service = ServiceTokens(service.prompt, service.output, max(0, min(service.cached, service.prompt)))
        reported = service.cached
        if reported is None and expected_blocks:
            # The answer is not complete, so the expected number is used.
            cached = tokens_of_blocks(expected_blocks, request.prefix, service.prompt)
            service = ServiceTokens(service.prompt, service.output, cached)
        order.charge(request, service, now, final=final)
        if final and not service.prompt:  # refused: the engine never computed it
            self.prefixes.forget(request.prefix, progress.engine, expected_blocks)
        elif final and reported is not None:
            found = blocks_of_tokens(reported, request.prefix, service.prompt)
            self.prefixes.learn_cache_size(progress.engine, expected_blocks, found)

    def observe(self, engine: str, gauges: Gauges) -> None:
        """Follow the gauges of a scraped engine. A restarted engine has nothing cached."""
        if self.prefixes is not None:
            self.prefixes.counted(engine, gauges.prompt_tokens_total)

    def sent_elsewhere(self, prefix: Prefix, engine: str) -> None:
        """Index the prefix of a request that another gateway sent to an engine."""
        if self.prefixes is not None:
            self.prefixes.insert(prefix, engine)
            if self._homes is not None:
                self._homes.sent(prefix)

    def explain(self, flow: Flow, now: float) -> dict[str, float]:
        """Return the numbers that decide this flow's place, by name."""
        return self.order.explain(flow, now)

    def give_up(self, request: Request, now: float) -> None:
        """Refund a dispatched request, because another policy will charge it."""
        order: Order = request.progress.order
        order.charge(request, ServiceTokens(0, 0), now, final=True)

    def go_on_with(self, request: Request, engine: str, now: float) -> None:
        """Adopt a request that another policy dispatched to this engine. No request may be queued yet."""
        self._run_at(self.order, request, engine, now)

    def forget_engine(self, engine: str, now: float) -> None:
        """Forget a removed engine, at which no request runs."""
        if self.prefixes is not None:
            self.prefixes.forget_engine(engine)

    def __len__(self) -> int:
        """Return the number of queued requests."""
        return len(self.order)

    def _run_at(self, order: Order, request: Request, engine: str, now: float) -> None:
        """Let an empty order dispatch the request to the engine at which it already runs."""
        order.push(request, now)
        order.pop(now, QueueRoom(None, only=engine))
        request.progress.order, request.progress.engine = order, engine

    def _sent(self, selection: Selection, order: Order) -> Selection:
        """Record a dispatch: its order, its engine, and the prompt that the engine will have cached."""
        request, engine, progress = selection.request, selection.backend, selection.request.progress
        progress.order, progress.engine = order, engine
        if self.prefixes is not None and request.prefix:
            depth = progress.cached_blocks = self.prefixes.depth(request.prefix, engine)
            progress.cached_tokens = tokens_of_blocks(depth, request.prefix, request.prompt_tokens)
            self.prefixes.insert(request.prefix, engine)
            if self._homes is not None:
                self._homes.remove(request)
                self._homes.sent(request.prefix)
            if self.on_sent is not None:
                self.on_sent(request.prefix, engine)
        return selection
