"""What happens to this traffic? The production `AdmissionEngine` in front of engine models, in virtual time.

The driver is to the simulation what the dispatcher is to the gateway: it carries decisions out and reports what came of
them. All events lie on one heap, ordered by time and then by the order in which they were scheduled, so that the same
input always gives the same run.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from heapq import heappop, heappush
from typing import NamedTuple

from backends.simulated.engine import EngineGauges, EngineModel, EngineRequest, Step
from policies.base import NO_CLAIM, Claim, Flow, Request, ServiceTokens
from policies.capacity import Gauges
from policies.engine import AdmissionEngine, Decision, Dispatch, Failure, Reject

__all__ = ["IMPOSSIBLE", "Arrival", "Event", "Record", "Run", "read_gauges", "replay", "simulate"]

IMPOSSIBLE = "context_length_exceeded"
"""The outcome of a request that is longer than the model's context: the gateway refuses it unseen."""
TIMER_RESOLUTION_S = 1e-6
"""A timer never fires at the very instant that set it."""


@dataclass(frozen=True, slots=True)
class Arrival:
    """One request of the workload. `output_tokens` is what the model will say; the gateway knows only the maximum."""

    id: str
    flow: Flow
    arrived_s: float
    prompt_tokens: int
    output_tokens: int
    output_tokens_max: int = 4096
    weight: float = 1.0
    streamed: bool = True
    body_bytes: int = 0
    system_tokens: int = 0
    claim: Claim = NO_CLAIM
    cancel_after_tokens: int | None = None
    """The client hangs up when it has seen this many output tokens. None: it reads to the end."""
    prefix: tuple[int, ...] = ()
    """Chained hashes of the prompt's blocks, of the engine's own block size."""

    def request(self) -> Request:
        """What the gateway makes of it."""
        return Request(
            self.id, self.flow, self.weight, self.prompt_tokens, self.output_tokens_max, self.arrived_s,
            streamed=self.streamed, body_bytes=self.body_bytes, system_tokens=self.system_tokens, claim=self.claim,
            prefix=self.prefix,
        )  # fmt: skip


@dataclass(slots=True, eq=False)
class Record:
    """What became of one request? Times as the gateway sees them; None: it did not come to that."""

    arrival: Arrival
    dispatched_s: float | None = None
    """The last dispatch; a refused one does not count."""
    token_s: list[float] = field(default_factory=list)
    """When each output token passed the gateway."""
    finished_s: float | None = None
    outcome: str = ""
    """"completed", "cancelled" by its client, or why it was rejected."""
    preemptions: int = 0
    refusals: int = 0
    cached_tokens: int = 0
    """Of the prompt, found in the engine's cache."""

    @property
    def first_token_s(self) -> float | None:
        return self.token_s[0] if self.token_s else None

    @property
    def ttft_s(self) -> float | None:
        """From arrival to first token, in seconds."""
        return self.token_s[0] - self.arrival.arrived_s if self.token_s else None


class Event(NamedTuple):
    """One call of the admission engine: enough to make it again. `arrived` carries the `Arrival`."""

    now: float
    method: str
    args: tuple[object, ...]


@dataclass(slots=True, eq=False)
class Run:
    """Everything that happened, in order."""

    records: dict[str, Record] = field(default_factory=dict)
    decisions: list[tuple[float, Decision]] = field(default_factory=list)
    events: list[Event] = field(default_factory=list)
    waiting_max: int = 0
    """Most requests that ever waited inside one engine, as of the end of a step."""
    ended_s: float = 0.0


def read_gauges(name: str, model: EngineModel, now: float) -> Gauges:
    """What a scrape of this backend says at this time."""
    gauges, profile = model.gauges(now), model.profile
    capacity_tokens = profile.usable_blocks * profile.block_size
    return Gauges(
        now,
        running=gauges.running,
        waiting=gauges.waiting,
        kv_usage=gauges.kv_usage,
        kv_capacity_tokens=capacity_tokens,
        block_size=profile.block_size,
        preemptions_total=gauges.preemptions_total,
    )


def simulate(
    arrivals: Iterable[Arrival],
    *,
    engine: AdmissionEngine,
    backends: dict[str, EngineModel],
    next_arrival: Callable[[Record, float], Arrival | Sequence[Arrival] | None] | None = None,
    scrape: Callable[[str, EngineModel, float], Gauges] = read_gauges,
    refuses: Callable[[str, EngineGauges, float], bool] | None = None,
    ended: Callable[[Record], None] | None = None,
    scrape_interval_s: float = 0.1,
    network_s: float = 0.001,
    timer_s_max: float | None = None,
) -> Run:
    """Run the traffic until every request has ended.

    Args:
        arrivals: in order of time.
        engine: knows every backend by name (`add_backend`), and has seen no event.
        next_arrival: closed-loop clients: what follows when this request has ended at this time, if anything.
        scrape: what a scrape says; replaced to imitate gauges that are frozen or absent.
        refuses: does this backend answer 503 at this time?
        ended: hears of every request that has ended. The run then keeps no records, events and decisions, which of a
            long one would not fit in memory.
        network_s: one way between gateway and backend.
        timer_s_max: the gateway's timer: set when none is, at most this far away. None: exactly when the engine asks.
    """
    return _Driver(
        engine, backends, next_arrival, scrape, refuses, ended, scrape_interval_s, network_s, timer_s_max
    ).run(iter(arrivals))


def replay(events: Iterable[Event], engine: AdmissionEngine) -> list[tuple[float, Decision]]:
    """What does this engine decide on the events of a run?"""
    decisions: list[tuple[float, Decision]] = []
    for now, method, args in events:
        decisions += [(now, decision) for decision in _call(engine, method, args, now)]
    return decisions


def _call(engine: AdmissionEngine, method: str, args: tuple[object, ...], now: float) -> Sequence[Decision]:
    if method == "arrived":
        args = tuple(arg.request() if isinstance(arg, Arrival) else arg for arg in args)
    decisions: Sequence[Decision] = getattr(engine, method)(*args, now)
    return decisions


class _Driver:
    """The heap and what is on it."""

    def __init__(
        self,
        engine: AdmissionEngine,
        backends: dict[str, EngineModel],
        next_arrival: Callable[[Record, float], Arrival | Sequence[Arrival] | None] | None,
        scrape: Callable[[str, EngineModel, float], Gauges],
        refuses: Callable[[str, EngineGauges, float], bool] | None,
        ended: Callable[[Record], None] | None,
        scrape_interval_s: float,
        network_s: float,
        timer_s_max: float | None,
    ) -> None:
        self._engine = engine
        self._backends = backends
        self._next_arrival = next_arrival
        self._scrape = scrape
        self._refuses = refuses
        self._ended = ended
        self._keeps = ended is None
        self._scrape_interval_s = scrape_interval_s
        self._network_s = network_s
        self._timer_s_max = timer_s_max
        self._heap: list[tuple[float, int, Callable[[float], None]]] = []
        self._scheduled = 0
        self._stepping: set[str] = set()
        self._open = 0
        self._wake_s: float | None = None
        self._result = Run()

    def run(self, arrivals: Iterator[Arrival]) -> Run:
        self._schedule_next(arrivals)
        for name in self._backends:
            self._at(0.0, partial(self._scraped, name))
        while self._heap:
            now, _, happen = heappop(self._heap)
            happen(now)
            self._set_timer(now)
        return self._result

    def _at(self, when_s: float, happen: Callable[[float], None]) -> None:
        self._scheduled += 1
        heappush(self._heap, (when_s, self._scheduled, happen))

    # --- the gateway's side ---

    def _tell(self, method: str, now: float, *args: object) -> None:
        """One event into the engine, and its decisions carried out."""
        if self._keeps:
            self._result.events.append(Event(now, method, args))
        decisions = _call(self._engine, method, args, now)
        if decisions:
            self._carry_out(decisions, now)

    def _carry_out(self, decisions: Sequence[Decision], now: float) -> None:
        for decision in decisions:
            if self._keeps:
                self._result.decisions.append((now, decision))
            if isinstance(decision, Dispatch):
                self._result.records[decision.id].dispatched_s = now
                self._at(now + self._network_s, partial(self._reached, decision))
            else:
                self._rejected(decision, now)

    def _rejected(self, decision: Reject, now: float) -> None:
        record = self._result.records[decision.id]
        record.dispatched_s = None
        self._end(record, decision.reason.value, now)

    def _end(self, record: Record, outcome: str, now: float) -> None:
        record.finished_s, record.outcome = now, outcome
        self._open -= 1
        self._result.ended_s = now
        following = self._next_arrival(record, now) if self._next_arrival is not None else None
        for follower in (following,) if isinstance(following, Arrival) else following or ():
            self._open += 1
            self._at(follower.arrived_s, partial(self._arrived, follower))
        if self._ended is not None:
            self._ended(record)
            if outcome != "cancelled":  # its backend has yet to hear of it
                del self._result.records[record.arrival.id]

    def _schedule_next(self, arrivals: Iterator[Arrival]) -> None:
        arrival = next(arrivals, None)
        if arrival is None:
            return
        self._open += 1

        def happen(now: float) -> None:
            self._schedule_next(arrivals)
            self._arrived(arrival, now)

        self._at(arrival.arrived_s, happen)

    def _arrived(self, arrival: Arrival, now: float) -> None:
        record = self._result.records[arrival.id] = Record(arrival)
        tokens = arrival.prompt_tokens + min(arrival.output_tokens, arrival.output_tokens_max)
        if any(tokens <= model.profile.max_model_len for model in self._backends.values()):
            self._tell("arrived", now, arrival)
        else:
            self._end(record, IMPOSSIBLE, now)

    def _set_timer(self, now: float) -> None:
        wakeup_s = self._engine.next_wakeup()
        if self._timer_s_max is not None:
            if wakeup_s is None or self._wake_s is not None:
                return
            wakeup_s = min(wakeup_s, now + self._timer_s_max)
        elif wakeup_s is None or wakeup_s == float("inf"):
            self._wake_s = None
            return
        wakeup_s = max(wakeup_s, now + TIMER_RESOLUTION_S)
        if self._wake_s is None or wakeup_s < self._wake_s or self._wake_s <= now:
            self._wake_s = wakeup_s
            self._at(wakeup_s, self._woke)

    def _woke(self, now: float) -> None:
        if now == self._wake_s:
            self._wake_s = None
            self._tell("woke", now)

    def _scraped(self, name: str, now: float) -> None:
        if self._open:
            self._tell("backend_changed", now, name, self._scrape(name, self._backends[name], now))
            self._at(now + self._scrape_interval_s, partial(self._scraped, name))

    # --- the backend's side ---

    def _reached(self, dispatch: Dispatch, now: float) -> None:
        """A dispatched request is at its backend."""
        model = self._backends[dispatch.backend]
        record = self._result.records[dispatch.id]
        if self._refuses is not None and self._refuses(dispatch.backend, model.gauges(now), now):
            record.refusals += 1
            self._at(now + self._network_s, lambda at: self._tell("failed", at, dispatch.id, Failure.REFUSED))
            return
        arrival = record.arrival
        output_tokens = min(arrival.output_tokens, arrival.output_tokens_max)
        model.submit(EngineRequest(arrival.id, arrival.prompt_tokens, output_tokens, arrival.prefix), now)
        if dispatch.backend not in self._stepping:
            self._step(dispatch.backend, now)

    def _step(self, name: str, now: float) -> None:
        """The backend begins a batch, if there is anything to do."""
        model = self._backends[name]
        if not model.has_work:
            self._stepping.discard(name)
            return
        self._stepping.add(name)
        step = model.step(now)
        for victim in step.preempted:
            self._result.records[victim].preemptions += 1
        self._result.waiting_max = max(self._result.waiting_max, model.gauges().waiting)
        self._at(now + step.duration_s + self._network_s, partial(self._answered, name, step))
        self._at(now + step.duration_s, partial(self._step, name))

    def _answered(self, backend: str, step: Step, now: float) -> None:
        """What a batch produced is at the gateway."""
        for request_id, tokens in step.cached_tokens.items():
            self._result.records[request_id].cached_tokens = tokens
        records, progressed = self._result.records, self._engine.progressed
        for request_id, tokens in step.tokens:  # the hottest loop of all: once for every token
            record = records[request_id]
            if record.outcome:
                continue  # on its way when the client hung up
            arrival = record.arrival
            if tokens == 1:
                record.token_s.append(now)
            else:
                record.token_s.extend([now] * tokens)
            if arrival.streamed:
                if self._keeps:
                    self._result.events.append(Event(now, "progressed", (request_id, tokens)))
                decisions = progressed(request_id, tokens, now)
                if decisions:
                    self._carry_out(decisions, now)
            if arrival.cancel_after_tokens is not None and len(record.token_s) == arrival.cancel_after_tokens:
                self._hung_up(record, backend, now)
        for request_id in step.finished:
            record = self._result.records[request_id]
            if record.outcome:
                continue
            self._end(record, "completed", now)
            service = ServiceTokens(record.arrival.prompt_tokens, len(record.token_s), record.cached_tokens)
            self._tell("finished", now, request_id, service)

    def _hung_up(self, record: Record, backend: str, now: float) -> None:
        """The client is gone; the backend hears of it a network's way later."""
        request_id = record.arrival.id
        self._end(record, "cancelled", now)
        self._tell("cancelled", now, request_id)
        self._at(now + self._network_s, partial(self._backends[backend].abort, request_id))
