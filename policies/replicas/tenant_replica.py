"""A gateway's side of the sync rounds about limits and interactions, whose tenants several gateways serve.

Limits and interactions do not depend on the pool, so one sync round serves all pools of a gateway. Near a limit a
request stays undecided until a sync round has counted it. So the number of gateways does not multiply a limit. A
request that may continue an interaction of another gateway also stays undecided, but only while other requests wait:
otherwise the interaction does not matter.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from policies.admission.admission_core import AskingEngine
from policies.admission.decisions import Decision
from policies.admission.engine import AdmissionEngine
from policies.interactions import Interactions
from policies.limits.quotas import Quotas
from policies.replicas.messages import REPORTED_MAX, InteractionDelta, ReplicaReport, ReplicaView
from policies.replicas.shared_interactions import SharedInteractions
from policies.replicas.tallies import SharedQuotas
from policies.request import Rejection, Request


class _UndecidedRequest(NamedTuple):
    """A request that waits for other gateways' counts, and the slice of the report that asks about the request."""

    request: Request
    engine: AskingEngine
    begin: int = 0
    end: int = 0


class TenantReplica:
    """Link of the admission engines to other gateways: asks about requests that this gateway cannot decide alone."""

    def __init__(
        self,
        quotas: Quotas | None,
        interactions: Interactions | None,
        engines: Sequence[AdmissionEngine],
        *,
        epoch_s: float = 0.0,
        refuses_alone: bool = False,
        workers: int = 1,
    ) -> None:
        """Follow the admission engines of all pools.

        Args:
            epoch_s: seconds by which the gateways' common clock is ahead of the engines' clock.
            refuses_alone: reject every request with a limit while no reply comes from the store.
            workers: number of gateways that are known to count together, even before any reply.
        """
        self._quotas = SharedQuotas(quotas if quotas is not None else Quotas(), epoch_s=epoch_s, workers=workers)
        self._interactions = SharedInteractions(interactions if interactions is not None else Interactions())
        self._refuses_alone = refuses_alone
        self._is_alone = False
        self._undecided: dict[str, _UndecidedRequest] = {}
        """Requests for the next report."""
        self._asked: dict[str, _UndecidedRequest] = {}
        """Requests of the last report, which are counted."""
        self._keys_asked = 0
        self._decisions: dict[AskingEngine, list[Decision]] = {engine: [] for engine in engines}
        for engine in engines:
            engine.peers = self

    # --- for the admission engines ---

    def must_ask(self, request: Request, now: float, *, is_calm: bool) -> bool:
        """Return whether this request must stay undecided until the store has replied."""
        if self._is_alone:
            return False
        return not self._quotas.is_sure(request, now) or (not is_calm and self._interactions.is_unknown(request))

    def ask(self, engine: AskingEngine, request: Request) -> None:
        """Ask about a request in the next sync round."""
        self._undecided[request.id] = _UndecidedRequest(request, engine)

    def forget(self, request: Request) -> None:
        """Forget a request that needs no decision any more."""
        if self._undecided.pop(request.id, None) is None:
            self._asked.pop(request.id, None)

    def decisions_of(self, engine: AdmissionEngine) -> Sequence[Decision]:
        """Return the decisions for this admission engine since the last call, and forget them."""
        decisions, self._decisions[engine] = self._decisions[engine], []
        return decisions

    # --- with other gateways ---

    def is_urgent(self) -> bool:
        return bool(self._undecided)

    def is_busy(self) -> bool:
        """Return False: reservations cover admissions between rounds, and a call takes longer than a round."""
        return False

    def report(self, now: float) -> ReplicaReport:
        """Return the report of counts, interactions and questions."""
        calls: list[InteractionDelta] = []
        for one in list(self._undecided.values())[:REPORTED_MAX]:
            del self._undecided[one.request.id]
            one.engine.peers_asked(one.request.id, now)
            asked = self._interactions.ask(one.request)
            self._asked[one.request.id] = one._replace(begin=len(calls), end=len(calls) + len(asked))
            calls += asked
        self._keys_asked = len(calls)
        calls += self._interactions.report(REPORTED_MAX, now)
        return ReplicaReport([], [], [], self._quotas.report(REPORTED_MAX), calls, self._quotas.usage(), [], 0.0)

    def receive(self, view: ReplicaView, asked_s: float, now: float) -> Sequence[Decision]:
        """Apply the reply. `decisions_of` returns the decisions for each admission engine."""
        self._is_alone = False
        for one in self._asked.values():
            self._interactions.take_up(one.request, view.opened[one.begin : one.end], now)
        self._interactions.receive(view.opened[self._keys_asked :])
        self._quotas.receive(view.counted, view.replicas, view.usage, is_forgotten=view.is_forgotten)
        self._decide(now)
        return ()

    def cut_off(self, now: float) -> Sequence[Decision]:
        """Decide alone while no reply comes from the store.

        This gateway keeps to its part of every limit over time. Of concurrent requests the others are taken to have as
        many as they last reported.
        """
        self._is_alone = True
        self._quotas.cut_off(refuses=self._refuses_alone)
        for one in self._undecided.values():
            one.engine.peers_asked(one.request.id, now)
            self._asked[one.request.id] = one
        self._undecided.clear()
        self._decide(now)
        return ()

    def _decide(self, now: float) -> None:
        """Decide the requests of the last report. Beyond a limit, the latest are rejected and uncounted first."""
        asked, self._asked = list(self._asked.values()), {}
        admitted = []
        for one in reversed(asked):
            refused = self._quotas.quotas.find_rejection(one.request, now, is_counted=True)
            if refused is None:
                admitted.append(one)
            else:
                self._decided(one, refused, now)
        for one in reversed(admitted):
            self._decided(one, None, now)

    def _decided(self, one: _UndecidedRequest, refused: Rejection | None, now: float) -> None:
        self._decisions[one.engine] += one.engine.decided(one.request.id, refused, now)
