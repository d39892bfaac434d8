"""First come, first served: what an engine does by itself, and the baseline of every comparison."""

from __future__ import annotations

from collections import OrderedDict

from policies.orders.contract import ClusterView, Policy, Selection
from policies.request import Flow, Pressure, Refused, Request, ServiceTokens

__all__ = ["Fcfs"]


class Fcfs(Policy):
    """Who came first? No fairness: one flow with a long queue delays everybody behind it. Stops at the first misfit."""

    def __init__(self) -> None:
        self._queue: OrderedDict[str, Request] = OrderedDict()

    def refusal(self, request: Request, now: float, pressure: Pressure) -> Refused | None:
        return None

    def push(self, request: Request, now: float, *, front: bool = False) -> None:
        self._queue[request.id] = request
        if front:
            self._queue.move_to_end(request.id, last=False)

    def pop(self, now: float, view: ClusterView) -> Selection | None:
        if not self._queue:
            return None
        head = next(iter(self._queue.values()))
        backend = view.place(head)
        if backend is None:
            return None
        del self._queue[head.id]
        return Selection(head, backend)

    def remove(self, request: Request, now: float) -> None:
        del self._queue[request.id]

    def charge(self, request: Request, service: ServiceTokens, now: float, *, final: bool) -> None:
        """Arrival order does not depend on service."""

    def next_eligible(self, now: float) -> float | None:
        return None

    def explain(self, flow: Flow, now: float) -> dict[str, float]:
        return {"queued": float(sum(request.flow == flow for request in self._queue.values()))}

    def __len__(self) -> int:
        return len(self._queue)
