"""VTC as it is printed (OSDI'24, algorithms 2 and 3), as slow as it is plain: `min` over everybody, nobody forgotten.

One `NaiveLevel` is the paper's algorithm; tenants and the flows inside a tenant are two of them. Among equal counters
the one that was dispatched longest ago goes first, then the lesser name: the paper leaves this open. LCF leaves out the
lift (lines 8 to 13 of algorithm 2). Round robin (appendix C.2) plays its rounds one by one.
"""

from __future__ import annotations

from itertools import count

from policies.request import Request, ServiceTokens

Name = tuple[str, ...]


class NaiveLevel:
    def __init__(self, *, lift: bool, quantum: float) -> None:
        self.lift = lift
        self.quantum = quantum
        self.counter: dict[Name, float] = {}
        self.queued: dict[Name, int] = {}
        self.turn: dict[Name, int] = {}
        self.last_left: Name | None = None
        self.dispatches = 0

    def in_queue(self) -> list[Name]:
        """Those with something queued, in the order in which they began to wait."""
        return [name for name, queued in self.queued.items() if queued]

    def arrive(self, name: Name) -> None:
        self.counter.setdefault(name, 0.0)
        self.turn.setdefault(name, 0)
        if not self.queued.get(name):
            lift = 0.0
            if self.in_queue():
                lift = self.counter[self.next()]
            elif self.last_left is not None:
                lift = self.counter[self.last_left]
            if self.quantum:
                lift -= lift % self.quantum  # it has this round's credit, as everybody in it had
            if self.lift:
                self.counter[name] = max(self.counter[name], lift)
            self.queued.pop(name, None)
        self.queued[name] = self.queued.get(name, 0) + 1

    def next(self) -> Name:
        return self.next_in_rounds() if self.quantum else self.least()

    def least(self) -> Name:
        return min(self.in_queue(), key=lambda name: (self.counter[name], self.turn[name], name))

    def next_in_rounds(self) -> Name:
        for quanta in count(1):
            for name in self.in_queue():
                credit = quanta * self.quantum - self.counter[name]
                if credit > 0:
                    return name
        raise AssertionError("rounds do not end before somebody has credit")

    def leave(self, name: Name, *, dispatched: bool) -> None:
        if dispatched:
            self.dispatches += 1
            self.turn[name] = self.dispatches
        self.queued[name] -= 1
        if not self.queued[name]:
            self.last_left = name


class NaiveVtc:
    def __init__(self, *, lift: bool = True, quantum: float = 0.0, predict_output: bool = False) -> None:
        self.lift = lift
        self.quantum = quantum
        self.predict_output = predict_output
        self.tenants = NaiveLevel(lift=lift, quantum=quantum)
        self.flows: dict[str, NaiveLevel] = {}
        self.requests: list[Request] = []
        self.output: dict[str, int] = {}

    def push(self, request: Request) -> None:
        flows = self.flows.setdefault(request.flow.tenant, NaiveLevel(lift=self.lift, quantum=self.quantum))
        self.tenants.arrive((request.flow.tenant,))
        flows.arrive(request.flow[1:])
        self.requests.append(request)

    def pop(self) -> Request | None:
        if not self.requests:
            return None
        (tenant,) = self.tenants.next()
        flow = self.flows[tenant].next()
        request = next(one for one in self.requests if one.flow == (tenant, *flow))
        self._leave(request, dispatched=True)
        return request

    def remove(self, request: Request) -> None:
        self._leave(request, dispatched=False)

    def charge(self, request: Request, service: ServiceTokens, *, final: bool) -> None:
        """Algorithm 3, with w_p = 1 and w_q = 2: line by line where it differs from algorithm 2."""
        predicted = int(request.progress.output_tokens_expected) if self.predict_output else 0
        if request.id not in self.output:
            self.output[request.id] = 0
            self._add(request, 1.0 * service.prompt + 2.0 * predicted)
        for decoded in range(self.output[request.id] + 1, service.output + 1):
            if decoded > predicted:
                self._add(request, 2.0)
        self.output[request.id] = service.output
        if final and service.output < predicted:
            self._add(request, 2.0 * (service.output - predicted))

    def _add(self, request: Request, service: float) -> None:
        self.tenants.counter[(request.flow.tenant,)] += service / request.weight
        self.flows[request.flow.tenant].counter[request.flow[1:]] += service

    def _leave(self, request: Request, *, dispatched: bool) -> None:
        self.requests.remove(request)
        self.tenants.leave((request.flow.tenant,), dispatched=dispatched)
        self.flows[request.flow.tenant].leave(request.flow[1:], dispatched=dispatched)
