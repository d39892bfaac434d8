"""A queue for each engine: requests are assigned after they arrive, and each engine has an order of its own.

An engine serves first come, first served. So the requests for it wait here, and are dispatched in the order's sequence
once the engine can start them. The placement decides to which engine a request is assigned. When an engine goes out of
service, the requests that wait for it are assigned again.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping

from policies.admission.policy import Policy
from policies.admission.scheduler import Engines, schedule
from policies.capacity.obstacle import Blocked
from policies.orders.order import Order, Selection
from policies.placements.placement import Assignment
from policies.placements.prefix_index import PrefixIndex
from policies.placements.siblings import Siblings
from policies.request import Flow, Placed, Request, ServiceTokens


class AssignedPolicy(Policy):
    """A policy with a queue and an order for each engine."""

    def __init__(self, order: Order, placement: Assignment, *, prefixes: PrefixIndex | None = None) -> None:
        """Create a policy. `order` decides which requests may be queued; each engine has an order of its kind."""
        super().__init__(order, placement, prefixes=prefixes)
        self._assignment = placement
        self._orders: dict[str, Order] = {}
        self._siblings: dict[str, Siblings] = {}
        self._arrived: OrderedDict[str, tuple[Request, bool]] = OrderedDict()
        """Requests that are not assigned yet, since only `pop` knows the loads. True: goes first in its flow."""
        self._queued: dict[str, tuple[Request, bool]] = {}
        """Requests that wait in the queue of the engine that their progress names. True: goes first in its flow."""

    def queues(self) -> Mapping[str, Order]:
        return self._orders

    def queue(self, name: str) -> Order | None:
        return self._order_at(name) if name else None

    def push(self, request: Request, now: float, *, front: bool = False) -> None:
        self._arrived[request.id] = (request, front)

    def pop(self, now: float, engines: Engines) -> Selection | Blocked | None:
        running = engines.loads()
        if not running:
            return self._none_in_service()
        if running.keys() != self._orders.keys():
            self._follow(running, now)
        if self._arrived:
            self._assign_arrived(running, now)
            for request, _ in self._arrived.values():
                return Blocked(request, {})  # the only engine that can serve it is out of service
        least_busy_first = sorted([(count, name) for name, count in running.items()])
        blocked: Blocked | None = None
        longest: Order | None = None
        for _, name in least_busy_first:
            order = self._orders[name]
            if not len(order):
                continue
            selection = schedule(order, engines, only=name)
            if isinstance(selection, Selection):
                return self._dispatched(selection, order)
            if isinstance(selection, Blocked):
                if blocked is None:
                    blocked = selection
                else:
                    blocked.others += (selection,)
            if longest is None or len(order) > len(longest):
                longest = order
        if longest is None or not self._assignment.idle_takes:
            return blocked
        for count, name in least_busy_first:
            if not count and not len(self._orders[name]):
                selection = schedule(longest, engines, only=name)
                if isinstance(selection, Selection):
                    return self._dispatched(selection, longest)
        return blocked

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
        self._run_at(self._order_at(engine), request, engine, now)
        self._assignment.moved(request, None, engine)

    def forget_engine(self, engine: str, now: float) -> None:
        super().forget_engine(engine, now)
        self._assign_again([each for each in self._queued.values() if each[0].progress.engine == engine], now)
        self._orders.pop(engine, None)
        self._siblings.pop(engine, None)

    def __len__(self) -> int:
        return len(self._arrived) + len(self._queued)

    def _none_in_service(self) -> Blocked | None:
        for request, _ in (*self._arrived.values(), *self._queued.values()):
            return Blocked(request, {})
        return None

    def _follow(self, running: dict[str, int], now: float) -> None:
        """Create the orders of new engines in service, and assign the requests of stopped engines again."""
        for name in running:
            self._order_at(name)
        if any(len(order) for name, order in self._orders.items() if name not in running):
            stopped = [each for each in self._queued.values() if each[0].progress.engine not in running]
            self._assign_again(stopped, now)

    def _order_at(self, engine: str) -> Order:
        order = self._orders.get(engine)
        if order is None:
            order = self._orders[engine] = self.order.beside(engine)
            self._siblings[engine] = Siblings()
        return order

    def _assign_again(self, queued: list[tuple[Request, bool]], now: float) -> None:
        for request, front in queued:
            self._withdraw(request, now)
            self._arrived[request.id] = request, front

    def _assign_arrived(self, running: dict[str, int], now: float) -> None:
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

    def _dispatched(self, selection: Selection, order: Order) -> Selection:
        request, engine = selection.request, selection.backend
        assigned = self._left(request)
        request.progress.placed = Placed.ASSIGNED if assigned == engine else Placed.TAKEN
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
