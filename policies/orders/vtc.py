"""Virtual Token Counter: the least-served flow goes next ("Fairness in Serving LLMs", OSDI'24, algorithms 2 to 4).

Each flow has a counter of the service it has received, divided by its tenant's weight. Input is charged at dispatch,
output as it streams, and the true numbers at the end. With `predict_output` the expected output is also charged at
dispatch, and corrected (algorithm 3). A flow that returns is lifted (see `policies.queue.counters`).

Bound, at a gateway (theorem 4.4, with the dispatched requests in place of the running batch): two tenants that are both
backlogged over an interval receive service, per weight, that differs by at most 2U, with

    U = (w_p * L_in + w_q * O) / (least weight)

L_in is the longest prompt, and O the output that dispatched requests may still stream, over all backends. A backlogged
tenant gets at most 4U less than any other one (theorem 4.9). Inside a tenant the same holds for its flows, at weight 1.
With another cost h, w_p * L_in is the largest charge at one dispatch, and w_q * O the most that the answers of all
dispatched requests add to it. If w_q >= w_p this is within the paper's max(w_p * L_in, w_q * M), because the last
prompt is itself among the M dispatched tokens.

Proof sketch: a tenant is dispatched only when its counter is the least of those waiting. From then on it grows by its
prompt at once, and by what its dispatched requests stream later. That is at most U before another tenant is the least.
So waiting counters stay within U of each other (lemma 4.3), and service over an interval is the growth of the counter.
Lifts only raise tenants that did not wait. Prediction charges a part of O earlier. Streamed output that is not yet
charged adds what the engine generates within one charging interval.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from policies.capacity.obstacle import Blocked
from policies.orders.contract import Order, Room, Selection
from policies.orders.cost import Cost, cost_of, cost_setting, input_weight_setting, output_weight_setting
from policies.queue.backlog import Backlog
from policies.request import Flow, Request, ServiceTokens
from policies.settings import setting

__all__ = ["CounterOrder", "Vtc", "VtcParams", "predict_output_setting"]


def predict_output_setting() -> Any:
    return setting(
        False, "Charge the output that a flow's requests usually have at dispatch, and correct it at the end."
    )


@dataclass(frozen=True, slots=True)
class VtcParams:
    """What is service, and is it charged ahead?"""

    cost: str = cost_setting()
    input_weight: float = input_weight_setting()
    output_weight: float = output_weight_setting()
    predict_output: bool = predict_output_setting()


class CounterOrder(Order):
    """The head of a backlog goes next, and nothing overtakes it: common to VTC, LCF, RR, WSC and FairServe."""

    def __init__(self, backlog: Backlog, cost: Cost, *, predict_output: bool) -> None:
        super().__init__()
        self._backlog = backlog
        self.backlog = backlog
        self._cost = cost
        self._predict_output = predict_output

    def push(self, request: Request, now: float, *, front: bool = False) -> None:
        self._backlog.push(request, front=front)

    def pop(self, now: float, room: Room) -> Selection | Blocked | None:
        # Strict, as in the paper: if the next in order does not fit, nothing overtakes it. Otherwise it might wait for
        # ever.
        head = self._backlog.head()
        if head is None:
            return None
        placed = room.place(head)
        if isinstance(placed, Blocked):
            return placed
        self._backlog.dispatch(head)
        return Selection(head, placed)

    def remove(self, request: Request, now: float) -> None:
        self._backlog.withdraw(request)

    def charge(self, request: Request, service: ServiceTokens, now: float, *, final: bool) -> None:
        expected = request.progress.output_tokens_expected
        if self._predict_output and not final and service.output < expected:
            service = ServiceTokens(service.prompt, round(expected), service.cached)
        self._backlog.charge(request, self._cost(service))
        if final:
            self._backlog.end(request)

    def explain(self, flow: Flow, now: float) -> dict[str, float]:
        return self._backlog.explain(flow)

    def __len__(self) -> int:
        return len(self._backlog)


class Vtc(CounterOrder):
    """Which flow has received least service for its weight?"""

    def __init__(self, params: VtcParams | None = None, *, flows_max: int = 10_000) -> None:
        self._params = params = params or VtcParams()
        self._flows_max = flows_max
        cost = cost_of(params.cost, params.input_weight, params.output_weight)
        super().__init__(Backlog(flows_max=flows_max), cost, predict_output=params.predict_output)

    def beside(self, engine: str) -> Vtc:
        return Vtc(self._params, flows_max=self._flows_max)
