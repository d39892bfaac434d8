"""WHO goes next and WHERE: an order and a placement, side by side. Any order works with any placement.

A `Policy` has one queue in front of all engines. Where the placement assigns requests to engines at arrival, each
engine has a queue with an order of its own (`AssignedPolicy`). Both policies maintain the index of cached prefixes if
the order or the placement reads it. `admission.scheduler` takes the next request out of a queue.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Mapping
from itertools import chain

from policies.admission.scheduler import LEAST_LOADED, PoolEngines, schedule
from policies.capacity.gauges import Gauges
from policies.capacity.obstacle import Blocked
from policies.orders.order import Order, Selection
from policies.placements.homes import Homes
from policies.placements.placement import Assignment, Placement
from policies.placements.prefix_index import Prefix, PrefixIndex, blocks_of_tokens, tokens_of_blocks
from policies.placements.siblings import SamePrefixRequests
from policies.request import Flow, PlacementReason, Request, ServiceTokens


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

    def order_of(self, request: Request) -> Order:
        """Return the order of the queue in which the request waits, or would wait."""
        return self.order

    def queue(self, name: str) -> Order | None:
        """Return the order of the queue with this name (`queues`), created if missing; None if there can be none."""
        return None if name else self.order

    def push(self, request: Request, now: float, *, front: bool = False) -> None:
        """Queue the request. `front`: it goes first in its flow, because it was queued before."""
        self.order.push(request, now, front=front)
        if self._homes is not None and request.prefix:
            self._homes.add(request)

    def pop(self, now: float, engines: PoolEngines) -> Selection | Blocked | None:
        """Remove and return the next request that can start; `Blocked` if none can; None if the queue is empty."""
        selection = schedule(self.order, engines, placement=self.placement, homes=self._homes)
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
        expected_blocks, reported, cached = progress.cached_blocks, service.cached, service.cached
        if reported is not None:  # an engine's report is believed within possible bounds
            cached = reported = max(0, min(reported, service.prompt))
        elif expected_blocks:  # not reported (yet), so the expected number is used
            cached = tokens_of_blocks(expected_blocks, request.prefix, service.prompt)
        if cached != service.cached:
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

    def go_on_with(self, request: Request, engine: str, now: float) -> None:
        """Adopt a request that another policy dispatched to this engine. No request may be queued yet."""
        order = self.queue(engine)
        if order is None:  # one queue in front of all engines
            order = self.order
        order.push(request, now)
        order.take(request)
        request.progress.order, request.progress.engine = order, engine

    def forget_engine(self, engine: str, now: float) -> None:
        """Forget a removed engine, at which no request runs."""
        if self.prefixes is not None:
            self.prefixes.forget_engine(engine)

    def __len__(self) -> int:
        """Return the number of queued requests."""
        return len(self.order)

    def _sent(self, selection: Selection, order: Order) -> Selection:
        """Record a dispatch: its order, its engine, and the prompt that the engine will have cached."""
        request, engine, progress = selection.request, selection.backend, selection.request.progress
        progress.order, progress.engine = order, engine
        if self.prefixes is not None and request.prefix:
            depth = progress.cached_blocks = self.prefixes.depth(request.prefix, engine)
            progress.cached_tokens = tokens_of_blocks(depth, request.prefix, request.prompt_tokens)
            self.prefixes.insert(request.prefix, engine)
            order.sent(request.prefix)
            if self._homes is not None:
                self._homes.remove(request)
                self._homes.sent(request.prefix)
            if self.on_sent is not None:
                self.on_sent(request.prefix, engine)
        return selection


class AssignedPolicy(Policy):
    """A policy with a queue and an order for each engine, to which requests are assigned after they arrive.

    An engine serves first come, first served. So the requests for it wait here, and are dispatched in the order's
    sequence once the engine can start them. When an engine goes out of service, the requests that wait for it are
    assigned again.
    """

    def __init__(self, order: Order, placement: Assignment, *, prefixes: PrefixIndex | None = None) -> None:
        """Create a policy. `order` decides which requests may be queued; each engine has an order of its kind."""
        super().__init__(order, placement, prefixes=prefixes)
        self._assignment = placement
        self._orders: dict[str, Order] = {}
        self._siblings: dict[str, SamePrefixRequests] = {}
        self._arrived: OrderedDict[str, tuple[Request, bool]] = OrderedDict()
        """Requests that are not assigned yet, since only `pop` knows the loads. True: goes first in its flow."""
        self._queued: dict[str, tuple[Request, bool]] = {}
        """Requests that wait in the queue of the engine that their progress names. True: goes first in its flow."""

    def queues(self) -> Mapping[str, Order]:
        return self._orders

    def order_of(self, request: Request) -> Order:
        return self._orders.get(request.progress.engine, self.order)

    def queue(self, name: str) -> Order | None:
        return self._order_at(name) if name else None

    def push(self, request: Request, now: float, *, front: bool = False) -> None:
        self._arrived[request.id] = (request, front)

    def pop(self, now: float, engines: PoolEngines) -> Selection | Blocked | None:
        running = engines.loads()
        if not running:
            waiting = next(chain(self._arrived.values(), self._queued.values()), None)
            return Blocked(waiting[0], {}) if waiting is not None else None
        if running.keys() != self._orders.keys():
            self._follow(running, now)
        if self._arrived:
            self._assign_arrived(running, now)
            for request, _ in self._arrived.values():
                return Blocked(request, {})  # the only engine that can serve it is out of service
        least_busy_first = sorted([(count, name) for name, count in running.items()])
        tried = [(name, self._orders[name]) for _, name in least_busy_first if len(self._orders[name])]
        if tried and self._assignment.idle_takes:
            longest = max([order for _, order in tried], key=len)
            idle = [name for count, name in least_busy_first if not count and not len(self._orders[name])]
            tried += [(name, longest) for name in idle]
        blocked: list[Blocked] = []
        for name, order in tried:
            selection = schedule(order, engines, only=name)
            if isinstance(selection, Selection):
                return self._record_dispatch(selection, order)
            if selection is not None and order is self._orders[name]:
                blocked.append(selection)
        if not blocked:
            return None
        blocked[0].others = tuple(blocked[1:])
        return blocked[0]

    def remove(self, request: Request, now: float) -> None:
        if self._arrived.pop(request.id, None) is None:
            self._withdraw(request, now)

    def charge(self, request: Request, service: ServiceTokens, now: float, *, final: bool) -> None:
        super().charge(request, service, now, final=final)
        if final:
            self._assignment.ended(request, request.progress.engine, service)

    def explain(self, flow: Flow, now: float) -> dict[str, float]:
        """Return sums over all engines, except for the least `*_ahead` and the weight; and the placement's numbers."""
        numbers = {"queued": float(sum(request.flow == flow for request, _ in self._arrived.values()))}
        for order in self._orders.values():
            for name, number in order.explain(flow, now).items():
                if name.endswith("_ahead"):
                    numbers[name] = min(numbers.get(name, number), number)
                else:
                    numbers[name] = number if name == "weight" else numbers.get(name, 0.0) + number
        return numbers | self._assignment.explain(flow.tenant)

    def go_on_with(self, request: Request, engine: str, now: float) -> None:
        super().go_on_with(request, engine, now)
        self._assignment.moved(request, None, engine)

    def forget_engine(self, engine: str, now: float) -> None:
        super().forget_engine(engine, now)
        self._unassign([each for each in self._queued.values() if each[0].progress.engine == engine], now)
        self._orders.pop(engine, None)
        self._siblings.pop(engine, None)

    def __len__(self) -> int:
        return len(self._arrived) + len(self._queued)

    def _follow(self, running: dict[str, int], now: float) -> None:
        """Create the orders of new engines in service, and assign the requests of stopped engines again."""
        for name in running:
            self._order_at(name)
        if any(len(order) for name, order in self._orders.items() if name not in running):
            stopped = [each for each in self._queued.values() if each[0].progress.engine not in running]
            self._unassign(stopped, now)

    def _order_at(self, engine: str) -> Order:
        """Return the order of an engine's queue. Create the order if there is none."""
        order = self._orders.get(engine)
        if order is None:
            order = self._orders[engine] = self.order.beside(engine)
            self._siblings[engine] = SamePrefixRequests()
        return order

    def _unassign(self, queued: list[tuple[Request, bool]], now: float) -> None:
        """Withdraw requests from their engines' queues. The next `pop` assigns each to an engine."""
        for request, front in queued:
            self._withdraw(request, now)
            self._arrived[request.id] = request, front

    def _assign_arrived(self, running: dict[str, int], now: float) -> None:
        """Assign the requests that have no engine yet, and queue them there."""
        loads = {name: count + len(self._orders[name]) for name, count in running.items()}
        for request, front in list(self._arrived.values()):
            closed, open_ones = request.progress.closed, loads
            if closed is not None:
                open_ones = {name: load for name, load in loads.items() if name not in closed} or loads
            engine = request.engine or self._assignment.assign(request, open_ones, self._depths(request, open_ones))
            if engine not in loads:
                continue
            del self._arrived[request.id]
            loads[engine] += 1
            self._orders[engine].push(request, now, front=front)
            self._queued[request.id] = request, front
            request.progress.engine = engine
            if request.prefix:
                self._siblings[engine].add(request)
            self._assignment.moved(request, None, engine)

    def _depths(self, request: Request, loads: dict[str, int]) -> dict[str, int]:
        """Return the leading blocks that each engine holds, or will soon hold for a request that waits there."""
        if self.prefixes is None or not request.prefix:
            return {}
        cached = self.prefixes.depths(request.prefix)
        return {name: max(cached.get(name, 0), self._siblings[name].depth(request.prefix)) for name in loads}

    def _withdraw(self, request: Request, now: float) -> None:
        engine = self._left(request)
        self._orders[engine].remove(request, now)
        self._assignment.moved(request, engine, None)

    def _record_dispatch(self, selection: Selection, order: Order) -> Selection:
        """Record whether a request was dispatched to its assigned engine, or taken by another engine."""
        request, engine = selection.request, selection.backend
        assigned = self._left(request)
        request.progress.placed = PlacementReason.ASSIGNED if assigned == engine else PlacementReason.TAKEN
        if assigned != engine:
            self._assignment.moved(request, assigned, engine)
        return self._sent(selection, order)

    def _left(self, request: Request) -> str:
        """Forget that the request waits at its assigned engine. Return that engine."""
        del self._queued[request.id]
        engine = request.progress.engine
        if request.prefix:
            self._siblings[engine].remove(request)
        return engine
