"""Deficit round robin: flows take turns, a quantum of service each (VTC, appendix C.2, after Shreedhar and Varghese).

Every flow has a credit. A round visits the flows that wait, in order; one whose credit is not positive gets a quantum
(times its tenant's weight), and is then served for as long as its credit is positive: the last request may overshoot,
and output that streams subtracts too, so that a flow may be several quanta in debt and is passed over for as many
rounds. Tenants take turns, and the flows of a tenant take turns inside it.

Rounds are not played. A flow that has received c in all, at a quantum of Q, has its next turn in round floor(c / Q):
it is the virtual token counter read in whole quanta, and its debt is refilled by that division. So the same `Line`
serves, ordered by (round, place in the round), and with a tiny quantum it is VTC.

Bound, at a gateway: two tenants that are both backlogged over an interval receive service, per weight, that differs by
at most 2 (U + Q), with U as in `orders.vtc`. Proof sketch: who is dispatched is in the earliest round r, so its
counter is below (r + 1) Q, and grows by at most U from there before others are served; every counter that waits is at
least r Q, for a newcomer is raised to the beginning of that round. Waiting counters stay within U + Q of each other.
"""

from __future__ import annotations

from policies.orders.cost import Cost
from policies.orders.vtc import Vtc

__all__ = ["Rr"]

QUANTUM = 500.0
"""That of the paper's own round robin: a twentieth of the 10,000 tokens that its engine holds."""


class Rr(Vtc):
    """Whose turn is it? A larger quantum keeps requests of one flow together; a smaller one is fairer."""

    def __init__(
        self,
        *,
        cost: Cost | None = None,
        predict_output: bool = False,
        flows_max: int = 10_000,
        quantum: float | None = None,
    ) -> None:
        super().__init__(
            cost=cost,
            predict_output=predict_output,
            flows_max=flows_max,
            quantum=QUANTUM if quantum is None else quantum,
        )
