"""Which tenant is ahead of its part of an engine's prefill, while answers of another tenant run there?

Prefill is a resource with a rate. A step that computes prompts takes longer, so every answer that runs at the engine
gets its next token later. No queue shows that: a tenant with running answers and nothing queued is in no queue.

The *lead* of a tenant node at an engine is the prompt tokens that it has begun there and has not paid for. Leads fall
together by R (1 - g) tokens a second, by weight, as in generalized processor sharing. R is the prefill rate of the
engine (`capacity.pace`). g is the largest part, by weight among the nodes at the engine, of a node with running answers
that is not ahead, and 0 if there is none. A node is ahead if its lead is above the window of the order. It then begins
nothing as long as g is not 0, except calls inside interactions.

Theorem (pace). Let answers of a node run throughout T seconds, let the node be ahead at no time, and let its part be at
least g. Let n nodes begin prefill, with prompts of at most P tokens and a window of L. Then they begin at most
R (1 - g) (T + D) + n (L + P) tokens outside interactions, with D of `PAID_EVERY_S`. So the answers have the steps of
g T - D - n (L + P) / R seconds without prompts. Proof sketch: a lead is at most L before a start, so at most L + P
after it. All leads together fall by at most R (1 - g) a second, and rise by the tokens begun. A start is paid for at
most the D before it. Calls inside interactions are never held, and no lead counts for more than L at the next start.

Prefill that one node does not use goes to the others, up to R (1 - g). The rest of the engine's time is not idle: its
running answers have it. Where no such answer runs, nothing is held, so prefill is work conserving.
"""

from __future__ import annotations

from collections.abc import Mapping
from math import inf
from typing import Final

from policies.capacity.lease import Lease
from policies.capacity.ledger import BackendLedger
from policies.capacity.pace import PrefillLead
from policies.request import Request
from policies.tree.pool_tree import ROUNDING

PAID_EVERY_S: Final = 0.1
"""Longest time before a start that may still pay for the start. A payment looks at every request of the engine."""


class PrefillParts:
    """The prefill leads of tenant nodes (begun and unpaid prompt tokens) at the engines of one pool.

    Each ledger has those of its engine.
    """

    def __init__(self, backends: Mapping[str, BackendLedger]) -> None:
        self.window_tokens = inf
        """Lead per weight above which a node is ahead; infinite if no node ever is."""
        self._backends: Final = backends

    def began(self, lease: Lease, now: float) -> None:
        """Count the part of a dispatched prompt that its engine is expected to compute."""
        ledger, request = self._backends[lease.backend], lease.request
        if self.window_tokens == inf or ledger.prefill_pace.tokens_per_s() is None:
            return
        lead = ledger.prefill_leads.get(request.flow.tenant)
        if now >= ledger.leads_paid_s + PAID_EVERY_S or (lead is not None and self._is_ahead(lead)):
            self._pay(ledger, now)
        lead = ledger.prefill_leads.setdefault(request.flow.tenant, PrefillLead())
        lead.weight = request.weight
        lead.tokens = min(lead.tokens, self.window_tokens * lead.weight) + lease.prefill_tokens

    def held_until_s(self, request: Request, ledger: BackendLedger, now: float) -> float | None:
        """Return when this request may begin prefill at this engine if nothing else happens there; None if now."""
        lead = ledger.prefill_leads.get(request.flow.tenant)
        if lead is None or request.progress.inside or not self._is_ahead(lead):
            return None
        self._pay(ledger, now)
        kept, weights = self._kept(ledger), sum([each.weight for each in ledger.prefill_leads.values()])
        rate = self._rate(ledger) * (1.0 - kept)
        if not kept or not rate or not self._is_ahead(lead):
            return None
        return now + (lead.tokens / lead.weight - self.window_tokens) * weights / rate

    def _is_ahead(self, lead: PrefillLead) -> bool:
        return lead.tokens > self.window_tokens * lead.weight + ROUNDING

    @staticmethod
    def _rate(ledger: BackendLedger) -> float:
        """Return this gateway's part of the prefill rate; 0.0 while the rate is not known."""
        sharers = 1 if ledger.allowance is None else ledger.allowance.sharers
        return (ledger.prefill_pace.tokens_per_s() or 0.0) / sharers

    def _pay(self, ledger: BackendLedger, now: float) -> None:
        """Lower the leads by the prompt tokens that the engine computed since `leads_paid_s`, by weight.

        Tokens that one node does not need lower the leads of the others.
        """
        leads, passed_s = ledger.prefill_leads, now - ledger.leads_paid_s
        tokens, ledger.leads_paid_s = self._rate(ledger) * (1.0 - self._kept(ledger)) * passed_s, now
        while leads and tokens > 0.0:
            level = tokens / sum([each.weight for each in leads.values()])
            paid = [leaf for leaf, each in leads.items() if each.tokens <= level * each.weight]
            for leaf in paid:
                lead = leads.pop(leaf)
                tokens -= lead.tokens
                lead.tokens = 0.0
            if not paid:
                for each in leads.values():
                    each.tokens -= level * each.weight
                return

    def _kept(self, ledger: BackendLedger) -> float:
        """Return the part of the engine's time that is kept for running answers (g)."""
        weights = {leaf: lead.weight for leaf, lead in ledger.prefill_leads.items()}
        kept = 0.0
        for lease in ledger.leases.values():
            request = lease.request
            leaf = request.flow.tenant
            weights[leaf] = request.weight
            if lease.started_s is None or request.is_batch or request.output_tokens_max <= max(1, lease.output_tokens):
                continue  # has not started, makes no further token, or is batch
            lead = ledger.prefill_leads.get(leaf)
            if request.weight > kept and (lead is None or not self._is_ahead(lead)):
                kept = request.weight
        return kept / sum(weights.values()) if kept else 0.0
