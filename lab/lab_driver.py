"""What happens to this traffic where engines refuse, gauges lie and timers are late? The driver with all of that."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from math import inf
from typing import Any

from backends.simulated.engine_model import EngineGauges, EngineModel, Step
from lab.simulation_result import LOST, EngineEvent, SimulationResult
from policies.admission.decisions import Decision, Dispatch, Failure
from policies.admission.engine import AdmissionEngine
from policies.admission.request_ledger import NO_SERVICE
from policies.capacity.gauges import Gauges
from simulation.driver import TIMER_RESOLUTION_S, Driver, SimulatedGateway, read_gauges
from simulation.run import Arrival, Record

WRONG = "wrong"
"""The outcome of a request that its engine answered with an error."""


def simulate(
    arrivals: Iterable[Arrival],
    *,
    engine: AdmissionEngine,
    backends: dict[str, EngineModel],
    until_s: float = inf,
    **settings: Any,
) -> SimulationResult:
    """Run the traffic until every request has ended, or until this time.

    Args:
        arrivals: in order of time.
        engine: knows every backend by name (`add_backend`), and has seen no event.
        settings: as `LabDriver` names them.
    """
    driver = LabDriver([SimulatedGateway(0, engine)], backends, **settings)
    driver.run(arrivals, until_s)
    return driver.result


def read_step(model: EngineModel, step: Step, now: float) -> Gauges:
    """Return the gauges that a backend reports right after a step."""
    profile = model.profile
    return replace(
        read_gauges(model, inf),  # after the step
        taken_s=now,
        is_step=True,
        scheduled_tokens=step.scheduled_tokens,
        scheduled_tokens_max=profile.max_num_batched_tokens,
        max_num_seqs=profile.max_num_seqs,
    )


@dataclass(eq=False)
class LabDriver(Driver):
    """The driver with closed-loop clients that may hang up, and what may be different of engines and timer.

    Without `ended` it keeps records, decisions and events, which would exceed the memory in a long run.
    """

    result: SimulationResult = field(init=False, default_factory=SimulationResult)
    next_arrival: Callable[[Record, float], Arrival | Sequence[Arrival] | None] | None = None
    """Return the arrivals that follow when this request has ended at this time, if any."""
    scrape: Callable[[str, EngineModel, float], Gauges] | None = None
    """Return the scraped gauges, to imitate gauges that are frozen or absent. None scrapes the engine."""
    refuses: Callable[[str, EngineGauges, float], bool] | None = None
    """Does this backend answer 503 at this time?"""
    steps: bool = False
    """Backends also say how they are after each step."""
    timer_s_max: float | None = None
    """The gateway's timer: set when none is, at most this far away. None: exactly when the engine asks."""
    _anybody_hangs_up: bool = field(init=False, default=False)

    def begin_record(self, arrival: Arrival, gateway: SimulatedGateway) -> Record:
        record = super().begin_record(arrival, gateway)
        if self.ended is None:
            self.result.records[arrival.id] = record
        return record

    def call(self, gateway: SimulatedGateway, method: str, now: float, *args: object) -> None:
        if self.ended is None:
            self.result.events.append(EngineEvent(now, method, args))
        super().call(gateway, method, now, *args)

    def progressed(self, gateway: SimulatedGateway, request_id: str, tokens: int, now: float) -> None:
        if self.ended is None:
            self.result.events.append(EngineEvent(now, "progressed", (request_id, tokens)))
        super().progressed(gateway, request_id, tokens, now)

    def carry_out(self, decisions: Sequence[Decision], now: float) -> None:
        if self.ended is None:
            self.result.decisions += [(now, decision) for decision in decisions]
        super().carry_out(decisions, now)

    def received(self, gateway: SimulatedGateway, arrival: Arrival, now: float) -> None:
        if arrival.cancel_after_tokens is not None:
            self._anybody_hangs_up = True
        super().received(gateway, arrival, now)

    def end(self, record: Record, outcome: str, now: float) -> None:
        super().end(record, outcome, now)
        self.result.ended_s = now
        if self.ended is None or outcome in ("cancelled", LOST):
            self.records[record.arrival.id] = record  # its backend does not know yet
        following = self.next_arrival(record, now) if self.next_arrival is not None else None
        for follower in (following,) if isinstance(following, Arrival) else following or ():
            self.open_requests += 1
            self.at(follower.arrived_s, partial(self.arrived, follower))

    def answered(self, backend: str, step: Step, now: float) -> None:
        """Clients that have seen enough hang up at once, before the next token of the step."""
        if self._anybody_hangs_up:
            for token in step.tokens:
                super().answered(backend, replace(step, tokens=[token], finished=[]), now)
                record = self.records[token[0]]
                if not record.outcome and len(record.token_s) == record.arrival.cancel_after_tokens:
                    self._hung_up(record, backend, now)
            step = replace(step, tokens=[])
        super().answered(backend, step, now)

    def _hung_up(self, record: Record, backend: str, now: float) -> None:
        """The client is gone; the backend learns that a network's way later."""
        request_id = record.arrival.id
        self.end(record, "cancelled", now)
        self.call(self.gateways[record.gateway], "cancelled", now, request_id)
        self.at(now + self.network_s, partial(self.abort, request_id))

    def scraped(self, name: str, now: float) -> Gauges:
        return super().scraped(name, now) if self.scrape is None else self.scrape(name, self.backends[name], now)

    def set_timer(self, gateway: SimulatedGateway, now: float) -> None:
        if self.timer_s_max is None:
            super().set_timer(gateway, now)
            return
        wakeup_s = gateway.engine.next_wakeup()
        if wakeup_s is not None and gateway.wake_s is None:
            self.wake_at(gateway, max(min(wakeup_s, now + self.timer_s_max), now + TIMER_RESOLUTION_S))

    def reached(self, dispatch: Dispatch, now: float) -> None:
        record = self.records[dispatch.id]
        if self.refuses is not None and self.refuses(
            dispatch.backend, self.backends[dispatch.backend].gauges(now), now
        ):
            record.refusals += 1
            gateway = self.gateways[record.gateway]
            self.at(now + self.network_s, lambda at: self.call(gateway, "failed", at, dispatch.id, Failure.REFUSED))
        elif record.arrival.is_wrong:
            self.at(now + self.network_s, partial(self._found_wrong, record))
        else:
            super().reached(dispatch, now)

    def stepped(self, name: str, step: Step, now: float) -> None:
        self.result.waiting_max = max(self.result.waiting_max, self.backends[name].gauges().waiting)
        if self.steps:
            said = read_step(self.backends[name], step, now)
            self.at(now + step.duration_s + self.network_s, partial(self.observed, name, said))
        super().stepped(name, step, now)

    def _found_wrong(self, record: Record, now: float) -> None:
        self.end(record, WRONG, now)
        self.call(self.gateways[record.gateway], "failed", now, record.arrival.id, Failure.BROKEN, NO_SERVICE)
