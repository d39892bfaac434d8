"""A driver of the production `AdmissionEngine` in front of engine models, in virtual time.

Its role is that of the gateway's dispatcher: it carries out decisions and reports their effects. All events are on one
heap, ordered by time and then by scheduling, so equal input gives equal runs. `lab.lab_driver` adds faults and keeps
what happened; `lab.several_gateways` adds gateways that share engines.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from heapq import heappop, heappush
from math import inf

from backends.simulated.engine_model import EngineModel, EngineRequest, Step
from policies.admission.decisions import Decision, Dispatch, Failure, Preempt
from policies.admission.engine import AdmissionEngine
from policies.capacity.gauges import Gauges
from policies.request import ServiceTokens
from simulation.run import IMPOSSIBLE, Arrival, Record

TIMER_RESOLUTION_S = 1e-6
"""Least delay of a timer, which never fires at the instant that set it."""


def read_gauges(model: EngineModel, now: float) -> Gauges:
    """Return a simulated engine's gauges at this time, as on its page of metrics."""
    gauges, profile = model.gauges(now), model.profile
    return Gauges(
        now,
        running=gauges.running,
        waiting=gauges.waiting,
        kv_usage=gauges.kv_usage,
        kv_capacity_tokens=profile.usable_blocks * profile.block_size,
        block_size=profile.block_size,
        preemptions_total=gauges.preemptions_total,
        prompt_tokens_total=gauges.prompt_tokens_total,
    )


@dataclass(eq=False)
class SimulatedGateway:
    """A simulated gateway: its admission engine, and the time at which its timer fires."""

    index: int
    engine: AdmissionEngine
    wake_s: float | None = None


@dataclass(eq=False)
class Driver:
    """A simulation of gateways and engines: a heap of events in virtual time, and their handlers."""

    gateways: Sequence[SimulatedGateway]
    backends: dict[str, EngineModel]
    ended: Callable[[Record], None] | None = None
    """Called for every ended request, which the run then forgets."""
    scrape_interval_s: float = 0.1
    network_s: float = 0.001
    """Latency of one way between gateway and backend."""
    records: dict[str, Record] = field(init=False, default_factory=dict)
    """Requests that have not ended."""
    open_requests: int = field(init=False, default=0)
    _heap: list[tuple[float, int, Callable[[float], None]]] = field(init=False, default_factory=list)
    _scheduled: int = field(init=False, default=0)
    _stepping: set[str] = field(init=False, default_factory=set)

    def run(self, arrivals: Iterable[Arrival], until_s: float = inf) -> None:
        """Run until every request has ended, or until this time. `arrivals` are in order of time."""
        self.begin(arrivals)
        while self._heap and self._heap[0][0] <= until_s:
            now, _, happen = heappop(self._heap)
            happen(now)
            for gateway in self.gateways:
                self.set_timer(gateway, now)

    def begin(self, arrivals: Iterable[Arrival]) -> None:
        self._schedule_next(iter(arrivals))
        for name in self.backends:
            self.at(0.0, partial(self._scraped, name))

    def at(self, when_s: float, happen: Callable[[float], None]) -> None:
        self._scheduled += 1
        heappush(self._heap, (when_s, self._scheduled, happen))

    # --- the gateway's side ---

    def call(self, gateway: SimulatedGateway, method: str, now: float, *args: object) -> None:
        """Pass an event to an engine, and carry out its decisions."""
        words = [arg.request() if isinstance(arg, Arrival) else arg for arg in args]
        decisions = getattr(gateway.engine, method)(*words[:2], now, *words[2:])
        if decisions:
            self.carry_out(decisions, now)

    def carry_out(self, decisions: Sequence[Decision], now: float) -> None:
        for decision in decisions:
            if isinstance(decision, Dispatch):
                self.records[decision.id].dispatched_s = now
                self.at(now + self.network_s, partial(self.reached, decision))
            elif isinstance(decision, Preempt):
                self._preempted(self.records[decision.id], now)
            else:
                record = self.records[decision.id]
                record.dispatched_s, record.retry_after_s = None, decision.retry_after_s
                self.end(record, decision.reason.value, now)

    def abort(self, id: str, now: float) -> None:
        """Abort a request at the backend that has it, if one has."""
        for model in self.backends.values():
            model.abort(id)

    def _preempted(self, record: Record, now: float) -> None:
        """Preempt a request unless its client has seen a token. The backend learns it one latency later."""
        id = record.arrival.id
        if record.arrival.streamed and record.token_s:
            return
        record.dispatched_s = None
        record.token_s.clear()
        self.at(now + self.network_s, partial(self.abort, id))
        gateway = self.gateways[record.gateway]
        self.at(now, lambda at: self.call(gateway, "failed", at, id, Failure.PREEMPTED))

    def end(self, record: Record, outcome: str, now: float) -> None:
        record.finished_s, record.outcome = now, outcome
        self.open_requests -= 1
        del self.records[record.arrival.id]
        if self.ended is not None:
            self.ended(record)

    def _schedule_next(self, arrivals: Iterator[Arrival]) -> None:
        arrival = next(arrivals, None)
        if arrival is None:
            return
        self.open_requests += 1

        def happen(now: float) -> None:
            self._schedule_next(arrivals)
            self.arrived(arrival, now)

        self.at(arrival.arrived_s, happen)

    def arrived(self, arrival: Arrival, now: float) -> None:
        self.received(self.gateways[0], arrival, now)

    def received(self, gateway: SimulatedGateway, arrival: Arrival, now: float) -> None:
        record = self.begin_record(arrival, gateway)
        tokens = arrival.prompt_tokens + min(arrival.output_tokens, arrival.output_tokens_max)
        if any(tokens <= model.profile.max_model_len for model in self.backends.values()):
            self.call(gateway, "arrived", now, arrival)
        else:
            self.end(record, IMPOSSIBLE, now)

    def begin_record(self, arrival: Arrival, gateway: SimulatedGateway) -> Record:
        record = self.records[arrival.id] = Record(arrival, gateway=gateway.index)
        return record

    def set_timer(self, gateway: SimulatedGateway, now: float) -> None:
        wakeup_s = gateway.engine.next_wakeup()
        if wakeup_s is None or wakeup_s == inf:
            gateway.wake_s = None
            return
        wakeup_s = max(wakeup_s, now + TIMER_RESOLUTION_S)
        if gateway.wake_s is None or wakeup_s < gateway.wake_s or gateway.wake_s <= now:
            self.wake_at(gateway, wakeup_s)

    def wake_at(self, gateway: SimulatedGateway, wakeup_s: float) -> None:
        gateway.wake_s = wakeup_s
        self.at(wakeup_s, partial(self._woke, gateway))

    def _woke(self, gateway: SimulatedGateway, now: float) -> None:
        if now == gateway.wake_s:
            gateway.wake_s = None
            self.call(gateway, "woke", now)

    def _scraped(self, name: str, now: float) -> None:
        if self.open_requests:
            self.observed(name, self.scraped(name, now), now)
            self.at(now + self.scrape_interval_s, partial(self._scraped, name))

    def scraped(self, name: str, now: float) -> Gauges:
        """Return the gauges that a scrape sees."""
        return read_gauges(self.backends[name], now)

    # --- the backend's side ---

    def reached(self, dispatch: Dispatch, now: float) -> None:
        """Deliver a dispatched request to its backend."""
        arrival = self.records[dispatch.id].arrival
        tokens, prefix = min(arrival.output_tokens, arrival.output_tokens_max), arrival.context or arrival.prefix
        self.backends[dispatch.backend].submit(EngineRequest(arrival.id, arrival.prompt_tokens, tokens, prefix))
        if dispatch.backend not in self._stepping:
            self._step(dispatch.backend, now)

    def _step(self, name: str, now: float) -> None:
        """Begin a batch at a backend with work."""
        model = self.backends[name]
        if not model.has_work:
            self._stepping.discard(name)
            return
        self._stepping.add(name)
        step = model.step(now)
        for victim in step.preempted:
            self.records[victim].preemptions += 1
        self.stepped(name, step, now)
        self.at(now + step.duration_s, partial(self._step, name))

    def stepped(self, name: str, step: Step, now: float) -> None:
        """Schedule the delivery of a batch's tokens: at its end, plus one latency."""
        self.at(now + step.duration_s + self.network_s, partial(self.answered, name, step))

    def answered(self, backend: str, step: Step, now: float) -> None:
        """Deliver the tokens of a batch to the gateway."""
        records, gateways = self.records, self.gateways
        for request_id, tokens in step.cached_tokens.items():
            records[request_id].cached_tokens = tokens
        for request_id, tokens in step.tokens:  # the hottest loop: once per token
            record = records[request_id]
            if record.outcome or record.dispatched_s is None:
                continue  # the client hung up, or the request was preempted
            if tokens == 1:
                record.token_s.append(now)
            else:
                record.token_s.extend([now] * tokens)
            if record.arrival.streamed:
                self.progressed(gateways[record.gateway], request_id, tokens, now)
        for request_id in step.finished:
            record = records[request_id]
            if record.outcome or record.dispatched_s is None:
                continue
            self.end(record, "completed", now)
            service = ServiceTokens(record.arrival.prompt_tokens, len(record.token_s), record.cached_tokens)
            self.call(gateways[record.gateway], "finished", now, request_id, service)

    def progressed(self, gateway: SimulatedGateway, request_id: str, tokens: int, now: float) -> None:
        decisions = gateway.engine.progressed(request_id, tokens, now)
        if decisions:
            self.carry_out(decisions, now)

    def observed(self, name: str, gauges: Gauges, now: float) -> None:
        """Report a backend's gauges to the gateways."""
        for gateway in self.gateways:
            self.call(gateway, "backend_changed", now, name, gauges)
