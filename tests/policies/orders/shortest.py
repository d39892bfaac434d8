"""What somebody writes who adds a policy: its settings, its order, and the entry for the registry."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass

from policies.orders.order import Order
from policies.orders.policy_entries import PolicyEntry
from policies.request import Flow, Request, ServiceTokens
from policies.settings import setting


@dataclass(frozen=True)
class ShortestParams:
    patience: int = setting(8, "So many requests may overtake one.", least=0, most=1000)


class Shortest(Order):
    """Whose prompt is shortest? Nobody is overtaken by more than `patience`."""

    def __init__(self, params: ShortestParams | None = None, *, flows_max: int = 10_000) -> None:
        self._patience = (params or ShortestParams()).patience
        self._queue: OrderedDict[str, Request] = OrderedDict()
        self._overtaken = 0

    def push(self, request: Request, now: float, *, front: bool = False) -> None:
        self._queue[request.id] = request

    def head(self) -> Request | None:
        oldest = next(iter(self._queue.values()), None)
        if self._overtaken >= self._patience:
            return oldest
        return min(self._queue.values(), key=lambda one: (one.prompt_tokens, one.id), default=None)

    def take(self, request: Request) -> None:
        self._overtaken = 0 if request.id == next(iter(self._queue)) else self._overtaken + 1
        del self._queue[request.id]

    def remove(self, request: Request, now: float) -> None:
        del self._queue[request.id]

    def charge(self, request: Request, service: ServiceTokens, now: float, *, final: bool) -> None:
        """Nothing is counted."""

    def explain(self, flow: Flow, now: float) -> dict[str, float]:
        return {"queued": float(sum(one.flow == flow for one in self._queue.values()))}

    def __len__(self) -> int:
        return len(self._queue)


ENTRY = PolicyEntry("shortest prompt first", Shortest, ShortestParams)
