"""Virtual Token Counter: the least-served flow goes next ("Fairness in Serving LLMs", OSDI'24, algorithms 2 to 4).

Each flow has a counter of the service it has received, divided by its tenant's weight. Input is charged when a request
is dispatched, output as it streams, the truth at the end. With `predict_output` the expected output is charged at
dispatch as well, and corrected (algorithm 3). A flow that returns is lifted (see `policies.queue.counters`).

Bound, at a gateway (theorem 4.4 with what is dispatched in the place of the running batch): two tenants that are both
backlogged over an interval receive service, per weight, that differs by at most 2U, with

    U = (w_p * L_in + w_q * O) / (least weight)

where L_in is the longest prompt and O the output that dispatched requests may still stream, over all backends. A tenant
that is backlogged gets at most 4U less than any other one (theorem 4.9). Inside a tenant the same holds for its flows,
at weight 1. With another cost h, w_p * L_in is the most that is charged at one dispatch, and w_q * O the most that the
answers of all dispatched requests add to it. Where w_q >= w_p this is within the paper's max(w_p * L_in, w_q * M), for
the last prompt is itself among the M tokens that are dispatched.

Proof sketch: a tenant is dispatched only when its counter is the least among the waiting. From then on it grows by its
prompt at once, and by what its dispatched requests stream later, which is U at most before another one is the least: so
waiting counters stay within U of each other (lemma 4.3), and service over an interval is the counter's growth. Lifts
only raise those who did not wait. Prediction charges a part of O earlier. Output that has streamed but is not charged
yet adds what the engine generates within one charging interval.
"""

from __future__ import annotations

from policies.orders.contract import ClusterView, Policy, Selection
from policies.orders.cost import Cost, LinearCost
from policies.queue.backlog import Backlog
from policies.request import Flow, Pressure, Refused, Request, ServiceTokens

__all__ = ["Vtc"]


class Vtc(Policy):
    """Who has received least service for its weight?"""

    def __init__(
        self,
        *,
        cost: Cost | None = None,
        predict_output: bool = False,
        flows_max: int = 10_000,
        lift: bool = True,
        quantum: float = 0.0,
        leads: tuple[float, float] | None = None,
    ) -> None:
        self._cost = cost if cost is not None else LinearCost()
        self._predict_output = predict_output
        self._backlog = Backlog(flows_max=flows_max, lift=lift, quantum=quantum, leads=leads)

    def refusal(self, request: Request, now: float, pressure: Pressure) -> Refused | None:
        return None

    def push(self, request: Request, now: float, *, front: bool = False) -> None:
        self._backlog.push(request, front=front)

    def pop(self, now: float, view: ClusterView) -> Selection | None:
        # Strict, as in the paper: when the next in order does not fit, nobody overtakes it, or it might wait for ever.
        head = self._backlog.head()
        if head is None:
            return None
        backend = view.place(head)
        if backend is None:
            return None
        self._backlog.dispatch(head)
        return Selection(head, backend)

    def remove(self, request: Request, now: float) -> None:
        self._backlog.withdraw(request)

    def charge(self, request: Request, service: ServiceTokens, now: float, *, final: bool) -> None:
        if self._predict_output and not final and service.output < request.output_tokens_expected:
            service = ServiceTokens(service.prompt, round(request.output_tokens_expected), service.cached)
        self._backlog.charge(request, self._cost(service))
        if final:
            self._backlog.end(request)

    def backlog(self) -> Backlog:
        return self._backlog

    def next_eligible(self, now: float) -> float | None:
        return None

    def explain(self, flow: Flow, now: float) -> dict[str, float]:
        return self._backlog.explain(flow)

    def remembered(self) -> int:
        """Tenants and flows in memory."""
        return self._backlog.remembered()

    def __len__(self) -> int:
        return len(self._backlog)
