"""VTC as it is printed (OSDI'24, algorithms 2 and 3), as slow as it is plain: `min` over everybody, nobody forgotten.

One `NaiveLevel` is the paper's algorithm; tenants and the flows inside a tenant are two of them. Among equal counters
the one that was dispatched longest ago goes first, then the lesser name: the paper leaves this open.
"""

from __future__ import annotations

from policies.base import Request, ServiceTokens

__all__ = ["NaiveVtc"]

Name = tuple[str, ...]


class NaiveLevel:
    def __init__(self) -> None:
        self.counter: dict[Name, float] = {}
        self.queued: dict[Name, int] = {}
        self.turn: dict[Name, int] = {}
        self.last_left: Name | None = None
        self.dispatches = 0

    def in_queue(self) -> list[Name]:
        return [name for name, queued in self.queued.items() if queued]

    def arrive(self, name: Name) -> None:
        self.counter.setdefault(name, 0.0)
        self.turn.setdefault(name, 0)
        if not self.queued.get(name):
            lift = 0.0
            if self.in_queue():
                lift = min(self.counter[other] for other in self.in_queue())
            elif self.last_left is not None:
                lift = self.counter[self.last_left]
            self.counter[name] = max(self.counter[name], lift)
        self.queued[name] = self.queued.get(name, 0) + 1

    def least(self) -> Name:
        return min(self.in_queue(), key=lambda name: (self.counter[name], self.turn[name], name))

    def leave(self, name: Name, *, dispatched: bool) -> None:
        if dispatched:
            self.dispatches += 1
            self.turn[name] = self.dispatches
        self.queued[name] -= 1
        if not self.queued[name]:
            self.last_left = name


class NaiveVtc:
    def __init__(self, *, input_weight: float = 1.0, output_weight: float = 2.0) -> None:
        self.input_weight = input_weight
        self.output_weight = output_weight
        self.tenants = NaiveLevel()
        self.flows: dict[str, NaiveLevel] = {}
        self.requests: list[Request] = []
        self.charged: dict[str, float] = {}

    def push(self, request: Request) -> None:
        flows = self.flows.setdefault(request.flow.tenant, NaiveLevel())
        self.tenants.arrive((request.flow.tenant,))
        flows.arrive(request.flow[1:])
        self.requests.append(request)

    def pop(self) -> Request | None:
        if not self.requests:
            return None
        (tenant,) = self.tenants.least()
        flow = self.flows[tenant].least()
        request = next(one for one in self.requests if one.flow == (tenant, *flow))
        self._leave(request, dispatched=True)
        return request

    def remove(self, request: Request) -> None:
        self._leave(request, dispatched=False)

    def charge(self, request: Request, service: ServiceTokens) -> None:
        total = self.input_weight * service.prompt + self.output_weight * service.output
        new = total - self.charged.get(request.id, 0.0)
        self.charged[request.id] = total
        self.tenants.counter[(request.flow.tenant,)] += new / request.weight
        self.flows[request.flow.tenant].counter[request.flow[1:]] += new

    def _leave(self, request: Request, *, dispatched: bool) -> None:
        self.requests.remove(request)
        self.tenants.leave((request.flow.tenant,), dispatched=dispatched)
        self.flows[request.flow.tenant].leave(request.flow[1:], dispatched=dispatched)
