"""A queue for each backend: requests are placed when they come, and each backend has a policy of its own for its queue.

An engine serves first come, first served, so what waits for it is held here and goes out in the local order when the
engine can start it. Where a request is placed is for a subclass to say. When a backend goes out of service, what waits
for it is placed again.
"""

from __future__ import annotations

from abc import abstractmethod
from collections import OrderedDict
from typing import Generic, NamedTuple, TypeVar

from policies.orders.contract import ClusterView, Policy, Selection
from policies.request import Flow, Pressure, Refused, Request, ServiceTokens

__all__ = ["PerBackend"]

P = TypeVar("P", bound=Policy)


class _Queued(NamedTuple):
    request: Request
    front: bool
    backend: str


class _Only:
    """One backend of a cluster, as a cluster."""

    def __init__(self, view: ClusterView, backend: str) -> None:
        self._view = view
        self._backend = backend

    def place(self, request: Request) -> str | None:
        return self._backend if self._view.fits(request, self._backend) else None

    def fits(self, request: Request, backend: str) -> bool:
        return backend == self._backend and self._view.fits(request, backend)

    def loads(self) -> dict[str, int]:
        return {self._backend: self._view.loads()[self._backend]}


class PerBackend(Policy, Generic[P]):
    """Which backend is this request for, and who goes next there?

    With `idle_takes`, no engine stands idle while anything waits: one that runs nothing and has nothing waiting takes
    what is next at the longest queue.
    """

    def __init__(self, *, idle_takes: bool) -> None:
        self._idle_takes = idle_takes
        self._local: dict[str, P] = {}
        self._arrived: OrderedDict[str, tuple[Request, bool]] = OrderedDict()
        """Not placed yet: where they can go is only known to `pop`. True: it came back, and goes first."""
        self._queued: dict[str, _Queued] = {}
        self._running: dict[str, tuple[str, P]] = {}
        """Where it runs, and whose queue it came from."""

    @abstractmethod
    def _local_policy(self, backend: str) -> P:
        """A policy for the queue of this backend."""

    @abstractmethod
    def _choose(self, request: Request, loads: dict[str, int]) -> str:
        """The backend that it is for. `loads`: requests queued or running for each one in service."""

    def _moved(self, request: Request, before: str | None, after: str | None) -> None:
        """It is not for this backend any more (None: it was for none), but for that one (None: it has left)."""

    def refusal(self, request: Request, now: float, pressure: Pressure) -> Refused | None:
        return None

    def push(self, request: Request, now: float, *, front: bool = False) -> None:
        self._arrived[request.id] = (request, front)

    def pop(self, now: float, view: ClusterView) -> Selection | None:
        running = view.loads()
        if not running:
            return None
        if running.keys() != self._local.keys():
            self._follow(running, now)
        if self._arrived:
            self._place_arrived(running, now)
        least_busy_first = sorted([(count, name) for name, count in running.items()])
        longest: P | None = None
        for _, name in least_busy_first:
            local = self._local[name]
            queued = len(local)
            if queued:
                selection = local.pop(now, _Only(view, name))
                if selection is not None:
                    return self._dispatched(selection, local)
                if longest is None or queued > len(longest):
                    longest = local
        if longest is None or not self._idle_takes:
            return None
        for count, name in least_busy_first:
            if not count and not len(self._local[name]):
                selection = longest.pop(now, _Only(view, name))
                if selection is not None:
                    return self._dispatched(selection, longest)
        return None

    def remove(self, request: Request, now: float) -> None:
        if self._arrived.pop(request.id, None) is None:
            self._withdraw(self._queued[request.id], now)

    def charge(self, request: Request, service: ServiceTokens, now: float, *, final: bool) -> None:
        _, local = self._running[request.id]
        local.charge(request, service, now, final=final)
        if final:
            del self._running[request.id]

    def next_eligible(self, now: float) -> float | None:
        times = [time for local in self._local.values() if (time := local.next_eligible(now)) is not None]
        return min(times, default=None)

    def explain(self, flow: Flow, now: float) -> dict[str, float]:
        """Requests over all backends; how far `ahead` as at the backend where it is least."""
        numbers = {"queued": float(sum(request.flow == flow for request, _ in self._arrived.values()))}
        for local in self._local.values():
            for name, number in local.explain(flow, now).items():
                if name.endswith("_ahead"):
                    numbers[name] = min(numbers.get(name, number), number)
                else:
                    numbers[name] = number if name == "weight" else numbers.get(name, 0.0) + number
        return numbers

    def __len__(self) -> int:
        return len(self._arrived) + len(self._queued)

    def _follow(self, running: dict[str, int], now: float) -> None:
        """Some backend is new, or out of service."""
        for name in running:
            if name not in self._local:
                self._local[name] = self._local_policy(name)
        if any(len(local) for name, local in self._local.items() if name not in running):
            for queued in [queued for queued in self._queued.values() if queued.backend not in running]:
                self._withdraw(queued, now)
                self._arrived[queued.request.id] = (queued.request, queued.front)

    def _place_arrived(self, running: dict[str, int], now: float) -> None:
        loads = {name: count + len(self._local[name]) for name, count in running.items()}
        for request, front in self._arrived.values():
            backend = self._choose(request, loads)
            loads[backend] += 1
            self._local[backend].push(request, now, front=front)
            self._queued[request.id] = _Queued(request, front, backend)
            self._moved(request, None, backend)
        self._arrived.clear()

    def _withdraw(self, queued: _Queued, now: float) -> None:
        del self._queued[queued.request.id]
        self._local[queued.backend].remove(queued.request, now)
        self._moved(queued.request, queued.backend, None)

    def _dispatched(self, selection: Selection, local: P) -> Selection:
        request, backend = selection.request, selection.backend
        placed = self._queued.pop(request.id).backend
        if placed != backend:
            self._moved(request, placed, backend)
        self._running[request.id] = (backend, local)
        return selection
