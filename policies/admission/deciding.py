"""How does the admission engine decide? What the events of a pool have in common: time, expiry, dispatch and refusal.

An event happens whole or not at all. Where an event of a request fails half way, through a fault of this program, the
request is struck from every table (`strike`) and refused, and all others go on. The gateway hears of it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Final, NamedTuple

from policies.admission.decisions import RECENT_MAX, Decision, Dispatch, Recent, Reject
from policies.admission.lifecycle import IllegalEvent, UnknownRequest
from policies.admission.policy import Policy
from policies.admission.request_ledger import NO_SERVICE, RequestLedger
from policies.admission.room import Elsewhere, PoolRoom
from policies.capacity.fair_shares import FairShares
from policies.capacity.gauges import CapacitySettings
from policies.capacity.ledger import LOOK_AGAIN_S
from policies.capacity.obstacle import Blocked, Obstacle
from policies.capacity.output_lengths import APPS_MAX, OutputLengths, OutputPredictor
from policies.capacity.overload import Overload, OverloadSettings
from policies.interactions import Interactions
from policies.limits.quotas import Quotas
from policies.orders.order import Selection
from policies.queue.bounds import QueueLimits
from policies.queue.expected_wait import interval_s
from policies.request import CALM, WAIT_S_MAX, Pressure, Refusal, Refused, Request, ServiceTokens, State
from policies.tree.pool_tree import PoolTree
from policies.tree.terms import Tree

NOTHING: Final[Sequence[Decision]] = ()
WAITED: Final = frozenset({Refusal.QUEUE_FULL, Refusal.QUEUE_TIMEOUT, Refusal.WAIT_TOO_LONG})
"""A ceiling may be why there was no room in time."""


class Remembered(NamedTuple):
    """How much is remembered of what is over?"""

    decisions_max: int = RECENT_MAX
    lengths_max: int = APPS_MAX
    """Apps whose lengths of answers are remembered."""
    tenants_max: int = 10_000
    """Tenants that may be active with nothing here."""


REMEMBERED: Final = Remembered()


class Deciding:
    """What waits and runs in one pool, and the decisions that follow from it."""

    def __init__(
        self,
        policy: Policy,
        *,
        limits: QueueLimits | None = None,
        capacity: CapacitySettings | None = None,
        lengths: OutputPredictor | None = None,
        overload: OverloadSettings | None = None,
        interactions: Interactions | None = None,
        quotas: Quotas | None = None,
        tree: Tree | None = None,
        remembered: Remembered = REMEMBERED,
    ):
        self.policy = policy
        self.limits = limits or QueueLimits()
        self.capacity = capacity or CapacitySettings()
        self.interactions = interactions if interactions is not None else Interactions()
        lengths = lengths if lengths is not None else OutputLengths(populations_max=remembered.lengths_max)
        tenants = FairShares(tenants_max=remembered.tenants_max)
        shares = PoolTree(tree)
        self.requests = RequestLedger(policy, self.limits, lengths, self.interactions, quotas, tenants, shares)
        self.backends = self.requests.backends
        self.working_set = self.requests.working_set
        self.room = PoolRoom(self.backends, tenants, self.working_set, shares, self.requests.giving_back)
        self.room.follow(policy)
        self.elsewhere: Elsewhere | None = None
        """None: this gateway is the only one that counts."""
        self.is_stood_in_for = False
        """While no engine is in service, another pool takes what waits here."""
        self.blocked: Blocked | None = None
        """The next request in order and its obstacles, as of the last event; None: nothing waits for room."""
        self.set_back_s = 0.0
        """How far the clock of the events was set back in all."""
        self._waiting = self.requests.waiting
        self._waits = self.requests.waits
        self._leases = self.requests.leases
        self.quotas = quotas
        self.overload = Overload(overload or OverloadSettings())
        self.recent = Recent(remembered.decisions_max)
        self.faults = 0
        """Events that have failed half way."""
        self.on_fault: Callable[[Exception, str], None] | None = None
        """Hears of each, with the id of the request that was struck, or "". None: the error is raised."""
        self._now = 0.0
        self._arrived_s = float("-inf")

    def __repr__(self) -> str:
        counts = f"{self.queued} queued, {self.dispatched} dispatched, {len(self.backends)} backends"
        return f"<AdmissionEngine {counts}>"

    @property
    def queued(self) -> int:
        """Requests that wait, including requests that wait for the answer of other gateways."""
        return len(self._waiting)

    @property
    def queued_bytes(self) -> int:
        return self._waiting.bytes

    @property
    def dispatched(self) -> int:
        return len(self._leases)

    @property
    def is_served(self) -> bool:
        """Is an engine in service?"""
        for ledger in self.backends.values():  # noqa: SIM110 (each request asks, and a generator is two objects)
            if ledger.healthy:
                return True
        return False

    def _time(self, now: float) -> float:
        """The time of an event by a clock that is never set back."""
        now += self.set_back_s
        if now < self._now:
            self.set_back_s += self._now - now
            return self._now
        self._now = now
        return now

    def _observe(self, now: float) -> Pressure:
        """How is the pool at this event? Updates the state of overload."""
        blocked = self.blocked if self.queued else None
        found = self.overload.observe(self.backends.values(), blocked, now)
        return Pressure(found.active, found.reason)

    def _let_in(
        self, request: Request, refused: Refused | None, now: float, pressure: Pressure, *, asks: bool = False
    ) -> Sequence[Decision]:
        """Let it wait, unless it is beyond a limit or has no right to room. `asks`: other gateways are asked first."""
        victims = self._waiting.giving_way(request, now) if refused is None else None
        if victims is None:
            refused = refused or Refused(Refusal.QUEUE_FULL, 0.0)
            self.requests.refused(request, now)
            return (self._reject(request, refused, now, pressure),)
        decisions: list[Decision] = []
        request.progress.came_back = self._waiting.places.take(request)
        for victim in victims:
            self._withdraw(victim, now)
            decisions.append(self._reject(victim, Refused(Refusal.QUEUE_FULL, 0.0), now, pressure))
        start_s = self.requests.engine_start.allowance_s()
        request.progress.deadline_s = now + min(self.limits.wait_s(request) + start_s, request.wait_s_max)
        if asks:
            self.requests.undecided(request)
        else:
            self.requests.admitted(request, now)
        self._decide(now, decisions)
        state = request.progress.state
        if state is not State.DISPATCHED and state is not State.ENDED:
            self._waits.began(request, now, asked=state is not State.QUEUED)
            self._waits_on(request, now, pressure, decisions)
        return decisions

    def _waits_on(self, request: Request, now: float, pressure: Pressure, decisions: list[Decision]) -> None:
        """Tell a queued request its wait, and refuse the request if its client is not willing to wait for so long."""
        least_s, _ = interval_s(self.requests.waits_on(request, now).wait_s)
        if least_s > request.wait_s_max:
            self._withdraw(request, now)
            decisions.append(self._reject(request, Refused(Refusal.WAIT_TOO_LONG, 0.0), now, pressure))

    def _room_changed(self, now: float, engine: str | None = None) -> Sequence[Decision]:
        """Something ended, started or became known at this engine, or time has passed: expire what is due, and dispatch
        what can start.
        """
        if engine is not None:
            self.room.changed(engine)
            self.requests.touched[engine] = None
        if self.requests.engine_start.s_max:
            self.requests.follow_start(now, is_served=self.is_served)
        if not self._waiting.requests:
            if self.blocked is not None:
                self.blocked = None
                self._waits.blocked(None, now)
            return NOTHING
        decisions: list[Decision] = []
        while (request := self._waiting.expired(now)) is not None:
            try:
                decisions.append(self._expire(request, now))
            except Exception as error:
                decisions.append(self._strike(request, error, now))
        self.requests.wake(now, now)
        self._decide(now, decisions)
        return decisions

    def _expire(self, request: Request, now: float) -> Reject:
        """Its time is up. A start that the working set has kept waiting may come back."""
        is_held = request.progress.state is State.QUEUED and not self.working_set.has_room(request)
        self._withdraw(request, now)
        pressure = self._observe(now)
        again_s = 0.0
        if is_held:
            wait_s = self.requests.expected(request, now, comes=True).late_s
            again_s = self._waiting.comes_back_in(request, Refusal.WORKING_SET, wait_s, now)
        why = Refusal.QUEUE_TIMEOUT if self.is_served else Refusal.NO_BACKEND
        return self._reject(request, Refused(why, again_s), now, pressure)

    def _decide(self, now: float, decisions: list[Decision]) -> None:
        """Dispatch in the policy's order for as long as the next in order fits."""
        requests = self.requests
        try:
            if now - requests.charged_s >= LOOK_AGAIN_S:  # in batches, so that a single token costs almost nothing
                for engine in requests.charge_progress(now):
                    self.room.changed(engine)
            self.room.at(now)
            self._waiting.places.expire(now)
        except Exception as error:
            self._noted(error, "")
        while True:
            request = None
            try:
                popped = self.policy.pop(now, self.room) if self._waiting.requests else None
                if not isinstance(popped, Selection):
                    if popped is not None and self._lets_pass(popped, now, decisions):
                        continue
                    self.blocked = popped
                    self._waits.blocked(popped, now)
                    if popped is not None and len(requests.giving_back):
                        self._take_back(popped, now, decisions)
                    return
                request = popped.request
                decisions.append(self._dispatch(request, popped.backend, now))
                if self.room.waits_inside(popped.backend):
                    inside = Blocked(request, {popped.backend: Obstacle.SLOTS})
                    decisions += requests.give_back(inside, [popped.backend], now)
            except Exception as error:
                request = request or self._waiting.get(self.room.asked) or next(iter(self._waiting.requests.values()))
                decisions.append(self._strike(request, error, now))

    def _lets_pass(self, popped: Blocked, now: float, decisions: list[Decision]) -> bool:
        """Are the engines closed to the next in order, so that others may go before it? It rests, or leaves."""
        aside = self.requests.set_aside(popped, now, stays=self.is_stood_in_for)
        decisions += [self._reject(one, why, now, CALM) for one, why in aside if why is not None]
        return bool(aside)

    def _take_back(self, popped: Blocked, now: float, decisions: list[Decision]) -> None:
        """Work that can wait makes room for the next in order at each queue, and of those that sleep at each full
        node.
        """
        for blocked in (popped, *popped.others):
            decisions += self.requests.give_back(blocked, self.room.takes_back_at(blocked), now)
        for order in self.policy.queues().values():
            for request, node in order.backlog.asleep_at() if order.backlog is not None else ():
                if request is not popped.request and self.requests.tree.full_for(request) is not None:
                    blocked = Blocked(request, dict.fromkeys(self.backends, Obstacle.CEILING))
                    blocked.ceiling = node
                    decisions += self.requests.give_back(blocked, list(self.backends), now)

    def _dispatch(self, request: Request, backend: str, now: float) -> Dispatch:
        self.requests.dispatched(request, backend, now)
        self.room.prefill_parts.began(self._leases[request.id], now)
        self.room.changed(backend)
        self.recent.note(dispatch := Dispatch(request.id, backend), request, now, CALM)
        return dispatch

    def _withdraw(self, request: Request, now: float) -> None:
        """It leaves the queue without service."""
        if self.elsewhere is not None and request.progress.state is not State.QUEUED:
            self.elsewhere.let_go(request)
        self.requests.withdrawn(request, now)

    def _reject(self, request: Request, refused: Refused, now: float, pressure: Pressure) -> Reject:
        """It is not served, or no longer. It may come back when its limit has room and it would be served."""
        self.interactions.cut(request)
        again_s = max(1.0, refused.retry_after_s)
        if self._waiting.requests and (refused.limit is not None or not refused.retry_after_s):
            again_s = max(again_s, self.requests.expected(request, now, comes=True).wait_s)
        if refused.reason is Refusal.QUEUE_FULL:
            again_s = self._waiting.comes_back_in(request, refused.reason, again_s, now)
        ceiling = self.requests.tree.ceiling_in_words(request) if refused.reason in WAITED else ""
        rejected = Reject(request.id, refused.reason, min(WAIT_S_MAX, again_s), refused.limit, ceiling)
        self.recent.note(rejected, request, now, pressure)
        return rejected

    # --- events that fail ---

    def _mend(self, error: Exception, request_id: str, now: float, request: Request | None = None) -> list[Decision]:
        """An event failed half way. Its request is struck, and all others go on."""
        if isinstance(error, (IllegalEvent, UnknownRequest)):  # nothing has changed
            raise error
        now = self._time(now)
        lease = self._leases.get(request_id)
        request = request or self._waiting.get(request_id) or (lease.request if lease is not None else None)
        decisions: list[Decision] = []
        if request is None:
            self._noted(error, request_id)
        else:
            decisions.append(self._strike(request, error, now))
        self.room.changed()
        self._decide(now, decisions)
        return decisions

    def _strike(self, request: Request, error: Exception, now: float) -> Reject:
        """No table knows the request any more. It is refused, if its client still waits for a decision."""
        strike(self.requests, request, now)
        self.room.changed()
        self._noted(error, request.id)
        rejected = Reject(request.id, Refusal.INTERNAL_ERROR, 1.0)
        self.recent.note(rejected, request, now, CALM)
        return rejected

    def _noted(self, error: Exception, request_id: str) -> None:
        self.faults += 1
        if self.on_fault is None:
            raise error
        self.on_fault(error, request_id)


def strike(requests: RequestLedger, request: Request, now: float) -> None:
    """An event of this request failed half way: take it out of every table that has it, by what each table says
    of itrequests. What is counted by tenant is counted anew.
    """
    progress, lease = request.progress, requests.leases.pop(request.id, None)
    before, progress.state = progress.state, State.ENDED
    if request.id in requests.waiting.requests:
        requests.waiting.remove(request)
    parts: list[Callable[[], object]] = [lambda: requests.waits.ended(request, now)]
    if before is State.DISPATCHED or lease is not None:
        received = ServiceTokens(request.prompt_tokens, 0 if lease is None else lease.output_tokens)
        parts += [
            lambda: requests.policy.charge(request, received, now, final=True),
            lambda: requests.giving_back.ended(request, received, is_given_back=False),
        ]
    else:
        parts.append(lambda: requests.policy.remove(request, now))
    for ledger in requests.backends.values():
        if (held := ledger.leases.get(request.id)) is not None:
            parts.append(partial(ledger.remove, held, now))
    parts += [
        lambda: requests.giving_back.forget(request),
        lambda: requests.working_set.left(request, NO_SERVICE, now),
        lambda: requests.interactions.broke_off(request, NO_SERVICE, now),
        lambda: requests.settle(request, NO_SERVICE, now),
        partial(_recount, requests),
    ]
    for part in parts:
        try:
            part()
        except Exception:  # it is not in that table, or what failed before has failed again, and was told then
            continue


def _recount(requests: RequestLedger) -> None:
    """Count anew who is present and what runs, by the requests themselves."""
    waiting = [each for each in requests.waiting.requests.values() if each.progress.state is State.QUEUED]
    leases = [(lease.request, lease.held_tokens) for lease in requests.leases.values()]
    requests.tenants.recount(waiting, leases)
    requests.tree.regroup(requests.tree.terms, waiting, leases)
