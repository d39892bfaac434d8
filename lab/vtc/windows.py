"""How much may a gateway have inside the engine? Simple rules, by which the production engine's own is judged.

An order in front of the vLLM model, asked before every step, without delay. `starts_now` is as good as a scheduler
inside the engine; the others are what a proxy could do that counts requests, or reads one gauge.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from backends.simulated.engine_model import EngineModel, EngineRequest, RequestRefusedError
from backends.simulated.engine_profiles import EngineProfile
from lab.simulation_result import SimulationResult
from lab.vtc.one_engine import OneEngine
from policies.capacity.obstacle import Obstacle
from policies.orders.order import Order
from policies.request import Pressure, Request, ServiceTokens
from simulation.run import IMPOSSIBLE, Arrival, Record

_NO_PRESSURE = Pressure(False, "")


class Inside:
    """The requests inside the engine, including those sent before its next step."""

    def __init__(self, profile: EngineProfile) -> None:
        self.profile = profile
        self.requests = 0
        self.running = 0
        self.waiting = 0
        """Left in its queue by the last step."""
        self.kv_blocks = 0
        """Held, or about to be held by the prompts of those sent since the last step."""
        self.prompt_tokens = 0
        """Prompt tokens of the requests sent since the last step."""

    def blocks(self, request: Request) -> int:
        return -(-request.prompt_tokens // self.profile.block_size)


Rule = Callable[[Inside, Request], bool]
"""May this request be sent now?"""


def starts_now(inside: Inside, request: Request) -> bool:
    """The engine has a slot for it, blocks for its prompt, the next step to compute it, and nobody waits inside."""
    profile = inside.profile
    has_slot = inside.requests < profile.max_num_seqs and not inside.waiting
    has_blocks = inside.kv_blocks + inside.blocks(request) <= profile.usable_blocks
    room = profile.max_num_batched_tokens - inside.running - inside.prompt_tokens
    return has_slot and has_blocks and (request.prompt_tokens <= room or not inside.prompt_tokens)


def in_flight(most: int) -> Rule:
    """Never more than so many requests sent and not answered."""
    return lambda inside, request: inside.requests < most


def waiting(most: int) -> Rule:
    """Only while no more than so many wait inside the engine, which its gauge says."""
    return lambda inside, request: inside.requests - inside.running <= most


def serve_with_rule(arrivals: Iterable[Arrival], order: Order, profile: EngineProfile, rule: Rule) -> SimulationResult:
    """Serve the traffic until every request has ended; impossible ones are refused by the engine, as in vLLM."""
    return _EngineRoom(order, profile, rule).run(arrivals)


class _EngineRoom(OneEngine):
    """An engine, as the room that an order asks."""

    def __init__(self, order: Order, profile: EngineProfile, rule: Rule) -> None:
        self._order = order
        self._rule = rule
        self._model = EngineModel(profile)
        self._inside = Inside(profile)
        self._sent: dict[str, Request] = {}
        self._run = SimulationResult()

    def run(self, arrivals: Iterable[Arrival]) -> SimulationResult:
        coming = iter(arrivals)
        following = next(coming, None)
        now = 0.0
        while following is not None or self._sent or len(self._order):
            while following is not None and following.arrived_s <= now:
                self._arrive(following)
                following = next(coming, None)
            self._send(now)
            if self._model.has_work:
                now = self._step(now)
            elif following is not None:
                now = following.arrived_s
            else:
                break
        return self._run

    def obstacle(self, request: Request) -> Obstacle | None:
        if self._rule(self._inside, request):
            return None
        return Obstacle.SLOTS

    def _arrive(self, arrival: Arrival) -> None:
        record = self._run.records[arrival.id] = Record(arrival)
        request = arrival.request()
        refused = self._order.find_rejection(request, arrival.arrived_s, _NO_PRESSURE)
        if refused is None:
            self._order.push(request, arrival.arrived_s)
        else:
            self._end(record, refused.reason.value, arrival.arrived_s)

    def _send(self, now: float) -> None:
        while (selection := self.next_of(self._order)) is not None:
            request = selection.request
            record = self._run.records[request.id]
            arrival = record.arrival
            try:
                self._model.submit(EngineRequest(request.id, arrival.prompt_tokens, arrival.output_tokens))
            except RequestRefusedError:
                self._order.charge(request, ServiceTokens(0, 0), now, final=True)
                self._end(record, IMPOSSIBLE, now)
                continue
            record.dispatched_s = now
            self._sent[request.id] = request
            self._inside.requests += 1
            self._inside.kv_blocks += self._inside.blocks(request)
            self._inside.prompt_tokens += request.prompt_tokens
            self._order.charge(request, ServiceTokens(request.prompt_tokens, 0), now, final=False)

    def _step(self, now: float) -> float:
        step = self._model.step(now)
        now += step.duration_s
        finished = set(step.finished)
        for victim in step.preempted:
            self._run.records[victim].preemptions += 1
        for request_id, _ in step.tokens:
            record, request = self._run.records[request_id], self._sent[request_id]
            record.token_s.append(now)
            service = ServiceTokens(request.prompt_tokens, len(record.token_s))
            self._order.charge(request, service, now, final=request_id in finished)
        for request_id in finished:
            del self._sent[request_id]
            self._end(self._run.records[request_id], "completed", now)
        gauges, inside = self._model.gauges(), self._inside
        self._run.waiting_max = max(self._run.waiting_max, gauges.waiting)
        inside.requests, inside.running, inside.kv_blocks = len(self._sent), gauges.running, gauges.kv_blocks
        inside.waiting, inside.prompt_tokens = gauges.waiting, 0
        return now

    def _end(self, record: Record, outcome: str, now: float) -> None:
        record.finished_s, record.outcome = now, outcome
        self._run.ended_s = max(self._run.ended_s, now)
