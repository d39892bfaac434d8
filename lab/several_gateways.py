"""What do several gateways in front of the same engines do together? The driver, with sync rounds, news and stalls."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from functools import partial
from math import inf
from typing import Any, NamedTuple, Protocol

from backends.simulated.engine_model import EngineModel, Step
from lab.lab_driver import LabDriver
from lab.simulation_result import LOST, SimulationResult
from policies.admission.engine import AdmissionEngine
from policies.capacity.gauges import Gauges
from policies.replicas.messages import PrefixReport, ReplicaReport, ReplicaView
from policies.replicas.pool_replica import PoolReplica
from policies.replicas.prefixes import SharedPrefixes
from policies.replicas.schedule import DEADLINE_S, INTERVAL_S, Schedule
from simulation.driver import SimulatedGateway
from simulation.run import Arrival


class StoreLink(Protocol):
    """The store that the gateways share, and the way there and back."""

    way_s: float
    """Seconds of one way."""

    def exchange(self, gateway: int, number: int, report: ReplicaReport, now: float) -> ReplicaView | None:
        """The answer to this exchange, which is at the store at this time; None: it is lost, there or on its way."""

    def carries(self, news: PrefixReport, now: float) -> bool:
        """Does what a gateway says at this time of the prompts that it sent reach another one?"""


class Stall(NamedTuple):
    """The process of a gateway stands still: what comes to it waits in its sockets.

    For ever: it is dead, its backends abort what it had dispatched, and its clients lose what they waited for.
    """

    gateway: int
    from_s: float
    until_s: float = float("inf")


def simulate_together(
    arrivals: Iterable[Arrival],
    *,
    engines: Sequence[AdmissionEngine],
    backends: dict[str, EngineModel],
    arrives_at: Callable[[Arrival, float], int],
    store: StoreLink | None,
    stalls: Sequence[Stall] = (),
    until_s: float = inf,
    **settings: Any,
) -> SimulationResult:
    """Run the traffic as `lab.lab_driver.simulate` does, which names the other settings.

    Args:
        engines: of the gateways, by their number.
        arrives_at: at which gateway does a request arrive at this time?
        store: carries what the gateways report to each other; None: nothing does.
        stalls: when gateways stand still or die.
    """
    driver = _Together(engines, backends, arrives_at, store, stalls, settings)
    driver.run(arrivals, until_s)
    return driver.result


class _Gateway(SimulatedGateway):
    """A gateway: its engine, its timer, and its schedule with the others."""

    def __init__(self, index: int, engine: AdmissionEngine, *, talks: bool) -> None:
        super().__init__(index, engine)
        self.schedule = Schedule(PoolReplica(engine)) if talks else None
        self.exchange_s = inf
        """When the next exchange begins; infinite while one is under way."""
        self.prefixes: SharedPrefixes | None = None
        if talks and engine.policy.prefixes is not None:
            self.prefixes = SharedPrefixes(engine.policy, engine.backends, name=f"gateway-{index}")
        self.news_s = -inf
        """When news are sent next, or were sent last."""
        self.stalled_until_s = -inf


class _Together(LabDriver):
    def __init__(
        self,
        engines: Sequence[AdmissionEngine],
        backends: dict[str, EngineModel],
        arrives_at: Callable[[Arrival, float], int],
        store: StoreLink | None,
        stalls: Sequence[Stall],
        settings: dict[str, Any],
    ) -> None:
        self._several = [_Gateway(i, engine, talks=store is not None) for i, engine in enumerate(engines)]
        super().__init__(self._several, backends, **settings)
        self._arrives_at = arrives_at
        self._store = store
        self._stalls = stalls

    def begin(self, arrivals: Iterable[Arrival]) -> None:
        super().begin(arrivals)
        for gateway in self._several:
            self._set_exchange(gateway, 0.0)
        for stall in self._stalls:
            self.at(stall.from_s, partial(self._stands_still, stall))

    # --- gateways that stand still ---

    def _is_stalled(self, gateway: SimulatedGateway, now: float, happen: Callable[[float], None]) -> bool:
        """If so, what was to happen there does when it goes on."""
        until_s = self._several[gateway.index].stalled_until_s
        if now < until_s < inf:
            self.at(until_s, happen)
        return now < until_s

    def _stands_still(self, stall: Stall, now: float) -> None:
        gateway = self._several[stall.gateway]
        gateway.stalled_until_s = stall.until_s
        if stall.until_s < inf:
            return
        for record in [one for one in self.records.values() if one.gateway == gateway.index and not one.outcome]:
            if record.dispatched_s is not None:
                self.at(now + self.network_s, partial(self.abort, record.arrival.id))
            self.end(record, LOST, now)

    def arrived(self, arrival: Arrival, now: float) -> None:
        gateway = self._several[self._arrives_at(arrival, now)]
        if gateway.stalled_until_s < inf:
            self.received(gateway, arrival, now)
        else:
            self.end(self.begin_record(arrival, gateway), LOST, now)

    def call(self, gateway: SimulatedGateway, method: str, now: float, *args: object) -> None:
        if not self._is_stalled(gateway, now, lambda at: self.call(gateway, method, at, *args)):
            super().call(gateway, method, now, *args)

    def observed(self, name: str, gauges: Gauges, now: float) -> None:
        """Report the gauges to gateways that do not stand still. Late gauges are outdated, so they are dropped."""
        for gateway in self._several:
            if gateway.stalled_until_s <= now:
                self.call(gateway, "backend_changed", now, name, gauges)

    def answered(self, backend: str, step: Step, now: float) -> None:
        """Report the step. A gateway that stands still reads its part of the step when it goes on."""
        for gateway in self._several:
            if now < gateway.stalled_until_s < inf:
                theirs, step = self._parted(step, gateway)
                self._is_stalled(gateway, now, partial(self.answered, backend, theirs))
        super().answered(backend, step, now)

    def _parted(self, step: Step, gateway: SimulatedGateway) -> tuple[Step, Step]:
        """Return the events of the step for this gateway, and the rest."""
        theirs = {one for one, record in self.records.items() if record.gateway == gateway.index}
        theirs_only, others = (
            replace(
                step,
                tokens=[(one, tokens) for one, tokens in step.tokens if (one in theirs) == is_theirs],
                finished=[one for one in step.finished if (one in theirs) == is_theirs],
            )
            for is_theirs in (True, False)
        )
        return theirs_only, others

    # --- between gateways ---

    def set_timer(self, gateway: SimulatedGateway, now: float) -> None:
        one = self._several[gateway.index]
        if one.stalled_until_s > now:
            return
        if one.schedule is not None and one.schedule.due_s() < one.exchange_s < inf:
            self._set_exchange(one, now)
        if one.prefixes is not None and one.prefixes.has_report and one.news_s <= now:
            one.news_s = max(now, one.news_s + INTERVAL_S)
            self.at(one.news_s, partial(self._publish_news, one, one.prefixes))
        super().set_timer(gateway, now)

    def _set_exchange(self, gateway: _Gateway, now: float) -> None:
        if gateway.schedule is not None:
            gateway.exchange_s = max(now, gateway.schedule.due_s())
            self.at(gateway.exchange_s, partial(self._exchange, gateway))

    def _exchange(self, gateway: _Gateway, now: float) -> None:
        if now != gateway.exchange_s or not self.open_requests:
            return  # it was brought forward
        if gateway.stalled_until_s > now:
            gateway.exchange_s = gateway.stalled_until_s
            self._is_stalled(gateway, now, partial(self._exchange, gateway))
            return
        schedule, store = gateway.schedule, self._store
        assert schedule is not None
        assert store is not None
        gateway.exchange_s = inf
        number, report = schedule.ask(now)

        def at_store(at: float) -> None:
            view = store.exchange(gateway.index, number, report, at)
            if view is None:
                self.at(now + DEADLINE_S, lost)
            else:
                self.at(at + store.way_s, partial(answered, view))

        def answered(view: ReplicaView, at: float) -> None:
            if self._is_stalled(gateway, at, partial(answered, view)):
                return
            self.carry_out(schedule.answered(view, at), at)
            self._set_exchange(gateway, at)

        def lost(at: float) -> None:
            if self._is_stalled(gateway, at, lost):
                return
            self.carry_out(schedule.lost(at), at)
            self._set_exchange(gateway, at)

        self.at(now + store.way_s, at_store)

    def _publish_news(self, gateway: _Gateway, prefixes: SharedPrefixes, now: float) -> None:
        store = self._store
        assert store is not None
        if self._is_stalled(gateway, now, partial(self._publish_news, gateway, prefixes)):
            return
        if not prefixes.has_report:
            return
        news = prefixes.report()
        for other in self._several:
            if other is not gateway and store.carries(news, now):
                self.at(now + 2 * store.way_s, partial(self._take_news, other, news))

    def _take_news(self, gateway: _Gateway, news: PrefixReport, now: float) -> None:
        if gateway.prefixes is not None and not self._is_stalled(gateway, now, partial(self._take_news, gateway, news)):
            gateway.prefixes.receive(news)
