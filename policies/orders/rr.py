"""Deficit round robin: flows take turns, a quantum of service each (VTC, appendix C.2, after Shreedhar and Varghese).

Every flow has a credit. A round visits the waiting flows in order. A flow whose credit is not positive gets a quantum
(times its tenant's weight), and is then served as long as its credit is positive. The last request may overshoot, and
streamed output subtracts too. So a flow may be several quanta in debt, and is then passed over for as many rounds.
Tenants take turns, and the flows of a tenant take turns inside it.

Rounds are not simulated. With a quantum of Q, a flow that has received c in all has its next turn in round floor(c /
Q). That is the virtual token counter read in whole quanta, and the division refills the debt. So a `CounterHeap`
is used, ordered by (round, place in the round). With a tiny quantum this is VTC.

Bound, at a gateway: two tenants that are both backlogged over an interval receive service, per weight, that differs by
at most 2 (U + Q), with U as in `orders.vtc`. Proof sketch: a dispatched tenant is in the earliest round r. So its
counter is below (r + 1) Q, and grows by at most U before others are served. Every waiting counter is at least r Q,
because a new member is raised to the beginning of that round. Waiting counters stay within U + Q of each other.
"""

from __future__ import annotations

from dataclasses import dataclass

from policies.orders.vtc import CounterOrder, CounterParams
from policies.queue.backlog import Backlog
from policies.settings import setting


@dataclass(frozen=True, slots=True)
class RrParams(CounterParams):
    """Settings of `Rr`: cost, prediction, and the service of a turn.

    The default quantum is that of the paper's own round robin: a twentieth of the 10,000 tokens that its engine holds.
    """

    quantum: float = setting(
        500.0, "Service that a flow receives per turn and weight before the next one's turn.", least=1, most=1e9
    )


class Rr(CounterOrder):
    """The order by turns. A larger quantum keeps requests of one flow together; a smaller one is fairer."""

    def __init__(self, params: RrParams | None = None, *, flows_max: int = 10_000) -> None:
        params = params or RrParams()
        super().__init__(params, flows_max, Backlog(flows_max=flows_max, quantum=params.quantum))
        self.charges_ahead = params.predict_output
