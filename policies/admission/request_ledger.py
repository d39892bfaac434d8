"""The record of one pool's requests, and the only place where events change their state.

Each event is a method, which changes the state (`admission.lifecycle`) and updates every table that knows the request:

    while it waits   the bounded queue, the clocks of waits, and the order (unless it rests or is not queued yet)
    while it runs    its lease, its engine's ledger, and for batch work the candidates for preemption
    in both states   the tree, the working set, its interaction, and the counts of its limits

A request that cannot start waits at one gate (`queue.expected_wait`): the tree, the working
set and the engines say at which.
"""

from __future__ import annotations

from heapq import heapify, heappop, heappush
from math import fsum, inf
from typing import Final

from policies.admission import lifecycle
from policies.admission.decisions import Preempt
from policies.admission.lifecycle import Event, IllegalEvent, UnknownRequest
from policies.admission.policy import Policy
from policies.admission.room import DueTimes, PoolRoom
from policies.admission.waits import WaitClocks
from policies.capacity.lease import Lease
from policies.capacity.ledger import BackendLedger
from policies.capacity.obstacle import Blocked, Obstacle
from policies.capacity.output_lengths import OutputPredictor
from policies.capacity.working_set import WorkingSet
from policies.interactions import Interactions
from policies.limits.quotas import Quotas
from policies.queue.backlog import Backlog
from policies.queue.bounds import BoundedQueue, QueueLimits
from policies.queue.cold_start import ColdStartEstimator
from policies.queue.expected_wait import ExpectedWaits, Gate, GateState, WaitEstimate
from policies.request import Pressure, Rejection, RejectReason, Request, ServiceTokens, State
from policies.tree.pool_tree import PoolTree
from policies.tree.preemption import Preemption
from policies.tree.terms import Tree

NO_SERVICE: Final = ServiceTokens(0, 0)


class RequestLedger:
    """The requests of one pool: a method per event changes a request's state and every table that knows the request."""

    def __init__(
        self,
        policy: Policy,
        limits: QueueLimits,
        lengths: OutputPredictor,
        interactions: Interactions,
        quotas: Quotas | None,
        tree: PoolTree,
    ) -> None:
        self.waiting = BoundedQueue(limits)
        self.waits = WaitClocks()
        self.leases: dict[str, Lease] = {}
        self.backends: dict[str, BackendLedger] = {}
        self.tree = tree
        self.working_set = WorkingSet(tree)
        self.cold_start = ColdStartEstimator()
        self.expected_waits = ExpectedWaits()
        self.policy = policy
        self.lengths = lengths
        self.interactions = interactions
        self.quotas = quotas
        self.preemption = Preemption()
        self._streaming: list[Lease] = []
        """Leases with tokens that are not charged yet."""
        self.charged_s = -inf
        """Time of the last `charge_progress`."""
        self.touched: dict[str, None] = {}
        """Engines with an event since the last `charge_progress`."""
        self.resting: list[tuple[float, str]] = []
        """Heap of resting requests by the end of their rest. Some have left since."""
        self._due = DueTimes()
        """Times at which the estimates of an engine's ledger change without an event."""

    # --- questions ---

    def find_rejection(self, request: Request, pressure: Pressure, now: float) -> Rejection | None:
        """Return the refusal by a limit of the order, or of a start that would wait too long for the working set."""
        if (refused := self.policy.order.find_rejection(request, now, pressure)) is not None:
            return refused
        backlog = self.policy.order_of(request).backlog
        if backlog is None or not backlog.starts or not backlog.has_sleeping_starts(request.flow.tenant):
            return None  # the first start of a tenant may always wait
        most_s = self.waiting.limits.wait_s(request)
        if request.progress.inside or most_s == request.wait_s_max or not self.gate_of(request).gate.starts_of:
            return None
        if not (request.is_batch or self.working_set.is_followed(request)):
            return None  # one goes after the other even while the tenant is ahead
        wait_s = self.waiting.places.left_s(request, now)
        if wait_s is None:
            expected = self.expected(request, now, comes=True)
            # Until the contexts of the tenant have made way for as many others, turns say little: all began at once.
            is_learned = expected.gone >= self.working_set.number_of(request.flow.tenant)
            wait_s = expected.late_s if is_learned else 0.0
        why = RejectReason.WORKING_SET
        return Rejection(why, self.waiting.comes_back_in(request, why, wait_s, now)) if wait_s > most_s else None

    def expected(self, request: Request, now: float, *, comes: bool) -> WaitEstimate:
        """Return the expected wait of a request. `comes`: the request is not queued, and would arrive now."""
        held_s = self.cold_start.left_s(now)
        return self.expected_waits.of(request, self.gate_of(request), now, comes=comes, held_s=held_s)

    def gate_of(self, request: Request, *, waits: bool = True) -> GateState:
        """Return the gate where a request waits or would wait; with `waits` False, the gate that it has just passed."""
        order, queues = self.policy.order_of(request), max(1, len(self.policy.queues()))
        node = self.tree.full_node_for(request) if order.backlog is not None else None
        if node is not None:
            gate, running = Gate(request.is_batch, node.name), self.tree.running(node.name)
        elif order.backlog is not None and self._is_at_the_set(request, order.backlog, waits=waits):
            gate = Gate(request.is_batch, starts_of=request.flow.tenant)
            running = max(1, round(self.working_set.number_of(request.flow.tenant)))
            return GateState(gate, order.backlog, len(order), queues, running, self.working_set.hold_s)
        else:
            gate, running = Gate(request.is_batch), len(self.leases)
        answer_s = self.expected_waits.answer_s()
        if not answer_s:
            answer_s = fsum([ledger.pace.lifetime_s for ledger in self.backends.values()]) / max(1, len(self.backends))
        return GateState(gate, order.backlog, len(order), queues, running, answer_s)

    def _is_at_the_set(self, request: Request, backlog: Backlog, *, waits: bool) -> bool:
        """Return whether a request waits for the working set, or with `waits` False has just been admitted to it."""
        if waits:
            return not self.working_set.has_room(request)
        if request.progress.context is not None:
            return False
        tenant, wait = request.flow.tenant, request.progress.wait
        has_waited = wait is not None and wait.expected is not None and wait.expected.gate.starts_of == tenant
        return has_waited or backlog.has_sleeping_starts(tenant)

    def numbers(self, request: Request | None, now: float) -> dict[str, float]:
        """Return the numbers that decide about a waiting request, beside those of the order.

        `request`: None for the numbers of the pool alone.
        """
        numbers: dict[str, float] = {}
        if self.working_set.hold_s:
            numbers["working_set_tokens"] = float(self.working_set.tokens_in_all)
            numbers["working_set_max_tokens"] = float(self.working_set.capacity_tokens)
            numbers["working_set_hold_s"] = self.working_set.hold_s
        if request is not None:
            numbers["place_in_tenant"] = float(self.waiting.place_of(request))
            numbers["queue"] = float(len(self.waiting.requests))
            numbers["expected_wait_s"] = self.expected(request, now, comes=False).wait_s
        return numbers

    def wanted_tokens(self) -> float:
        """Return the tokens of the prompts and expected answers of all waiting and running requests. O(requests)."""
        present = [*self.waiting.requests.values(), *[lease.request for lease in self.leases.values()]]
        return sum([each.prompt_tokens + each.progress.output_tokens_expected for each in present])

    def lease(self, request_id: str) -> Lease:
        """Return the lease of a dispatched request. Raise UnknownRequest if there is none."""
        lease = self.leases.get(request_id)
        if lease is None:
            raise UnknownRequest(request_id)
        return lease

    def received(self, lease: Lease, now: float) -> ServiceTokens:
        """Return the service of a dispatched request so far: counted if streamed, else estimated from its age."""
        output_tokens = lease.output_tokens
        if not lease.request.streamed:
            output_tokens = self.backends[lease.backend].pace.output_tokens(lease, now)
        return ServiceTokens(lease.request.prompt_tokens, output_tokens)

    def follow_start(self, now: float, *, is_served: bool) -> None:
        """Begin a cold start if requests wait and no engine is in service. End the cold start once an engine is."""
        if not is_served and len(self.waiting.requests):
            self.cold_start.begin(now)
        elif is_served and self.cold_start.complete(now):
            self.expected_waits.resumed(now)

    # --- events: each raises `IllegalEvent`, and changes nothing, if it is not possible in the request's state ---

    def undecided(self, request: Request) -> None:
        """Let a new request wait until other gateways are asked about it."""
        self._apply(lifecycle.UNDECIDED, request)
        self._estimate_output(request)
        self.waiting.add(request)

    def asked(self, request: Request, now: float) -> None:
        """Count an undecided request, because other gateways are asked about it now."""
        self._apply(lifecycle.ASKED, request)
        if self.quotas is not None:
            self.quotas.admitted(request, now)

    def admitted(self, request: Request, now: float) -> None:
        """Queue a request for its turn.

        A request about which other gateways were asked waits and counts already. A request that fails over from another
        pool is under way in its interaction already.
        """
        before = self._apply(lifecycle.ADMITTED, request)
        self.tree.arrived(request, request.configured_weight)
        if not self.tree.is_flat:
            request.weight = self.tree.weight(request.flow.tenant, request.configured_weight)
        if before is not State.ASKED:
            self._estimate_output(request)
            self.waiting.add(request)
            if self.quotas is not None:
                self.quotas.admitted(request, now)
        if before is not State.MOVED:
            self.interactions.admitted(request, now)  # before the push: the order reads the stage
        self.working_set.queued(request, now)
        self.policy.push(request, now)

    def waits_on(self, request: Request, now: float) -> WaitEstimate:
        """Record the expected wait of a request that could not start at once, and return it."""
        progress = request.progress
        if progress.state is State.QUEUED:
            self.expected_waits.count_arrival(self.policy.order_of(request).backlog, request, now)
        assert progress.wait is not None
        expected = self.expected(request, now, comes=progress.state is not State.QUEUED)
        progress.wait.expected = expected
        return expected

    def rejected(self, request: Request) -> None:
        """End a new request that is rejected, so that it never waits."""
        self._apply(lifecycle.REJECTED, request)

    def withdrawn(self, request: Request, now: float) -> None:
        """End a waiting request that was cancelled, has expired, or is evicted or rejected."""
        before = self._apply(lifecycle.WITHDRAWN, request)
        self._wait_no_more(request, now)
        if before is State.ASKED:
            self._uncount(request, now)
        elif before is State.QUEUED:
            self._leave_line(request, now)
            self.interactions.broke_off(request, NO_SERVICE, now)
            self.end_quota(request, NO_SERVICE, now)

    def handed_over(self, request: Request, now: float) -> None:
        """Remove a request that fails over to another pool. The interaction still has the request under way."""
        self._apply(lifecycle.HANDED_OVER, request)
        self._wait_no_more(request, now)
        self._leave_line(request, now)
        self._uncount(request, now)

    def dispatched(self, request: Request, backend: str, now: float) -> None:
        """Record a dispatch to this engine. Charge the prompt, and the output that the order charges ahead."""
        self._apply(lifecycle.DISPATCHED, request)
        self.waiting.remove(request)
        if not self.tree.is_flat:
            request.weight = self.tree.weight(request.flow.tenant, request.configured_weight)
        wait = request.progress.wait
        if wait is not None:
            self.waits.ended(request, now)
            self._estimate_output(request)  # the lengths may have been learned while the request waited
        lease = self.leases[request.id] = Lease(request, backend, now)
        if request.is_batch:
            self.preemption.dispatched(request, backend)
        self.touched[backend] = None
        self.backends[backend].add(lease)
        self.tree.run(request, request.sequences, lease.footprint_tokens)
        if wait is not None or self.waiting.requests:
            self._learn_gate_pace(request, now)
        self.working_set.dispatched(request, now)
        self.policy.charge(request, ServiceTokens(request.prompt_tokens, 0), now, final=False)

    def _learn_gate_pace(self, request: Request, now: float) -> None:
        """Learn the pace of a gate from a request that had waited there, or that passed while others waited."""
        oldest = next(iter(self.waiting.requests.values()), request)
        waits = [one.progress.wait.since_s for one in (request, oldest) if one.progress.wait is not None]
        self.expected_waits.dispatched(request, self.gate_of(request, waits=False), min(waits, default=now), now)

    def returned(self, request: Request, now: float, received: ServiceTokens = NO_SERVICE) -> None:
        """Return a dispatched request to the head of its flow. Unless the request was preempted, take its charge back.

        `received`: service of a preempted request. The charge stays while the request waits: a refund would let it go
        again at once.
        """
        self._apply(lifecycle.RETURNED, request)
        is_preempted = received is not NO_SERVICE
        self._end_lease(request, received, now, is_preempted=is_preempted)
        if is_preempted:  # while it waits, it takes no room in the working set from others
            self.working_set.left(request, NO_SERVICE, now)
        # The weight may have changed while the request ran.
        request.weight = self.tree.weight(request.flow.tenant, request.configured_weight)
        self._estimate_output(request)
        self.waiting.add(request, front=True)
        self.policy.push(request, now, front=True)

    def set_aside(self, blocked: Blocked, now: float, *, stays: bool) -> list[tuple[Request, Rejection | None]]:
        """Set aside the next in order of each queue if all engines are closed to it alone. Return those set aside.

        Such a request rests outside the order until an engine opens, so that it holds up no other. If that is after its
        deadline it is withdrawn, with a refusal, unless it `stays` for the fallback pool and is bound to no engine.
        """
        aside: list[tuple[Request, Rejection | None]] = []
        for each in (blocked, *blocked.others):
            request, progress = each.request, each.request.progress
            if (progress.closed is None and not request.engine) or each.nearest() is not Obstacle.CLOSED:
                continue
            until_s = min([one.closed_until_s(request) for one in self.backends.values() if one.healthy], default=now)
            if until_s <= now:
                continue
            refused = None
            if until_s > progress.deadline_s and (request.engine or not stays):
                lost = RejectReason.NO_BACKEND if request.engine else RejectReason.BACKEND_FAILED
                why, again_s = (lost, 0.0) if until_s == inf else (RejectReason.SERVER_BUSY, until_s - now)
                refused = Rejection(why, max(1.0, again_s))
                self.withdrawn(request, now)
            else:
                self.policy.remove(request, now)
                progress.rests = True
                heappush(self.resting, (min(until_s, progress.deadline_s), request.id))
            aside.append((request, refused))
        if len(self.resting) > 2 * len(self.waiting.requests) + 64:  # most entries are stale
            self.resting = [each for each in self.resting if each[1] in self.waiting.requests]
            heapify(self.resting)
        return aside

    def rests_s(self) -> float:
        """Return the time at which the first rest ends; inf if no request rests."""
        return self.resting[0][0] if self.resting else inf

    def wake(self, now: float, until_s: float) -> None:
        """Return requests whose rest ends by `until_s` to the heads of their flows."""
        while self.resting and self.rests_s() <= until_s:
            request = self.waiting.get(heappop(self.resting)[1])
            if request is not None and request.progress.rests:
                request.progress.rests = False
                self.policy.push(request, now, front=True)

    def finished(self, request: Request, service: ServiceTokens, now: float, awaits_more: bool | None) -> None:
        """End a request with a complete answer. `awaits_more`: it asks for another call; None if that is unknown."""
        self._apply(lifecycle.FINISHED, request)
        ran_s = self._end_lease(request, _charge_for(request, service), now)
        if request.progress.wait is not None:
            self.expected_waits.answered(request.progress.order.backlog, request, ran_s)
        self.tree.left(request)
        self.interactions.served(request, service, now, awaits_more)
        self.working_set.left(request, service, now)
        self.end_quota(request, service, now, ran_s)

    def broken(self, request: Request, service: ServiceTokens, now: float) -> None:
        """End a dispatched request without a complete answer."""
        self._apply(lifecycle.BROKEN, request)
        ran_s = self._end_lease(request, _charge_for(request, service), now)
        self.tree.left(request)
        self.interactions.broke_off(request, service, now)
        self.working_set.left(request, service, now)
        self.end_quota(request, service, now, ran_s)

    def preempt(self, blocked: Blocked | None, engines: list[str], now: float) -> list[Preempt]:
        """Preempt at most one batch request, at one of these engines, for an interactive request without room.

        `blocked`: that request and its obstacles; None if it waits at another gateway.
        """
        order, node = (self.policy.order_of(blocked.request), blocked.ceiling) if blocked else (self.policy.order, "")
        if (blocked is not None and blocked.request.is_batch) or not engines or order.backlog is None:
            return []
        if order.backlog.owes_batch:  # batch work goes before the request
            return []
        id = self.preemption.choose(
            engines,
            sum([ledger.sequences for ledger in self.backends.values()]),
            order.backlog.batch_share,
            lambda id: self.received(self.leases[id], now),
            lambda id: self.leases[id].started_s is not None,
            node=node,
            is_below=(lambda each: self.tree.makes_room(each, blocked.request)) if node and blocked else None,
        )
        return [] if id is None else [Preempt(id)]

    def regroup(self, terms: Tree) -> None:
        """Replace the terms of the tree, and count the present and running requests of each tenant anew."""
        waiting = [each for each in self.waiting.requests.values() if each.progress.state is State.QUEUED]
        self.tree.regroup(terms, waiting, [(lease.request, lease.footprint_tokens) for lease in self.leases.values()])

    def streamed(self, lease: Lease, output_tokens: int) -> None:
        """Count further tokens of an answer. The next `charge_progress` charges them."""
        if lease.charged_tokens == lease.output_tokens:
            self._streaming.append(lease)
        lease.output_tokens += output_tokens
        if lease.started_s is not None:
            self.backends[lease.backend].prefill_pace.made_tokens += output_tokens

    def charge_progress(self, now: float, room: PoolRoom) -> None:
        """Charge the tokens streamed since the last call, and update the ledgers of engines that are touched or due.

        Batch requests that are not streamed are charged for the time that has passed. The room hears of engines where
        the prefill of an answer must have ended by now, or where an answer holds more tokens than before.
        """
        self.charged_s = now
        streaming, self._streaming = self._streaming, []
        touched, self.touched = self.touched, {}
        for lease in streaming:
            touched[lease.backend] = self.touched[lease.backend] = None
        for name in self._due.pop(now) if self._due.heap else ():
            touched[name] = None
        for name in touched:
            ledger = self.backends.get(name)
            if ledger is not None:
                starting = len(ledger.starting)
                self._due.note(name, ledger.estimate(now))
                if len(ledger.starting) < starting:
                    room.changed(name)
        for request_id in self.preemption.running:
            lease = self.leases[request_id]
            if not lease.request.streamed:  # charged as time passes: its service decides what is owed to batch work
                self.policy.charge(lease.request, self.received(lease, now), now, final=False)
        for lease in streaming:
            request = lease.request
            if lease.charged_tokens == lease.output_tokens or self.leases.get(request.id) is not lease:
                continue
            lease.charged_tokens = lease.output_tokens
            progress = request.progress
            if lease.output_tokens >= progress.output_tokens_expected or not progress.order.charges_ahead:
                received = ServiceTokens(request.prompt_tokens, lease.output_tokens)
                self.policy.charge(request, received, now, final=False)
            held = lease.footprint_tokens
            self.backends[lease.backend].kv.regrown(lease, now)
            if lease.footprint_tokens != held:
                self.tree.grew(request, lease.footprint_tokens - held)
                room.load.grew(lease.backend)

    # --- entries ---

    def _apply(self, event: Event, request: Request) -> State:
        """Change the state of a request by an event, and return the state before. Raise IllegalEvent."""
        before = request.progress.state
        after = event.states.get(before)
        if after is None:
            raise IllegalEvent(request.id, before, event)
        request.progress.state = after
        return before

    def _wait_no_more(self, request: Request, now: float) -> None:
        self.waiting.remove(request)
        self.waits.ended(request, now)

    def _estimate_output(self, request: Request) -> None:
        """Estimate the length of the answer: the expected tokens, and those to reserve."""
        progress = request.progress
        progress.output_tokens_expected, progress.output_tokens_reserved = self.lengths.estimate(request)

    def _leave_line(self, request: Request, now: float) -> None:
        """Remove a request that will not run from the order, the tree and the working set."""
        if request.progress.rests:
            request.progress.rests = False
        else:
            self.policy.remove(request, now)
        self.preemption.forget(request)
        self.tree.left(request)
        self.working_set.left(request, NO_SERVICE, now)

    def _end_lease(self, request: Request, charged: ServiceTokens, now: float, *, is_preempted: bool = False) -> float:
        """End a request's run at its engine, in the tree and in the order. Return the seconds since its dispatch.

        The callers update the working set, the interactions and `waits`.
        """
        lease = self.leases[request.id]
        if request.is_batch:
            self.preemption.ended(request, charged, is_preempted=is_preempted)
        self.backends[lease.backend].remove(lease, now)
        self.tree.run(request, -request.sequences, -lease.footprint_tokens)
        self.policy.charge(request, charged, now, final=True)
        del self.leases[request.id]  # last, because an event that fails before this finds its request by the lease
        return now - lease.dispatched_s

    def _uncount(self, request: Request, now: float) -> None:
        if self.quotas is not None:
            self.quotas.withdrawn(request, now)

    def end_quota(self, request: Request, service: ServiceTokens, now: float, ran_s: float = 0.0) -> None:
        if self.quotas is not None:
            self.quotas.ended(request, service, now, ran_s)


def _charge_for(request: Request, service: ServiceTokens) -> ServiceTokens:
    """Return the charge of a request that has ended: its service, or its prompt if it received none. Without a charge,
    a flood of requests that engines refuse at once would always go next in the prefill window.
    """
    return service if service.prompt or service.output else ServiceTokens(request.prompt_tokens, 0)
