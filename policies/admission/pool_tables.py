"""The tables of one pool's requests, and the questions about them, which change nothing.

`admission.request_ledger` is the only place where the tables change. A request that cannot start waits at one gate
(`queue.expected_wait`): the tree, the working set and the engines say at which.
"""

from __future__ import annotations

from math import fsum, inf

from policies.admission.lifecycle import UnknownRequest
from policies.admission.policy import Policy
from policies.admission.room import DueTimes
from policies.admission.waits import Waits
from policies.capacity.lease import Lease
from policies.capacity.ledger import BackendLedger
from policies.capacity.output_lengths import OutputPredictor
from policies.capacity.working_set import WorkingSet
from policies.interactions import Interactions
from policies.limits.quotas import Quotas
from policies.queue.backlog import Backlog
from policies.queue.bounds import BoundedQueue, QueueLimits
from policies.queue.cold_start import ColdStartEstimator
from policies.queue.expected_wait import Expected, ExpectedWaits, Gate, GateState
from policies.request import Pressure, Refusal, Refused, Request, ServiceTokens
from policies.tree.pool_tree import PoolTree
from policies.tree.preemption import Preemption


class PoolTables:
    """The tables that know the waiting and running requests of one pool."""

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
        self.waits = Waits()
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

    def refusal(self, request: Request, pressure: Pressure, now: float) -> Refused | None:
        """Return the refusal by a limit of the order, or of a start that would wait too long for the working set."""
        if (refused := self.policy.order.refusal(request, now, pressure)) is not None:
            return refused
        backlog = self.policy.order_of(request).backlog
        if backlog is None or not backlog.starts or not backlog.has_sleeping_starts(request.flow.tenant):
            return None  # the first start of a tenant may always wait
        most_s = self.waiting.limits.wait_s(request)
        if request.progress.inside or most_s == request.wait_s_max or not self.gate_of(request).gate.starts_of:
            return None
        wait_s = self.waiting.places.left_s(request, now)
        if wait_s is None:
            expected = self.expected(request, now, comes=True)
            # Until the contexts of the tenant have made way for as many others, turns say little: all began at once.
            is_learned = expected.gone >= self.working_set.number_of(request.flow.tenant)
            wait_s = expected.late_s if is_learned else 0.0
        why = Refusal.WORKING_SET
        return Refused(why, self.waiting.comes_back_in(request, why, wait_s, now)) if wait_s > most_s else None

    def expected(self, request: Request, now: float, *, comes: bool) -> Expected:
        """Return the expected wait of a request. `comes`: the request is not queued, and would arrive now."""
        held_s = self.cold_start.left_s(now)
        return self.expected_waits.of(request, self.gate_of(request), now, comes=comes, held_s=held_s)

    def gate_of(self, request: Request, *, waits: bool = True) -> GateState:
        """Return the gate where a request waits or would wait; with `waits` False, the gate that it has just passed."""
        order, queues = self.policy.order_of(request), max(1, len(self.policy.queues()))
        node = self.tree.full_for(request) if order.backlog is not None else None
        if node is not None:
            gate, running = Gate(request.can_wait, node.name), self.tree.running(node.name)
        elif order.backlog is not None and self._is_at_the_set(request, order.backlog, waits=waits):
            gate = Gate(request.can_wait, starts_of=request.flow.tenant)
            running = max(1, round(self.working_set.number_of(request.flow.tenant)))
            return GateState(gate, order.backlog, len(order), queues, running, self.working_set.hold_s)
        else:
            gate, running = Gate(request.can_wait), len(self.leases)
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
