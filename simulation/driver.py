"""What happens to this traffic? The production `AdmissionEngine` in front of engine models, in virtual time.

The driver is to the simulation what the dispatcher is to the gateway: it carries decisions out and reports what came of
them. All events lie on one heap, ordered by time and then by the order in which they were scheduled, so that the same
input always gives the same run.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from heapq import heappop, heappush

from backends.simulated.engine import EngineGauges, EngineModel, EngineRequest, Step
from policies.admission.decisions import Decision, Dispatch, Failure, Reject
from policies.admission.engine import AdmissionEngine
from policies.admission.request_ledger import NO_SERVICE
from policies.capacity.gauges import Gauges
from policies.replicas.messages import News, ReplicaView
from policies.replicas.pool_replica import PoolReplica
from policies.replicas.prefixes import SharedPrefixes
from policies.replicas.schedule import DEADLINE_S, INTERVAL_S, Schedule
from policies.request import ServiceTokens
from simulation.engine_gauges import read_gauges, read_step
from simulation.run import IMPOSSIBLE, LOST, WRONG, Arrival, EngineEvent, Record, Run, Stall, StoreLink

__all__ = ["replay", "simulate"]

TIMER_RESOLUTION_S = 1e-6
"""A timer never fires at the very instant that set it."""


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
    steps: bool = False,
    network_s: float = 0.001,
    timer_s_max: float | None = None,
    others: Sequence[AdmissionEngine] = (),
    arrives_at: Callable[[Arrival, float], int] = lambda arrival, now: 0,
    store: StoreLink | None = None,
    stalls: Sequence[Stall] = (),
    until_s: float = float("inf"),
) -> Run:
    """Run the traffic until every request has ended, or until this time.

    Args:
        arrivals: in order of time.
        engine: knows every backend by name (`add_backend`), and has seen no event.
        next_arrival: closed-loop clients: what follows when this request has ended at this time, if anything.
        scrape: what a scrape says; replaced to imitate gauges that are frozen or absent.
        refuses: does this backend answer 503 at this time?
        ended: called for every request that has ended. The run then keeps no records, events and decisions, which of a
            long one would not fit in memory.
        steps: backends also say how they are after each step.
        network_s: one way between gateway and backend.
        timer_s_max: the gateway's timer: set when none is, at most this far away. None: exactly when the engine asks.
        others: engines of further gateways in front of the same backends.
        arrives_at: at which gateway does a request arrive at this time? 0: that of `engine`.
        store: carries what the gateways report to each other; None: nothing does.
        stalls: when gateways stand still or die.
    """
    return _Driver(
        [engine, *others], backends, next_arrival, scrape, refuses, ended, scrape_interval_s, steps, network_s,
        timer_s_max, arrives_at, store, stalls,
    ).run(iter(arrivals), until_s)  # fmt: skip


def replay(events: Iterable[EngineEvent], engine: AdmissionEngine) -> list[tuple[float, Decision]]:
    """What does this engine decide on the events of a run?"""
    decisions: list[tuple[float, Decision]] = []
    for now, method, args in events:
        decisions += [(now, decision) for decision in _call(engine, method, args, now)]
    return decisions


def _call(engine: AdmissionEngine, method: str, args: tuple[object, ...], now: float) -> Sequence[Decision]:
    if method == "arrived":
        args = tuple(arg.request() if isinstance(arg, Arrival) else arg for arg in args)
    decisions: Sequence[Decision] = getattr(engine, method)(*args[:2], now, *args[2:])
    return decisions


class _Gateway:
    """One engine, its timer, and its schedule with the others."""

    def __init__(self, index: int, engine: AdmissionEngine, *, talks: bool) -> None:
        self.index = index
        self.engine = engine
        self.schedule = Schedule(PoolReplica(engine)) if talks else None
        self.wake_s: float | None = None
        self.exchange_s = float("inf")
        """When the next exchange begins; infinite while one is under way."""
        self.prefixes: SharedPrefixes | None = None
        if talks and engine.policy.reads_prefixes:
            self.prefixes = SharedPrefixes(engine.policy, engine.backends, name=f"gateway-{index}")
        self.news_s = float("-inf")
        """When news are sent next, or were sent last."""
        self.stalled_until_s = float("-inf")


class _Driver:
    """The heap and what is on it."""

    def __init__(
        self,
        engines: Sequence[AdmissionEngine],
        backends: dict[str, EngineModel],
        next_arrival: Callable[[Record, float], Arrival | Sequence[Arrival] | None] | None,
        scrape: Callable[[str, EngineModel, float], Gauges],
        refuses: Callable[[str, EngineGauges, float], bool] | None,
        ended: Callable[[Record], None] | None,
        scrape_interval_s: float,
        steps: bool,
        network_s: float,
        timer_s_max: float | None,
        arrives_at: Callable[[Arrival, float], int],
        store: StoreLink | None,
        stalls: Sequence[Stall],
    ) -> None:
        self._stalls = stalls
        self._gateways = [_Gateway(i, engine, talks=store is not None) for i, engine in enumerate(engines)]
        self._arrives_at = arrives_at
        self._store = store
        self._backends = backends
        self._next_arrival = next_arrival
        self._scrape = scrape
        self._refuses = refuses
        self._ended = ended
        self._keeps = ended is None
        self._scrape_interval_s = scrape_interval_s
        self._says_steps = steps
        self._network_s = network_s
        self._timer_s_max = timer_s_max
        self._heap: list[tuple[float, int, Callable[[float], None]]] = []
        self._scheduled = 0
        self._stepping: set[str] = set()
        self._open = 0
        self._result = Run()

    def run(self, arrivals: Iterator[Arrival], until_s: float) -> Run:
        self._schedule_next(arrivals)
        for name in self._backends:
            self._at(0.0, partial(self._scraped, name))
        for gateway in self._gateways:
            self._set_exchange(gateway, 0.0)
        for stall in self._stalls:
            self._at(stall.from_s, partial(self._stands_still, stall))
        while self._heap and self._heap[0][0] <= until_s:
            now, _, happen = heappop(self._heap)
            happen(now)
            for gateway in self._gateways:
                if gateway.stalled_until_s <= now:
                    self._set_timer(gateway, now)
        return self._result

    def _at(self, when_s: float, happen: Callable[[float], None]) -> None:
        self._scheduled += 1
        heappush(self._heap, (when_s, self._scheduled, happen))

    # --- gateways that stand still ---

    def _is_stalled(self, gateway: _Gateway, now: float, happen: Callable[[float], None]) -> bool:
        """If so, what was to happen there does when it goes on."""
        if gateway.stalled_until_s <= now:
            return False
        if gateway.stalled_until_s < float("inf"):
            self._at(gateway.stalled_until_s, happen)
        return True

    def _stands_still(self, stall: Stall, now: float) -> None:
        gateway = self._gateways[stall.gateway]
        gateway.stalled_until_s = stall.until_s
        if stall.until_s < float("inf"):
            return
        for record in list(self._result.records.values()):
            if record.gateway != gateway.index or record.outcome:
                continue
            for model in self._backends.values() if record.dispatched_s is not None else ():
                self._at(now + self._network_s, partial(model.abort, record.arrival.id))
            self._end(record, LOST, now)

    # --- the gateway's side ---

    def _call(self, gateway: _Gateway, method: str, now: float, *args: object) -> None:
        """One event into an engine, and its decisions carried out."""
        if self._is_stalled(gateway, now, lambda at: self._call(gateway, method, at, *args)):
            return
        if self._keeps:
            self._result.events.append(EngineEvent(now, method, args))
        decisions = _call(gateway.engine, method, args, now)
        if decisions:
            self._carry_out(decisions, now)

    def _of(self, request_id: str) -> _Gateway:
        return self._gateways[self._result.records[request_id].gateway]

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
        record.dispatched_s, record.retry_after_s = None, decision.retry_after_s
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
            if outcome not in ("cancelled", LOST):  # its backend does not know yet
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
        gateway = self._gateways[self._arrives_at(arrival, now)]
        record = self._result.records[arrival.id] = Record(arrival, gateway=gateway.index)
        tokens = arrival.prompt_tokens + min(arrival.output_tokens, arrival.output_tokens_max)
        if gateway.stalled_until_s == float("inf"):
            self._end(record, LOST, now)
        elif any(tokens <= model.profile.max_model_len for model in self._backends.values()):
            self._call(gateway, "arrived", now, arrival)
        else:
            self._end(record, IMPOSSIBLE, now)

    def _set_timer(self, gateway: _Gateway, now: float) -> None:
        if gateway.schedule is not None and gateway.schedule.due_s() < gateway.exchange_s < float("inf"):
            self._set_exchange(gateway, now)
        if gateway.prefixes is not None and gateway.prefixes.has_news and gateway.news_s <= now:
            gateway.news_s = max(now, gateway.news_s + INTERVAL_S)
            self._at(gateway.news_s, partial(self._publish_news, gateway, gateway.prefixes))
        wakeup_s = gateway.engine.next_wakeup()
        if self._timer_s_max is not None:
            if wakeup_s is None or gateway.wake_s is not None:
                return
            wakeup_s = min(wakeup_s, now + self._timer_s_max)
        elif wakeup_s is None or wakeup_s == float("inf"):
            gateway.wake_s = None
            return
        wakeup_s = max(wakeup_s, now + TIMER_RESOLUTION_S)
        if gateway.wake_s is None or wakeup_s < gateway.wake_s or gateway.wake_s <= now:
            gateway.wake_s = wakeup_s
            self._at(wakeup_s, partial(self._woke, gateway))

    def _woke(self, gateway: _Gateway, now: float) -> None:
        if now == gateway.wake_s:
            gateway.wake_s = None
            self._call(gateway, "woke", now)

    def _scraped(self, name: str, now: float) -> None:
        if self._open:
            gauges = self._scrape(name, self._backends[name], now)
            for gateway in self._gateways:
                if gateway.stalled_until_s <= now:
                    self._call(gateway, "backend_changed", now, name, gauges)
            self._at(now + self._scrape_interval_s, partial(self._scraped, name))

    # --- between gateways ---

    def _set_exchange(self, gateway: _Gateway, now: float) -> None:
        if gateway.schedule is not None:
            gateway.exchange_s = max(now, gateway.schedule.due_s())
            self._at(gateway.exchange_s, partial(self._exchange, gateway))

    def _exchange(self, gateway: _Gateway, now: float) -> None:
        if now != gateway.exchange_s or not self._open:
            return  # it was brought forward
        if gateway.stalled_until_s > now:
            gateway.exchange_s = gateway.stalled_until_s
            self._is_stalled(gateway, now, partial(self._exchange, gateway))
            return
        schedule, store = gateway.schedule, self._store
        assert schedule is not None
        assert store is not None
        gateway.exchange_s = float("inf")
        number, report = schedule.ask(now)

        def at_store(at: float) -> None:
            view = store.exchange(gateway.index, number, report, at)
            if view is None:
                self._at(now + DEADLINE_S, lost)
            else:
                self._at(at + store.way_s, partial(answered, view))

        def answered(view: ReplicaView, at: float) -> None:
            if self._is_stalled(gateway, at, partial(answered, view)):
                return
            self._carry_out(schedule.answered(view, at), at)
            self._set_exchange(gateway, at)

        def lost(at: float) -> None:
            if self._is_stalled(gateway, at, lost):
                return
            self._carry_out(schedule.lost(at), at)
            self._set_exchange(gateway, at)

        self._at(now + store.way_s, at_store)

    def _publish_news(self, gateway: _Gateway, prefixes: SharedPrefixes, now: float) -> None:
        store = self._store
        assert store is not None
        if self._is_stalled(gateway, now, partial(self._publish_news, gateway, prefixes)):
            return
        if not prefixes.has_news:
            return
        news = prefixes.report()
        for other in self._gateways:
            if other is not gateway and store.carries(news, now):
                self._at(now + 2 * store.way_s, partial(self._take_news, other, news))

    def _take_news(self, gateway: _Gateway, news: News, now: float) -> None:
        if gateway.prefixes is not None and not self._is_stalled(gateway, now, partial(self._take_news, gateway, news)):
            gateway.prefixes.receive(news)

    # --- the backend's side ---

    def _reached(self, dispatch: Dispatch, now: float) -> None:
        """A dispatched request is at its backend."""
        model = self._backends[dispatch.backend]
        record = self._result.records[dispatch.id]
        if self._refuses is not None and self._refuses(dispatch.backend, model.gauges(now), now):
            record.refusals += 1
            gateway = self._of(dispatch.id)
            self._at(now + self._network_s, lambda at: self._call(gateway, "failed", at, dispatch.id, Failure.REFUSED))
            return
        arrival = record.arrival
        if arrival.is_wrong:
            self._at(now + self._network_s, partial(self._found_wrong, record))
            return
        tokens, prefix = min(arrival.output_tokens, arrival.output_tokens_max), arrival.context or arrival.prefix
        model.submit(EngineRequest(arrival.id, arrival.prompt_tokens, tokens, prefix), now)
        if dispatch.backend not in self._stepping:
            self._step(dispatch.backend, now)

    def _found_wrong(self, record: Record, now: float) -> None:
        self._end(record, WRONG, now)
        self._call(self._gateways[record.gateway], "failed", now, record.arrival.id, Failure.BROKEN, NO_SERVICE)

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
        if self._says_steps:
            self._at(
                now + step.duration_s + self._network_s, partial(self._said, name, read_step(name, model, step, now))
            )
        self._at(now + step.duration_s + self._network_s, partial(self._answered, name, step))
        self._at(now + step.duration_s, partial(self._step, name))

    def _answered(self, backend: str, step: Step, now: float) -> None:
        """What a batch produced is at the gateway."""
        if any(now < gateway.stalled_until_s < float("inf") for gateway in self._gateways):
            step = self._without_stalled(backend, step, now)
        for request_id, tokens in step.cached_tokens.items():
            self._result.records[request_id].cached_tokens = tokens
        records, gateways = self._result.records, self._gateways
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
                    self._result.events.append(EngineEvent(now, "progressed", (request_id, tokens)))
                decisions = gateways[record.gateway].engine.progressed(request_id, tokens, now)
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
            self._call(gateways[record.gateway], "finished", now, request_id, service)

    def _said(self, name: str, gauges: Gauges, now: float) -> None:
        """What a backend says of a step is at the gateways. What comes late is older, and nobody waits for it."""
        for gateway in self._gateways:
            if gateway.stalled_until_s <= now:
                self._call(gateway, "backend_changed", now, name, gauges)

    def _without_stalled(self, backend: str, step: Step, now: float) -> Step:
        """What is for gateways that stand still they read when they go on."""
        for gateway in self._gateways:
            if not now < gateway.stalled_until_s < float("inf"):
                continue
            records, index = self._result.records, gateway.index
            theirs = replace(
                step,
                tokens=[(one, tokens) for one, tokens in step.tokens if records[one].gateway == index],
                finished=[one for one in step.finished if records[one].gateway == index],
            )
            self._is_stalled(gateway, now, partial(self._answered, backend, theirs))
            step = replace(
                step,
                tokens=[(one, tokens) for one, tokens in step.tokens if records[one].gateway != index],
                finished=[one for one in step.finished if records[one].gateway != index],
            )
        return step

    def _hung_up(self, record: Record, backend: str, now: float) -> None:
        """The client is gone; the backend learns that a network's way later."""
        request_id = record.arrival.id
        self._end(record, "cancelled", now)
        self._call(self._gateways[record.gateway], "cancelled", now, request_id)
        self._at(now + self._network_s, partial(self._backends[backend].abort, request_id))
