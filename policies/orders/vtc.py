"""Virtual Token Counter: the least-served flow goes next ("Fairness in Serving LLMs", OSDI'24, algorithms 2 to 4).

Each tenant has a counter of the service it has received, divided by its weight, and each flow inside a tenant a counter
of its own, at weight 1. Input is charged at dispatch, output as it streams, and the true numbers at the end. With
`predict_output` the expected output is also charged at dispatch, and corrected (algorithm 3). A flow that returns is
lifted (see `policies.queue.counters`).

Bound, at a gateway (theorem 4.4, with the dispatched requests in place of the running batch): two tenants that are both
backlogged over an interval receive service, per weight, that differs by at most 2U, with

    U = (w_p * L_in + w_q * O) / (least weight)

L_in is the longest prompt, and O the output that dispatched requests may still stream, over all backends. A backlogged
tenant gets at most 4U less than any other one (theorem 4.9). Inside a tenant the same holds for its flows, at weight 1.
With another cost h, w_p * L_in is the largest charge at one dispatch, and w_q * O the most that the answers of all
dispatched requests add to it. If w_q >= w_p this is within the paper's max(w_p * L_in, w_q * M), because the last
prompt is itself among the M dispatched tokens.

Window (`window_tokens` L): when an engine has room for the head of the queue, a request whose prompt that engine has
cached may go instead, if the counters of its tenant and of its flow are at most L above those of the head, and if
neither has more running. The bound is then 2 (U + L). Where cached tokens cost less, a miss is charged with the answer:
U then also has the input of dispatched requests that was taken to be cached and was not. With a window of 0 this is the
paper's algorithm.

Reservation: a head that fits on none of several engines waits for one of them. That engine takes nothing else until
then, and others go on at the other engines. The head waits at most for what runs at that engine. With R, the most
service per weight that the other engines start in that time, the bound is 2 (U + L + R). With one engine nothing
overtakes the head, as in the paper, and R is 0.

Proof sketch: a tenant is dispatched only when its counter is the least of those waiting. The counter then grows by the
prompt at once, and by what the dispatched requests stream later: at most U before another tenant is the least.
So waiting counters stay within U of each other (lemma 4.3), and service over an interval is the growth of the counter.
With a window it may be dispatched until it is L ahead, so U + L takes the place of U. Lifts only raise tenants that did
not wait. Prediction charges a part of O earlier. Streamed output that is not yet charged adds what the engine generates
within one charging interval.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from policies.orders.cost import LONG_PROMPT, Cost, CostParams
from policies.orders.order import Order
from policies.queue.backlog import Backlog
from policies.request import Flow, Request, ServiceTokens
from policies.settings import setting


def window_tokens_setting() -> Any:
    return setting(
        LONG_PROMPT,
        "Tokens per weight by which calls inside interactions and cached prompts may go ahead of others.",
        least=0,
        most=1e9,
    )


@dataclass(frozen=True, slots=True)
class CounterParams(CostParams):
    """Settings of orders that count service: its cost, and whether expected output is charged at dispatch."""

    predict_output: bool = setting(
        False, "Charge a flow's usual output at dispatch, and correct the charge at the end."
    )


@dataclass(frozen=True, slots=True)
class VtcParams(CounterParams):
    """Settings of `Vtc`: cost, prediction, and how far one tenant or flow may go ahead of another."""

    window_tokens: float = window_tokens_setting()


class CounterOrder(Order):
    """Base of all orders that count service: the head of the backlog goes next, within the window."""

    def __init__(self, params: Any, flows_max: int, backlog: Backlog) -> None:
        self._params = params
        self._flows_max = flows_max
        backlog.batch_share = params.batch_guaranteed_share
        self.has_prefill_parts = params.prefill_parts
        self.passes = backlog.tenants.window > 0.0
        self._backlog = backlog
        self.backlog = backlog
        self._cost: Cost = params.charges()
        self.units = (self._cost, self._cost)

    def beside(self, engine: str) -> Order:
        of_this_kind: Any = type(self)
        order: CounterOrder = of_this_kind(self._params, flows_max=self._flows_max)
        order.share_state(self)
        return order

    def share_state(self, other: CounterOrder) -> None:
        """Share the learned tables and counts of another order of this kind with equal settings."""
        self.learned, self.counts = other.learned, other.counts

    def push(self, request: Request, now: float, *, front: bool = False) -> None:
        self._backlog.push(request, front=front)

    def head(self) -> Request | None:
        return self._backlog.head()

    def take(self, request: Request) -> None:
        self._backlog.take(request)

    def remove(self, request: Request, now: float) -> None:
        self._backlog.take(request, is_served=False)

    def charge(self, request: Request, service: ServiceTokens, now: float, *, final: bool) -> None:
        expected = request.progress.output_tokens_expected
        if self.charges_ahead and not final and service.output < expected:
            service = ServiceTokens(service.prompt, round(expected), service.cached)
        self._backlog.charge(request, self._cost(service))
        if final:
            self._end(request, service, now)

    def _end(self, request: Request, service: ServiceTokens, now: float) -> None:
        """Count the end of a dispatched request, which received this service."""
        self._backlog.end(request)

    def explain(self, flow: Flow, now: float) -> dict[str, float]:
        return self._backlog.explain(flow)

    def __len__(self) -> int:
        return len(self._backlog)


class Vtc(CounterOrder):
    """The order by least service per weight, with a window (virtual token counter)."""

    def __init__(self, params: VtcParams | None = None, *, flows_max: int = 10_000) -> None:
        params = params or VtcParams()
        backlog = Backlog(flows_max=flows_max, windows=(params.window_tokens, params.window_tokens))
        super().__init__(params, flows_max, backlog)
        self.charges_ahead = params.predict_output
