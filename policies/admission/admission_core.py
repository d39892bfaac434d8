"""The steps that all events of a pool share: time, admission, expiry, dispatch, preemption and refusal.

Each event ends with `_decide`: dispatch in the policy's order until the next request has no room. If an event of a
request fails half way, through a fault of this program, the request is removed from every table (`strike`) and
rejected, and all others continue. `on_fault` reports the fault.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from math import inf
from typing import Final, NamedTuple, Protocol

from policies.admission.decisions import RECENT_MAX, Decision, Dispatch, RecentDecisions, Reject
from policies.admission.lifecycle import IllegalEvent, UnknownRequest
from policies.admission.policy import Policy
from policies.admission.request_ledger import NO_SERVICE, RequestLedger
from policies.admission.room import PoolRoom
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
from policies.request import CALM, WAIT_S_MAX, Pressure, Rejection, RejectReason, Request, ServiceTokens, State
from policies.tree.pool_tree import PoolTree
from policies.tree.terms import Tree

NOTHING: Final[Sequence[Decision]] = ()
WAITED: Final = frozenset({RejectReason.QUEUE_FULL, RejectReason.QUEUE_TIMEOUT, RejectReason.WAIT_TOO_LONG})
"""Reasons of rejections that a ceiling of the tree may have caused."""


class AskingEngine(Protocol):
    """An admission engine that asks other gateways about a request."""

    def peers_asked(self, request_id: str, now: float) -> None:
        """Count the request, because the other gateways are asked about it now."""

    def decided(self, request_id: str, rejected: Rejection | None, now: float) -> Sequence[Decision]:
        """Queue the request after their answer, or reject it if it is beyond a limit (`rejected`)."""


class Peers(Protocol):
    """The other gateways with which limits and interactions are shared."""

    def must_ask(self, request: Request, now: float, *, is_calm: bool) -> bool:
        """Return whether the others must be asked first: about a shared limit, or about the request's interaction."""

    def ask(self, engine: AskingEngine, request: Request) -> None:
        """Ask the others about a request of `engine`. Call its `peers_asked`, then `decided` with the answer."""

    def forget(self, request: Request) -> None:
        """Forget a request that no longer needs an answer."""


class HistoryLimits(NamedTuple):
    """Bounds of the history that a pool keeps: past decisions, and apps with learned lengths of answers."""

    decisions_max: int = RECENT_MAX
    lengths_max: int = APPS_MAX
    """Apps whose answer lengths are remembered."""


REMEMBERED: Final = HistoryLimits()


class AdmissionCore:
    """Base of `AdmissionEngine`: the state of one pool's admission, and the steps that its events share."""

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
        remembered: HistoryLimits = REMEMBERED,
    ):
        self.policy = policy
        self.limits = limits or QueueLimits()
        self.capacity = capacity or CapacitySettings()
        self.interactions = interactions if interactions is not None else Interactions()
        lengths = lengths if lengths is not None else OutputLengths(populations_max=remembered.lengths_max)
        shares = PoolTree(tree)
        self.requests = RequestLedger(policy, self.limits, lengths, self.interactions, quotas, shares)
        self.backends = self.requests.backends
        self.working_set = self.requests.working_set
        self.room = PoolRoom(self.backends, self.working_set, shares, self.requests.preemption)
        self.room.follow(policy)
        self.peers: Peers | None = None
        """The other gateways; None if this gateway is the only one."""
        self.has_fallback = False
        """A fallback pool takes waiting requests while no engine is in service."""
        self.blocked: Blocked | None = None
        """The next request in order and its obstacles, as of the last event; None if no request waits for room."""
        self.set_back_s = 0.0
        """Seconds by which the clock of the events was set back, in all."""
        self._waiting = self.requests.waiting
        self._waits = self.requests.waits
        self._leases = self.requests.leases
        self.quotas = quotas
        self.overload = Overload(overload or OverloadSettings())
        self.recent = RecentDecisions(remembered.decisions_max)
        self.faults = 0
        """Number of events that have failed half way."""
        self.on_fault: Callable[[Exception, str], None] | None = None
        """Callback for a failed event, with the id of its request or "". If None, the error is raised."""
        self._now = 0.0
        self._arrived_s = float("-inf")

    def __repr__(self) -> str:
        counts = f"{self.queued} queued, {self.dispatched} dispatched, {len(self.backends)} backends"
        return f"<AdmissionEngine {counts}>"

    @property
    def queued(self) -> int:
        """Return the number of waiting requests, including those that wait for the answer of other gateways."""
        return len(self._waiting.requests)

    @property
    def queued_bytes(self) -> int:
        return self._waiting.bytes

    @property
    def dispatched(self) -> int:
        return len(self._leases)

    @property
    def is_served(self) -> bool:
        """Return whether an engine is in service."""
        for ledger in self.backends.values():  # noqa: SIM110 (each request asks, and a generator is two objects)
            if ledger.healthy:
                return True
        return False

    def _time(self, now: float) -> float:
        """Return the time of an event by a clock that is never set back."""
        now += self.set_back_s
        if now < self._now:
            self.set_back_s += self._now - now
            return self._now
        self._now = now
        return now

    def _observe(self, now: float) -> Pressure:
        """Update the state of overload, and return it."""
        blocked = self.blocked if self.queued else None
        return self.overload.observe(self.backends.values(), blocked, now)

    def _admit_or_reject(
        self, request: Request, rejected: Rejection | None, now: float, pressure: Pressure, *, asks: bool = False
    ) -> Sequence[Decision]:
        """Admit a request to the queue, or reject it: as `rejected`, or because the queue has no room for it.

        `asks`: other gateways are asked before it is queued.
        """
        victims = self._waiting.evictions_for(request, now) if rejected is None else None
        if victims is None:
            rejected = rejected or Rejection(RejectReason.QUEUE_FULL, 0.0)
            self.requests.rejected(request)
            return (self._reject(request, rejected, now, pressure),)
        decisions: list[Decision] = []
        if self._waiting.places.due:
            request.progress.came_back = self._waiting.places.take(request)
        for victim in victims:
            self._withdraw(victim, now)
            decisions.append(self._reject(victim, Rejection(RejectReason.QUEUE_FULL, 0.0), now, pressure))
        start_s = self.requests.cold_start.allowance_s() if self.requests.cold_start.s_max else 0.0
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
        """Estimate the wait of a request. Reject the request if even the least estimate is more than `wait_s_max`."""
        least_s, _ = interval_s(self.requests.waits_on(request, now).wait_s)
        if least_s > request.wait_s_max:
            self._withdraw(request, now)
            decisions.append(self._reject(request, Rejection(RejectReason.WAIT_TOO_LONG, 0.0), now, pressure))

    def _room_changed(self, now: float, engine: str | None = None) -> Sequence[Decision]:
        """Expire and dispatch after a change at this engine, or after the passage of time (None)."""
        if engine is not None:
            self.room.changed(engine)
            self.requests.touched[engine] = None
        if self.requests.cold_start.s_max:
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
        """Reject a request at its deadline. A start that waited for the working set gets a place for its retry."""
        is_held = request.progress.state is State.QUEUED and not self.working_set.has_room(request)
        self._withdraw(request, now)
        pressure = self._observe(now)
        again_s = 0.0
        if is_held:
            wait_s = self.requests.expected(request, now, comes=True).late_s
            again_s = self._waiting.comes_back_in(request, RejectReason.WORKING_SET, wait_s, now)
        why = RejectReason.QUEUE_TIMEOUT if self.is_served else RejectReason.NO_BACKEND
        return self._reject(request, Rejection(why, again_s), now, pressure)

    def _decide(self, now: float, decisions: list[Decision]) -> None:
        """Dispatch in the policy's order until the next request has no room. Then preempt batch work for it."""
        requests = self.requests
        try:
            if now - requests.charged_s >= LOOK_AGAIN_S:  # not at each event, so that a token costs almost nothing
                requests.charge_progress(now, self.room)
            self.room.at(now)
            if self._waiting.places.due:
                self._waiting.places.expire(now)
        except Exception as error:
            self._report_fault(error, "")
        while True:
            request = None
            try:
                popped = self.policy.pop(now, self.room) if self._waiting.requests else None
                if not isinstance(popped, Selection):
                    if popped is not None and (aside := requests.set_aside(popped, now, stays=self.has_fallback)):
                        decisions += [self._reject(one, why, now, CALM) for one, why in aside if why is not None]
                        continue
                    if popped is not None or self.blocked is not None:
                        self.blocked = popped
                        self._waits.blocked(popped, now)
                    if popped is not None and requests.preemption.running:
                        self._preempt_for(popped, now, decisions)
                    return
                request = popped.request
                requests.dispatched(request, popped.backend, now)
                if self.room.prefill_parts.window_tokens < inf:
                    self.room.prefill_parts.began(self._leases[request.id], now)
                self.room.changed(popped.backend)
                decisions.append(dispatch := Dispatch(request.id, popped.backend))
                self.recent.note(dispatch, request, now, CALM)
                if requests.preemption.running and self.room.waits_inside(popped.backend):
                    inside = Blocked(request, {popped.backend: Obstacle.SLOTS})
                    decisions += requests.preempt(inside, [popped.backend], now)
            except Exception as error:
                request = request or self._waiting.get(self.room.asked) or next(iter(self._waiting.requests.values()))
                decisions.append(self._strike(request, error, now))

    def _preempt_for(self, popped: Blocked, now: float, decisions: list[Decision]) -> None:
        """Preempt batch work for the next in order at each queue, and for a sleeping request at each full node."""
        wanted = [popped, *popped.others]
        known = {blocked.request.id for blocked in wanted}
        asleep = [one for one in self.room.asleep() if one.request.id not in known]
        wanted += [one for one in asleep if self.requests.tree.full_node_for(one.request) is not None]
        for blocked in wanted:
            decisions += self.requests.preempt(blocked, self.room.preempts_at(blocked), now)

    def _withdraw(self, request: Request, now: float) -> None:
        """Remove a request from the queue without service."""
        if self.peers is not None and request.progress.state is not State.QUEUED:
            self.peers.forget(request)
        self.requests.withdrawn(request, now)

    def _reject(self, request: Request, why: Rejection, now: float, pressure: Pressure) -> Reject:
        """Record and return a rejection, with the time until its limit has room and the request would be served."""
        self.interactions.cut(request)
        again_s = max(1.0, why.retry_after_s)
        if self._waiting.requests and (why.limit is not None or not why.retry_after_s):
            again_s = max(again_s, self.requests.expected(request, now, comes=True).wait_s)
        if why.reason is RejectReason.QUEUE_FULL:
            again_s = self._waiting.comes_back_in(request, why.reason, again_s, now)
        ceiling = self.requests.tree.ceiling_in_words(request) if why.reason in WAITED else ""
        rejected = Reject(request.id, why.reason, min(WAIT_S_MAX, again_s), why.limit, ceiling)
        self.recent.note(rejected, request, now, pressure)
        return rejected

    # --- events that fail ---

    def _mend(self, error: Exception, request_id: str, now: float, request: Request | None = None) -> list[Decision]:
        """Recover from an event that failed half way: strike its request, and let all others continue."""
        if isinstance(error, (IllegalEvent, UnknownRequest)):  # nothing has changed
            raise error
        now = self._time(now)
        lease = self._leases.get(request_id)
        request = request or self._waiting.get(request_id) or (lease.request if lease is not None else None)
        decisions: list[Decision] = []
        if request is None:
            self._report_fault(error, request_id)
        else:
            decisions.append(self._strike(request, error, now))
        self.room.changed()
        self._decide(now, decisions)
        return decisions

    def _strike(self, request: Request, error: Exception, now: float) -> Reject:
        """Remove a request from every table, and reject it."""
        strike(self.requests, request, now)
        self.room.changed()
        self._report_fault(error, request.id)
        rejected = Reject(request.id, RejectReason.INTERNAL_ERROR, 1.0)
        self.recent.note(rejected, request, now, CALM)
        return rejected

    def _report_fault(self, error: Exception, request_id: str) -> None:
        """Count a failed event, and call `on_fault`. Without a callback, raise the error."""
        self.faults += 1
        if self.on_fault is None:
            raise error
        self.on_fault(error, request_id)


def strike(requests: RequestLedger, request: Request, now: float) -> None:
    """Remove a request whose event failed half way from every table.

    The tables may disagree about the request, so each is asked by itself. The sums by tenant are counted anew.
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
            lambda: requests.preemption.ended(request, received, is_preempted=False),
        ]
    else:
        parts.append(lambda: requests.policy.remove(request, now))
    for ledger in requests.backends.values():
        if (held := ledger.leases.get(request.id)) is not None:
            parts.append(partial(ledger.remove, held, now))
    parts += [
        lambda: requests.preemption.forget(request),
        lambda: requests.working_set.left(request, NO_SERVICE, now),
        lambda: requests.interactions.broke_off(request, NO_SERVICE, now),
        lambda: requests.end_quota(request, NO_SERVICE, now),
        lambda: requests.regroup(requests.tree.terms),
    ]
    for part in parts:
        try:
            part()
        except Exception:  # the request is not in that table, or the reported fault has occurred again
            continue
