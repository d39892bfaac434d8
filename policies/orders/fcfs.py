"""First come, first served: what an engine does by itself, and the baseline of every comparison."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass

from policies.capacity.obstacle import Blocked
from policies.orders.order import Order, Room, Selection
from policies.request import Flow, Request, ServiceTokens


@dataclass(frozen=True, slots=True)
class FcfsParams:
    """Settings of `Fcfs`: none."""


class Fcfs(Order):
    """The order of arrival. A flow with a long queue delays all others, and a head that does not fit holds up all."""

    def __init__(self, params: FcfsParams | None = None, *, flows_max: int = 10_000) -> None:
        super().__init__()
        self._queue: OrderedDict[str, Request] = OrderedDict()

    def beside(self, engine: str) -> Fcfs:
        return Fcfs()

    def push(self, request: Request, now: float, *, front: bool = False) -> None:
        self._queue[request.id] = request
        if front:
            self._queue.move_to_end(request.id, last=False)

    def pop(self, now: float, room: Room) -> Selection | Blocked | None:
        if not self._queue:
            return None
        head = next(iter(self._queue.values()))
        placed = room.place(head)
        if isinstance(placed, Blocked):
            return placed
        del self._queue[head.id]
        return Selection(head, placed)

    def remove(self, request: Request, now: float) -> None:
        del self._queue[request.id]

    def charge(self, request: Request, service: ServiceTokens, now: float, *, final: bool) -> None:
        """Do nothing: arrival order does not depend on service."""

    def explain(self, flow: Flow, now: float) -> dict[str, float]:
        return {"queued": float(sum(request.flow == flow for request in self._queue.values()))}

    def __len__(self) -> int:
        return len(self._queue)
