"""Which books know a request in which state? The books of one pool, and the only place where a request changes state.

Five books know a request: the bounded queue, the counts of its tenant's limits, its interaction, the order, and the
ledger of its engine. `change` makes the entries that the lifecycle's table names for an event, so no caller can forget
one.
"""

from __future__ import annotations

from typing import Final

from policies.admission.lifecycle import (
    BROKE,
    COUNT,
    JOIN,
    LEASE,
    LEAVE,
    OPEN,
    REJOIN,
    SERVED,
    SETTLE,
    UNCOUNT,
    UNLEASE,
    UNWAIT,
    WAIT,
    Event,
    IllegalEvent,
    UnknownRequest,
)
from policies.admission.policy import Policy
from policies.admission.waits import Waits
from policies.capacity.fair_shares import FairShares
from policies.capacity.lease import Lease
from policies.capacity.ledger import BackendLedger
from policies.capacity.output_lengths import OutputPredictor
from policies.capacity.visits import Visits
from policies.interactions import Interactions
from policies.limits.quotas import Quotas
from policies.queue.bounds import BoundedQueue, QueueLimits
from policies.request import Request, ServiceTokens

__all__ = ["NO_SERVICE", "Books"]

NO_SERVICE: Final = ServiceTokens(0, 0)


class Books:
    """Everything that is noted about the requests of one pool."""

    def __init__(
        self,
        policy: Policy,
        limits: QueueLimits,
        lengths: OutputPredictor,
        interactions: Interactions,
        quotas: Quotas | None,
        tenants: FairShares,
    ) -> None:
        self.waiting = BoundedQueue(limits)
        self.waits = Waits()
        self.leases: dict[str, Lease] = {}
        self.backends: dict[str, BackendLedger] = {}
        self.tenants = tenants
        self.visits = Visits()
        self.policy = policy
        self.lengths = lengths
        self.interactions = interactions
        self.quotas = quotas
        self._uncharged: list[Lease] = []

    def change(
        self,
        event: Event,
        request: Request,
        now: float,
        service: ServiceTokens = NO_SERVICE,
        backend: str = "",
        awaits_more: bool | None = None,
    ) -> None:
        """Apply an event to a request. IllegalEvent if it is not possible in this state; then nothing has changed.

        Args:
            service: what it received, if an engine had it.
            backend: where it goes, if it is dispatched.
            awaits_more: whether its whole answer asks for another call; None: not known.
        """
        progress = request.progress
        transition = event.transitions.get(progress.state)
        if transition is None:
            raise IllegalEvent(request.id, progress.state, event)
        progress.state = transition.to
        entries = transition.entries
        if entries & UNLEASE:
            self._unlease(request, service, now, is_over=not entries & REJOIN)
            if entries & REJOIN:
                request.weight = self.tenants.weight(request)  # it may have been changed while the request ran
        if entries & UNWAIT:
            if entries & LEASE:
                self.waiting.dispatched(request, now)
            else:
                self.waiting.remove(request)
            self.waits.ended(request, now)
        if entries & (WAIT | LEASE):
            self._expect(request)  # when it is dispatched, more is known than when it began to wait
        if entries & WAIT:
            self.waiting.add(request, front=entries & REJOIN != 0)
        if entries & (JOIN | REJOIN | LEAVE | LEASE):
            self._reorder(entries, request, backend, now)
        if entries & (SERVED | BROKE):
            self._interact(entries, request, service, now, awaits_more)
        if self.quotas is not None and entries & (COUNT | UNCOUNT | SETTLE):
            if entries & COUNT:
                self.quotas.admitted(request, now)
            elif entries & UNCOUNT:
                self.quotas.withdrawn(request, now)
            else:
                self.quotas.ended(request, service.prompt + service.output, now)

    def lease(self, request_id: str) -> Lease:
        """The lease of a dispatched request. UnknownRequest if it is not dispatched."""
        lease = self.leases.get(request_id)
        if lease is None:
            raise UnknownRequest(request_id)
        return lease

    def streamed(self, lease: Lease, output_tokens: int) -> None:
        """This many more tokens of its answer were seen. The next `charge_progress` charges them."""
        if lease.charged_tokens == lease.output_tokens:
            self._uncharged.append(lease)
        lease.output_tokens += output_tokens

    def charge_progress(self, now: float) -> None:
        """Bring counters and ledgers up to the tokens that have streamed."""
        for ledger in self.backends.values():
            ledger.estimate(now)
        uncharged, self._uncharged = self._uncharged, []
        for lease in uncharged:
            request = lease.request
            if lease.charged_tokens == lease.output_tokens or self.leases.get(request.id) is not lease:
                continue
            lease.charged_tokens = lease.output_tokens
            received = ServiceTokens(request.prompt_tokens, lease.output_tokens)
            self.policy.charge(request, received, now, final=False)
            held = lease.held_tokens
            self.backends[lease.backend].kv.regrown(lease, now)
            if lease.held_tokens != held:
                self.tenants.grew(request, lease.held_tokens - held)

    def _expect(self, request: Request) -> None:
        progress = request.progress
        progress.output_tokens_expected = self.lengths.expected(request)
        progress.output_tokens_reserved = self.lengths.reserved(request)

    def _reorder(self, entries: int, request: Request, backend: str, now: float) -> None:
        if entries & LEASE:
            lease = self.leases[request.id] = Lease(request, backend, now)
            self.backends[backend].add(lease, spare=self.tenants.is_below(request))
            self.tenants.dispatched(request, lease.held_tokens)
            self.policy.charge(request, ServiceTokens(request.prompt_tokens, 0), now, final=False)
        elif entries & LEAVE:
            self.policy.remove(request, now)
            self.tenants.withdrawn(request)
        else:
            self.tenants.seen(request, now)
            if not entries & REJOIN:
                self.visits.came(request.flow.tenant, now)
            if entries & OPEN:
                self.interactions.admitted(request, now)  # before the order asks for its stage
            self.policy.push(request, now, front=entries & REJOIN != 0)

    def _interact(
        self, entries: int, request: Request, service: ServiceTokens, now: float, awaits_more: bool | None
    ) -> None:
        if entries & SERVED:
            self.interactions.served(request, service, now, awaits_more)
        elif entries & BROKE:
            self.interactions.broke_off(request, service, now)

    def _unlease(self, request: Request, service: ServiceTokens, now: float, *, is_over: bool) -> None:
        if is_over and not service.prompt and not service.output:
            # The engine did nothing with it. Its prompt stays charged, for it took the place of another request in the
            # prefill window. Otherwise a flood of requests that engines refuse at once would always go next.
            service = ServiceTokens(request.prompt_tokens, 0)
        lease = self.leases.pop(request.id)
        self.backends[lease.backend].remove(lease, now)
        self.tenants.ended(request, lease.held_tokens)
        self.visits.stayed(request.flow.tenant, now - lease.dispatched_s)
        self.policy.charge(request, service, now, final=True)
