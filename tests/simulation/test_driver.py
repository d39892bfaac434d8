"""One brain, two bodies: the gateway's dispatcher and the simulation's driver decide the same trace alike, every time.

Here the production `Dispatcher` runs on an event loop whose clock is virtual, before the simulation's engine models.
What is between dispatcher and engine is as in the driver: a network's way there and back, scrapes, refusals.
"""

from __future__ import annotations

import asyncio
import contextvars
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from heapq import heappop, heappush
from typing import Any

import pytest

from backends.simulated.engine_model import EngineModel, EngineRequest, Step
from backends.simulated.engine_profiles import profile
from gateway.pool.dispatcher import TIMER_S_MAX, Dispatcher
from lab.lab_driver import simulate
from lab.simulation_result import EngineEvent, SimulationResult
from policies.admission.decisions import Decision, Dispatch, Failure, Reject
from policies.admission.engine import AdmissionEngine
from policies.admission.lifecycle import UnknownRequest
from policies.admission.named import named_policy
from policies.orders.policy_entries import POLICIES
from policies.queue.bounds import QueueLimits
from policies.request import Flow, Request, ServiceTokens
from simulation.driver import TIMER_RESOLUTION_S, read_gauges
from simulation.run import Arrival, Record

NETWORK_S = 0.001
SCRAPE_S = 0.1
LIMITS = QueueLimits(queue_requests_max=25, queue_wait_s_max=0.4)


class VirtualLoop(asyncio.AbstractEventLoop):
    """As much of an event loop as a dispatcher needs: timers, at exact times, equal ones in the order they were set."""

    def __init__(self) -> None:
        self._now = 0.0
        self._timers: list[tuple[float, int, asyncio.TimerHandle]] = []
        self._set = 0

    def time(self) -> float:
        return self._now

    def get_debug(self) -> bool:
        return False

    def call_at(
        self, when: float, callback: Callable[..., Any], *args: Any, context: contextvars.Context | None = None
    ) -> asyncio.TimerHandle:
        self._set += 1
        handle = asyncio.TimerHandle(when, callback, args, self, context)
        heappush(self._timers, (when, self._set, handle))
        return handle

    def call_later(
        self, delay: float, callback: Callable[..., Any], *args: Any, context: contextvars.Context | None = None
    ) -> asyncio.TimerHandle:
        return self.call_at(self._now + max(delay, TIMER_RESOLUTION_S), callback, *args, context=context)

    def run(self) -> None:
        """Until no timer is left."""
        asyncio._set_running_loop(self)
        try:
            while self._timers:
                self._now, _, handle = heappop(self._timers)
                if not handle.cancelled():
                    handle._callback(*handle._args)
        finally:
            asyncio._set_running_loop(None)


@dataclass(eq=False)
class Client:
    """An exchange without HTTP."""

    body: LiveBody
    arrival: Arrival
    request: Request
    output_tokens: int = 0
    cached_tokens: int = 0

    def dispatched(self, backend: str) -> None:
        body = self.body
        body.decisions.append((body.loop.time(), Dispatch(self.request.id, backend)))
        body.loop.call_at(body.loop.time() + NETWORK_S, body.reached, self, backend)

    def rejected(self, decision: Reject) -> None:
        self.body.decisions.append((self.body.loop.time(), decision))
        self.body.open -= 1


@dataclass(eq=False)
class LiveBody:
    """The gateway's dispatcher before engines in the same process."""

    engine: AdmissionEngine
    backends: dict[str, EngineModel]
    refuses: Callable[[str, int], bool]
    loop: VirtualLoop = field(default_factory=VirtualLoop)
    decisions: list[tuple[float, Decision]] = field(default_factory=list)
    clients: dict[str, Client] = field(default_factory=dict)
    open: int = 0

    def __post_init__(self) -> None:
        self.dispatcher = Dispatcher(self.engine, clock=self.loop.time)
        self.stepping: set[str] = set()

    def run(self, arrivals: list[Arrival]) -> list[tuple[float, Decision]]:
        self._next(iter(arrivals))
        for name in self.backends:
            self.loop.call_at(0.0, self._scrape, name)
        self.loop.run()
        return self.decisions

    def _next(self, arrivals: Iterator[Arrival]) -> None:
        arrival = next(arrivals, None)
        if arrival is not None:
            self.open += 1
            self.loop.call_at(arrival.arrived_s, self._arrive, arrival, arrivals)

    def _arrive(self, arrival: Arrival, arrivals: Iterator[Arrival]) -> None:
        self._next(arrivals)
        client = self.clients[arrival.id] = Client(self, arrival, arrival.request())
        self.dispatcher.submit(client)

    def _scrape(self, name: str) -> None:
        if self.open:
            self.dispatcher.backend_changed(name, read_gauges(self.backends[name], self.loop.time()))
            self.loop.call_at(self.loop.time() + SCRAPE_S, self._scrape, name)

    def reached(self, client: Client, backend: str) -> None:
        model, now = self.backends[backend], self.loop.time()
        if self.refuses(backend, model.gauges(now).running):
            self.loop.call_at(now + NETWORK_S, self.dispatcher.failed, client.request.id, Failure.REFUSED)
            return
        arrival = client.arrival
        model.submit(EngineRequest(arrival.id, arrival.prompt_tokens, arrival.output_tokens, arrival.prefix))
        if backend not in self.stepping:
            self._step(backend)

    def _step(self, backend: str) -> None:
        model, now = self.backends[backend], self.loop.time()
        if not model.has_work:
            self.stepping.discard(backend)
            return
        self.stepping.add(backend)
        step = model.step(now)
        self.loop.call_at(now + step.duration_s + NETWORK_S, self._answered, step)
        self.loop.call_at(now + step.duration_s, self._step, backend)

    def _answered(self, step: Step) -> None:
        for request_id, tokens in step.cached_tokens.items():
            self.clients[request_id].cached_tokens = tokens
        for request_id, tokens in step.tokens:
            client = self.clients[request_id]
            client.output_tokens += tokens
            if client.request.streamed:
                self.dispatcher.progressed(request_id, tokens)
        for request_id in step.finished:
            client = self.clients[request_id]
            self.open -= 1
            service = ServiceTokens(client.arrival.prompt_tokens, client.output_tokens, client.cached_tokens)
            self.dispatcher.finished(request_id, service)


def traffic() -> list[Arrival]:
    """Three tenants, streams and whole answers, common beginnings, more than two engines can take at once."""
    return [
        Arrival(
            f"r{number}", Flow("abc"[number * number % 3], user=str(number % 2)), 0.0041 * number, 40 + number % 97,
            5 + number * 7 % 60, streamed=number % 5 != 0, prefix=(number % 3, 10 + number % 3, 100 + number),
        )
        for number in range(240)
    ]  # fmt: skip


def make_engine(policy: str) -> tuple[AdmissionEngine, dict[str, EngineModel]]:
    engine = AdmissionEngine(named_policy(policy), limits=LIMITS)
    engine.add_backend("one", max_num_seqs=4)
    engine.add_backend("two")
    return engine, {"one": EngineModel(profile("tiny-cpu")), "two": EngineModel(profile("demo"))}


def live(policy: str) -> list[tuple[float, Decision]]:
    engine, backends = make_engine(policy)
    return LiveBody(engine, backends, lambda name, running: name == "two" and running >= 6).run(traffic())


def simulated(policy: str) -> tuple[SimulationResult, AdmissionEngine]:
    engine, backends = make_engine(policy)
    found = simulate(
        traffic(), engine=engine, backends=backends, network_s=NETWORK_S, scrape_interval_s=SCRAPE_S,
        timer_s_max=TIMER_S_MAX, refuses=lambda name, gauges, now: name == "two" and gauges.running >= 6,
    )  # fmt: skip
    return found, engine


def replay(events: Iterable[EngineEvent], engine: AdmissionEngine) -> list[tuple[float, Decision]]:
    """Return what another engine decides on the events of a run, each decision with its time."""
    decisions: list[tuple[float, Decision]] = []
    for now, method, args in events:
        words = [arg.request() if isinstance(arg, Arrival) else arg for arg in args]
        decisions += [(now, decision) for decision in getattr(engine, method)(*words[:2], now, *words[2:])]
    return decisions


@pytest.mark.parametrize("policy", sorted(POLICIES))
def test_the_same_trace_gives_the_same_decisions_live_simulated_and_replayed(policy: str) -> None:
    run, engine = simulated(policy)
    assert live(policy) == run.decisions
    kinds = {type(decision) for _, decision in run.decisions}
    assert kinds == {Dispatch, Reject}, "some are refused, so that this is tested, too"
    dispatched = [decision.id for _, decision in run.decisions if isinstance(decision, Dispatch)]
    assert len(dispatched) > len(set(dispatched)), "some went back to the queue"
    assert (engine.queued, engine.dispatched) == (0, 0)
    assert not any(ledger.sequences or ledger.starting for ledger in engine.backends.values())
    for record in run.records.values():
        if record.outcome == "completed":
            assert len(record.token_s) == record.arrival.output_tokens
            assert record.dispatched_s is not None
            assert record.arrival.arrived_s <= record.dispatched_s < record.token_s[0] <= record.token_s[-1]
    assert replay(run.events, make_engine(policy)[0]) == run.decisions
    other = "vtc" if policy == "fcfs" else "fcfs"
    with pytest.raises((UnknownRequest, AssertionError)):  # the replay has teeth: another policy decides otherwise
        assert replay(run.events, make_engine(other)[0]) == run.decisions


def test_closed_loop_clients_send_the_next_when_one_has_ended() -> None:
    def follow(record: Record, now: float) -> Arrival | None:
        number = int(record.arrival.id) + 1
        return Arrival(str(number), Flow("a"), now + 0.5, 10, 5) if number < 4 else None

    engine, backends = make_engine("vtc")
    run = simulate([Arrival("0", Flow("a"), 1.0, 10, 5)], engine=engine, backends=backends, next_arrival=follow)
    assert list(run.records) == ["0", "1", "2", "3"]
    ends = [record.finished_s for record in run.records.values()]
    starts = [record.arrival.arrived_s for record in run.records.values()]
    assert starts[1:] == [end + 0.5 for end in ends[:-1] if end is not None]
    assert [decision.id for _, decision in run.decisions if isinstance(decision, Dispatch)] == ["0", "1", "2", "3"]
