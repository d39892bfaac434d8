"""AdmissionEngine: which request is dispatched, when and where? No other module decides this.

Events go in with the time, and decisions come out as values. Nothing here waits, reads a clock or does I/O. The gateway
maps decisions to connections and timers, the simulation maps them to a heap, and both get equal decisions.

Only events change decisions; questions may be asked at any time, any number of times. A table lists the events that are
possible in each state of a request (`admission.lifecycle`), and `admission.request_ledger` records them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from math import inf

from policies.admission.admission_core import NOTHING, AdmissionCore
from policies.admission.decisions import Decision, Failure
from policies.admission.explanation import Explanation, decided_in_words, expected_s, queued_in_words
from policies.admission.request_ledger import NO_SERVICE
from policies.admission.waits import seconds_of
from policies.capacity.gauges import EngineFacts, Gauges, Grant
from policies.capacity.ledger import BackendLedger
from policies.request import CALM, Pressure, Rejection, RejectReason, Request, ServiceTokens, State


class AdmissionEngine(AdmissionCore):
    """The admission engine of one pool: its queue, its engines' ledgers, and its policy.

    The admission engines of several pools may share `interactions` and `quotas`. If a clock is set back, time stands
    still meanwhile, so no request waits longer because of that.
    """

    # --- questions ---

    def received(self, request_id: str, now: float) -> ServiceTokens:
        """Return the service of a dispatched request so far: counted if streamed, else estimated from its age."""
        return self.requests.received(self.requests.lease(request_id), now + self.set_back_s)

    def pressure(self, now: float) -> Pressure:
        """Return the overload that a request would find if it arrived now."""
        now = max(self._now, now + self.set_back_s)
        blocked = self.blocked if self.queued else None
        return self.overload.seen(self.backends.values(), blocked, now)[0]

    def explain(self, request_id: str, now: float) -> Explanation | None:
        """Return the explanation of a request's state; None if it neither waits nor is among the last decisions.

        O(queue of the tenant).
        """
        request, last = self._waiting.get(request_id), self.recent.last(request_id)
        if (known := request or last) is None:
            return None
        pressure, tree = self.pressure(now), self.requests.tree
        now = max(self._now, now + self.set_back_s)
        numbers = self.policy.explain(known.flow, now) | self.requests.numbers(request, now)
        if not tree.is_flat:  # the order's weight depends on the present tenants, so the tree's numbers replace it
            numbers.pop("weight", None)
            numbers |= tree.numbers(known.flow.tenant)
        limits = self.quotas.standing(known.flow.tenant, now) if self.quotas is not None else []
        kv = {name: ledger.kv_fraction() for name, ledger in self.backends.items()}
        if request is not None:
            progress, reason = request.progress, queued_in_words(request, self.blocked, tree.ceiling_in_words(request))
            return Explanation(
                request_id, "queued", request.flow, progress.stage, progress.inside, last, self.blocked, reason,
                self._waits.so_far(request, now), expected_s(progress.wait), pressure, limits, numbers, kv,
            )  # fmt: skip
        assert last is not None
        if last.rejected is not None and last.rejected.limit is not None:
            limits = [last.rejected.limit, *limits]
        return Explanation(
            request_id, "dispatched" if last.rejected is None else "rejected", last.flow, last.stage, last.inside, last,
            None, decided_in_words(last), seconds_of(last.wait), expected_s(last.wait), last.pressure, limits, numbers,
            kv,
        )  # fmt: skip

    def next_wakeup(self) -> float | None:
        """Return the time at which `woke` must be called if no other event comes; None if no request waits."""
        if not self.queued:
            return None
        return min(self._waiting.earliest_deadline_s(), self.room.opens_s(), self.requests.rests_s()) - self.set_back_s

    # --- events ---

    def add_backend(self, name: str, *, max_num_seqs: int | None = None, healthy: bool = True) -> None:
        """Add an engine."""
        ledger = BackendLedger(name, self.capacity, max_num_seqs=max_num_seqs)
        ledger.healthy = healthy
        if self.room.rivals is not None:
            ledger.allowance = Grant(0, 0)  # other gateways are asked first
        self.backends[name] = ledger
        self.room.changed()

    def arrived(self, request: Request, now: float) -> Sequence[Decision]:
        """Queue an arriving request, reject it at once, or let it wait for the answer of other gateways."""
        try:
            now = self._arrived_s = self._time(now)
            self.interactions.arrived(request, now)
            pressure = self._observe(now) if self._waiting.requests or self.overload.pressure.overloaded else CALM
            if not self.is_served and not self.requests.cold_start.begin(now):
                lost = Rejection(RejectReason.NO_BACKEND, self.capacity.retry_backoff_s_max)
                return self._admit_or_reject(request, lost, now, pressure)
            if self.peers is not None and self.peers.must_ask(request, now, is_calm=pressure is CALM):
                decisions = self._admit_or_reject(request, None, now, pressure, asks=True)
                if request.progress.state is State.UNDECIDED:
                    self.peers.ask(self, request)
                return decisions
            rejected = self.quotas.find_rejection(request, now) if self.quotas is not None else None
            rejected = rejected or self.requests.find_rejection(request, pressure, now)
            return self._admit_or_reject(request, rejected, now, pressure)
        except Exception as error:
            return self._mend(error, request.id, now, request)

    def peers_asked(self, request_id: str, now: float) -> None:
        """Count a request about which other gateways are asked now."""
        request = self._waiting.get(request_id)
        if request is not None:
            self.requests.asked(request, self._time(now))

    def decided(self, request_id: str, rejected: Rejection | None, now: float) -> Sequence[Decision]:
        """Queue a request after the answer of other gateways, or reject it if it is beyond a limit (`rejected`)."""
        try:
            now = self._time(now)
            request = self._waiting.get(request_id)
            if request is None:
                return NOTHING
            # The answer may have shown that the request is inside an interaction. Then it may wait longer.
            self._waiting.remove(request)
            since_s = request.progress.deadline_s - self.limits.wait_s(request)
            self.interactions.arrived(request, now)
            request.progress.deadline_s = since_s + self.limits.wait_s(request)
            self._waiting.add(request)
            pressure = self._observe(now)
            rejected = rejected or self.requests.find_rejection(request, pressure, now)
            if rejected is not None:
                self.requests.withdrawn(request, now)
                return (self._reject(request, rejected, now, pressure),)
            self._waits.answered(request, now)
            self.requests.admitted(request, now)
            decisions: list[Decision] = []
            self._decide(now, decisions)
            if request.progress.state is State.QUEUED:
                self._waits_on(request, now, pressure, decisions)
            return decisions
        except Exception as error:
            return self._mend(error, request_id, now)

    def progressed(self, request_id: str, output_tokens: int, now: float) -> Sequence[Decision]:
        """Count further output tokens of a dispatched request; 0 with the first sign of its start."""
        try:
            lease = self._leases.get(request_id)
            if lease is None:
                return NOTHING
            if output_tokens:
                self.requests.streamed(lease, output_tokens)
            if lease.started_s is not None:
                return NOTHING
            now = self._time(now)
            self.backends[lease.backend].started(lease, now)
            return self._room_changed(now, lease.backend)
        except Exception as error:
            return self._mend(error, "", now)

    def finished(
        self, request_id: str, service: ServiceTokens, now: float, awaits_more: bool | None = None
    ) -> Sequence[Decision]:
        """Record the complete answer of a dispatched request.

        `awaits_more`: True if the answer asks for a tool, so that its interaction continues; False for a final answer;
        None if that is unknown.
        """
        try:
            now = self._time(now)
            lease = self.requests.lease(request_id)
            request = lease.request
            lease.output_tokens = service.output
            self.requests.lengths.learn(request, service.output)
            self.policy.order.learn(request, service, now)
            ledger = self.backends[lease.backend]
            ledger.prefill_rate.answered(lease, service)
            if not request.streamed:
                ledger.came_whole(lease, now)
            self.requests.finished(request, service, now, awaits_more)
            return self._room_changed(now, lease.backend)
        except Exception as error:
            return self._mend(error, request_id, now)

    def failed(
        self, request_id: str, failure: Failure, now: float, service: ServiceTokens | None = None, again_s: float = 0.0
    ) -> Sequence[Decision]:
        """Return a failed request to the queue, or end it.

        `service`: tokens that the request received. `again_s`: seconds for which the engine does not want it.
        """
        try:
            lease = self.requests.lease(request_id)
            request = lease.request
            if failure is Failure.BROKEN:
                return self.cancelled(request_id, now, service)
            now = self._time(now)
            self._waits.returned(request, lease.dispatched_s, now)
            if failure is Failure.PREEMPTED:
                received = service or self.requests.received(lease, now)
                self.requests.returned(request, now, received)
                return self._room_changed(now, lease.backend)
            progress, is_full = request.progress, failure is Failure.REFUSED
            if failure is not Failure.DROPPED:
                self.backends[lease.backend].back_off(now, full_for=lease if is_full else None)
            if again_s := inf if failure is Failure.DROPPED else again_s:
                progress.closed = {**(progress.closed or {}), lease.backend: now + again_s}
            progress.unreached += failure is Failure.UNREACHED
            if max(progress.unreached, progress.proven_refusals) >= self.limits.attempts_max and self.is_served:
                self._waits.ended(request, now)
                self.requests.broken(request, NO_SERVICE, now)
                is_gone = inf in (progress.closed or {}).values()
                lost = RejectReason.BACKEND_FAILED if is_gone else RejectReason.NO_BACKEND
                why = Rejection(RejectReason.SERVER_BUSY, max(1.0, again_s)) if is_full else Rejection(lost, 1.0)
                return [self._reject(request, why, now, CALM), *self._room_changed(now, lease.backend)]
            self.requests.returned(request, now)
            return self._room_changed(now, lease.backend)
        except Exception as error:
            return self._mend(error, request_id, now)

    def cancelled(self, request_id: str, now: float, service: ServiceTokens | None = None) -> Sequence[Decision]:
        """End a request whose client is gone, or whose answer broke off.

        A queued request is charged nothing more. A dispatched request is charged for the service that it received.
        """
        try:
            request = self._waiting.get(request_id)
            if request is not None:
                now = self._time(now)
                self._withdraw(request, now)
                return self._room_changed(now)
            lease, service = self.requests.lease(request_id), service or self.received(request_id, now)
            now = self._time(now)
            self.requests.broken(lease.request, service, now)
            return self._room_changed(now, lease.backend)
        except Exception as error:
            return self._mend(error, request_id, now)

    def backend_changed(self, name: str, change: Gauges | EngineFacts | bool, now: float) -> Sequence[Decision]:
        """Follow a scrape of an engine (gauges), its identification (facts), or its health (a bool)."""
        try:
            now = self._time(now)
            ledger = self.backends[name]
            if isinstance(change, bool):
                ledger.healthy = change
                self.room.changed()  # a large prompt may go to a smaller engine only while no larger one is in service
                self.requests.wake(now, inf)
            elif isinstance(change, EngineFacts):
                ledger.recognised(change)
            else:
                if self.set_back_s:
                    change = replace(change, taken_s=change.taken_s + self.set_back_s)
                ledger.observe(change, now, arrived_s=self._arrived_s)
                self.policy.observe(name, change)
            self.room.update_capacity(name)
            self.working_set.measure(self.backends.values(), now, parks=self.limits.spares_calls_inside)
            return self._room_changed(now, name)
        except Exception as error:
            return self._mend(error, "", now)

    def woke(self, now: float) -> Sequence[Decision]:
        """Expire and dispatch at the time that `next_wakeup` named."""
        return self._room_changed(self._time(now))

    def wanted_elsewhere(self, now: float) -> Sequence[Decision]:
        """Preempt batch work here, because an interactive request at another gateway has no room."""
        return self.requests.preempt(None, list(self.backends), self._time(now))

    def catch_up(self, now: float) -> float:
        """Update counters and ledgers to the streamed tokens. Return the time by the admission engine's clock."""
        now = self._time(now)
        self.requests.charge_progress(now, self.room)
        self.room.at(now)
        return now
