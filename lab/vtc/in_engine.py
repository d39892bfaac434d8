"""What if the policy sat inside the engine, as in the papers? It picks the next request at every batching step.

This is the loop of S-LoRA and LightLLM in which VTC was measured, driving the same orders as the gateway.
Prefill runs alone; with a batch running, admission is tried after every ten decode steps, and at every step once it has
found no room. Nothing is ever preempted, since the memory check knows how long each answer will be: what vLLM cannot
know (algorithm 2 of VTC, section 4.1; constants of its artifact).
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from math import ceil

from lab.simulation_result import SimulationResult
from lab.vtc.one_engine import OneEngine
from policies.capacity.obstacle import Obstacle
from policies.capacity.output_lengths import OutputPredictor
from policies.orders.order import Order
from policies.request import Pressure, Request, ServiceTokens
from simulation.run import IMPOSSIBLE, Arrival, Record

ADAPTER_TOKENS = 32
"""Memory that each client with a request in the batch takes for its adapter, in KV tokens: rank 8, four matrices."""
IDLE_POLL_S = 0.01
"""An empty engine looks this often whether somebody has come."""
_NO_PRESSURE = Pressure(False, "")


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineLoop:
    """Step costs in seconds, limits in tokens and requests.

    A prefill takes `prefill_base_s + per_prefill_token_s * prompt_tokens`; a decode step `decode_base_s + per_seq_s *
    requests + per_context_token_s * tokens of their contexts`.
    """

    kv_tokens: int
    prefill_base_s: float
    per_prefill_token_s: float
    decode_base_s: float
    per_seq_s: float
    per_context_token_s: float
    decodes_between_admissions: int = 10
    requests_max: int = 1000

    @property
    def prefill_tokens_max(self) -> int:
        """Prompt tokens of one prefill at most."""
        return max(self.kv_tokens // 6, 3072)


A10G_LLAMA2_7B = EngineLoop(
    kv_tokens=10_000,
    prefill_base_s=3.58e-2,
    per_prefill_token_s=2.13e-4,
    decode_base_s=1.92e-2,
    per_seq_s=2.45e-4,
    per_context_token_s=2.02e-6,
)
"""A least-squares fit of the step times published with VTC (A10G, Llama-2-7b). There a decode step has a constant of
16.3 ms; 19.2 ms holds the server's overhead too, and meets the measured throughput."""


def serve_in_engine(
    arrivals: Iterable[Arrival],
    order: Order,
    *,
    loop: EngineLoop = A10G_LLAMA2_7B,
    lengths: OutputPredictor | None = None,
    until_s: float = float("inf"),
) -> SimulationResult:
    """Serve the traffic until every request has ended, or for so long; what is running then stays unfinished.

    Args:
        arrivals: in order of time; each tenant is a client of the paper. lengths: output lengths for an order that
        charges predicted output at dispatch.
    """
    return _Loop(order, loop, lengths).run(arrivals, until_s)


class _Running:
    """A request in the batch, in KV tokens: its present use, and what its answer still adds after the next token."""

    __slots__ = ("left", "record", "request", "used")

    def __init__(self, request: Request, record: Record) -> None:
        self.request = request
        self.record = record
        self.used = request.prompt_tokens
        self.left = record.arrival.output_tokens - 1

    def service(self) -> ServiceTokens:
        return ServiceTokens(self.request.prompt_tokens, self.used - self.request.prompt_tokens)


class _Loop(OneEngine):
    """The engine's state, and the room that the order asks."""

    def __init__(self, order: Order, loop: EngineLoop, lengths: OutputPredictor | None) -> None:
        self._order = order
        self._loop = loop
        self._lengths = lengths
        self._run = SimulationResult()
        self._running: list[_Running] = []
        self._admitted: list[_Running] = []
        self._prefill_tokens = 0
        self._has_uncharged = False

    def run(self, arrivals: Iterable[Arrival], until_s: float) -> SimulationResult:
        coming = iter(arrivals)
        following = next(coming, None)
        now, decodes = 0.0, 0
        while now < until_s:
            while following is not None and following.arrived_s <= now:
                self._arrive(following)
                following = next(coming, None)
            if not self._running or decodes >= self._loop.decodes_between_admissions:
                self._admit(now)
            if self._admitted:
                now, decodes = self._prefill(now), 0
            elif self._running:
                now, decodes = self._decode(now), decodes + 1
            else:
                when = self._next_event(following, now)
                if when is None:
                    break
                now = max(now + IDLE_POLL_S, ceil(when / IDLE_POLL_S) * IDLE_POLL_S)
        return self._run

    def obstacle(self, request: Request) -> Obstacle | None:
        """Would the batch, with those admitted so far and this one, stay within memory until all have ended?"""
        if self._prefill_tokens + request.prompt_tokens > self._loop.prefill_tokens_max and self._admitted:
            return Obstacle.PREFILL
        batch = self._running + self._admitted
        if len(batch) >= self._loop.requests_max:
            return Obstacle.SLOTS
        output_tokens = self._run.records[request.id].arrival.output_tokens
        growing = [(each.left, each.used) for each in batch]
        growing.append((output_tokens - 1, request.prompt_tokens))
        growing.sort(reverse=True)
        clients = {each.request.flow.tenant for each in batch}
        clients.add(request.flow.tenant)
        limit = self._loop.kv_tokens - ADAPTER_TOKENS * len(clients)
        held = 0
        for count, (left, used) in enumerate(growing, 1):
            # When this one ends, those that last longer (before it in the list) have grown by as much as it has.
            held += used
            if left * count + held >= limit:
                return Obstacle.KV
        return None

    def _arrive(self, arrival: Arrival) -> None:
        record = self._run.records[arrival.id] = Record(arrival)
        now, request = arrival.arrived_s, arrival.request()
        self._charge(now)
        if arrival.prompt_tokens + arrival.output_tokens - 1 >= self._loop.kv_tokens - ADAPTER_TOKENS:
            self._end(record, IMPOSSIBLE, now)
            return
        refused = self._order.find_rejection(request, now, _NO_PRESSURE)
        if refused is not None:
            self._end(record, refused.reason.value, now)
            return
        if self._lengths is not None:
            request.progress.output_tokens_expected = self._lengths.estimate(request)[0]
        self._order.push(request, now)

    def _admit(self, now: float) -> None:
        """Take requests in the policy's order for as long as the next in order fits."""
        self._charge(now)
        while (selection := self.next_of(self._order)) is not None:
            request = selection.request
            record = self._run.records[request.id]
            record.dispatched_s = now
            if self._lengths is not None:
                request.progress.output_tokens_expected = self._lengths.estimate(request)[0]
            self._order.charge(request, ServiceTokens(request.prompt_tokens, 0), now, final=False)
            self._admitted.append(_Running(request, record))
            self._prefill_tokens += request.prompt_tokens

    def _prefill(self, now: float) -> float:
        loop, admitted = self._loop, self._admitted
        now += loop.prefill_base_s + loop.per_prefill_token_s * self._prefill_tokens
        self._running += admitted
        self._admitted, self._prefill_tokens = [], 0
        self._emit(admitted, now)
        return now

    def _decode(self, now: float) -> float:
        loop, running = self._loop, self._running
        context_tokens = sum(each.used for each in running)
        now += loop.decode_base_s + loop.per_seq_s * len(running) + loop.per_context_token_s * context_tokens
        self._emit(running, now)
        return now

    def _emit(self, batch: list[_Running], now: float) -> None:
        """Add a token to each of these requests."""
        self._has_uncharged = True
        ended = False
        for each in batch:
            each.used += 1
            each.left -= 1
            each.record.token_s.append(now)
            if each.left < 0:
                ended = True
                self._order.charge(each.request, each.service(), now, final=True)
                self._end(each.record, "completed", now)
                if self._lengths is not None:
                    self._lengths.learn(each.request, each.record.arrival.output_tokens)
        if ended:
            self._running = [each for each in self._running if each.left >= 0]

    def _charge(self, now: float) -> None:
        """Bring the counters up to date; they need to be so only when the policy is about to look at them."""
        if self._has_uncharged:
            self._has_uncharged = False
            for each in self._running:
                self._order.charge(each.request, each.service(), now, final=False)

    def _end(self, record: Record, outcome: str, now: float) -> None:
        record.finished_s, record.outcome = now, outcome
        self._run.ended_s = max(self._run.ended_s, now)

    def _next_event(self, following: Arrival | None, now: float) -> float | None:
        """When is there something to do for an idle engine? None: never again."""
        return following.arrived_s if following is not None else None
