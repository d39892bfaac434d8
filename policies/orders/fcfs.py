"""First come, first served: what an engine does by itself, and the baseline of every comparison."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass

from policies.orders.order import Order
from policies.request import Flow, Request, ServiceTokens


@dataclass(frozen=True, slots=True)
class FcfsParams:
    """Settings of `Fcfs`: none."""


class Fcfs(Order):
    """The order of arrival. A flow with a long queue delays all others, and a head that does not fit holds up all."""

    def __init__(self, params: FcfsParams | None = None, *, flows_max: int = 10_000) -> None:
        self._queue: OrderedDict[str, Request] = OrderedDict()

    def beside(self, engine: str) -> Fcfs:
        return Fcfs()

    def push(self, request: Request, now: float, *, front: bool = False) -> None:
        self._queue[request.id] = request
        if front:
            self._queue.move_to_end(request.id, last=False)

    def head(self) -> Request | None:
        return next(iter(self._queue.values()), None)

    def take(self, request: Request) -> None:
        del self._queue[request.id]

    def remove(self, request: Request, now: float) -> None:
        self.take(request)

    def charge(self, request: Request, service: ServiceTokens, now: float, *, final: bool) -> None:
        """Do nothing: arrival order does not depend on service."""

    def explain(self, flow: Flow, now: float) -> dict[str, float]:
        return {"queued": float(sum(request.flow == flow for request in self._queue.values()))}

    def __len__(self) -> int:
        return len(self._queue)
