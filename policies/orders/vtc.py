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

Window (`window_tokens` L): when an engine has room for the next request, one whose prompt that engine has cached may
go instead, if the counters of its tenant and of its flow are at most L above the next one's, and if neither has more
running. The bound is then 2 (U + L). Where cached tokens cost less, a miss is charged with the answer: U then also
has the input of dispatched requests that was taken to be cached and was not. With a window of 0 this is the paper's
algorithm.

Reservation: where the next request fits on none of several engines, it waits for one of them, which takes nothing
else until then, and others go on at the other engines. Its wait is at most what runs at that engine. With R, the most
service per weight that the other engines start in that time, the bound is 2 (U + L + R). With one engine nothing
overtakes the next request, as in the paper, and R is 0.

Proof sketch: a tenant is dispatched only when its counter is the least of those waiting. From then on it grows by its
prompt at once, and by what its dispatched requests stream later. That is at most U before another tenant is the least.
So waiting counters stay within U of each other (lemma 4.3), and service over an interval is the growth of the counter.
With a window it may be dispatched until it is L ahead, so U + L takes the place of U. Lifts only raise tenants that did
not wait. Prediction charges a part of O earlier. Streamed output that is not yet charged adds what the engine generates
within one charging interval.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from policies.capacity.obstacle import Blocked, Obstacle
from policies.orders.cost import LONG_PROMPT, Cost, CostParams
from policies.orders.order import Order, Room, Selection
from policies.queue.backlog import Backlog
from policies.request import Flow, Request, ServiceTokens
from policies.settings import setting


def window_tokens_setting() -> Any:
    return setting(
        LONG_PROMPT,
        "Tokens per weight that calls inside interactions, and requests whose prompt an engine has cached, may receive "
        "ahead of others; 0: none.",
        least=0,
        most=1e9,
    )


@dataclass(frozen=True, slots=True)
class CounterParams(CostParams):
    """What is service, and is it charged ahead?"""

    predict_output: bool = setting(
        False, "Charge the output that a flow's requests usually have at dispatch, and correct it at the end."
    )


@dataclass(frozen=True, slots=True)
class VtcParams(CounterParams):
    """The same, and how far may one tenant or flow go ahead of another?"""

    window_tokens: float = window_tokens_setting()


class CounterOrder(Order):
    """The head of a backlog goes next, within the window: common to all orders that count service."""

    def __init__(self, params: Any, flows_max: int, backlog: Backlog, cost: Cost, *, predict_output: bool) -> None:
        super().__init__()
        self._params = params
        self._flows_max = flows_max
        backlog.batch_share = params.batch_guaranteed_share
        self.has_prefill_parts = params.prefill_parts
        self.passes = backlog.tenants.window > 0.0
        self._backlog = backlog
        self.backlog = backlog
        self._cost = cost
        self.units = (cost, cost)
        self._predict_output = predict_output

    def beside(self, engine: str) -> Order:
        of_this_kind: Any = type(self)
        order: CounterOrder = of_this_kind(self._params, flows_max=self._flows_max)
        order.share(self)
        return order

    def share(self, other: CounterOrder) -> None:
        """Learn and count together with another order of the same kind and settings."""
        self.learned, self.counts = other.learned, other.counts

    def push(self, request: Request, now: float, *, front: bool = False) -> None:
        self._backlog.push(request, front=front)

    def pop(self, now: float, room: Room) -> Selection | Blocked | None:
        """The next request in order, if it fits. One that finds its prompt in the cache of that engine may go instead,
        within the window. What the working set or a node of the tree has no room for sleeps meanwhile.
        """
        backlog = self._backlog
        if backlog.starts:
            backlog.wake_starts(room.may_begin)
        if backlog.full:
            backlog.wake_at(room.is_below)
        while (head := backlog.head()) is not None:
            placed = room.place(head)
            if not isinstance(placed, Blocked):
                if self.passes and backlog.queued > 1:
                    head = room.nearest(head, placed, backlog.may_pass)
                backlog.take(head)
                return self._selected(head, placed)
            why = placed.nearest()
            if why is Obstacle.CEILING:
                backlog.sleep_at(head, placed.ceiling)
            elif why is Obstacle.PREFILL_PART:
                backlog.sleep_at(head, f"prefill of {head.flow.tenant}", is_floor=True)
            elif why is Obstacle.WORKING_SET:
                backlog.sleep_start(head)
                if backlog.full:  # another tenant there may go now
                    backlog.wake_at(room.is_below)
            else:
                return self._beside(placed, room)
        asleep = backlog.asleep()
        if asleep is None:
            return None
        placed = room.place(asleep)
        if isinstance(placed, Blocked):
            return placed
        backlog.take(asleep)
        return self._selected(asleep, placed)

    def _selected(self, request: Request, engine: str) -> Selection:
        return Selection(request, engine)

    def _beside(self, blocked: Blocked, room: Room) -> Selection | Blocked:
        """The next in order fits nowhere. It gets a reservation: nothing else goes to the engine where it fits soonest.
        Others go on at the other engines, so they cannot delay its start (EASY backfilling, Lifka 1995).
        """
        reserved = room.reserve(blocked)
        blocked.others = ()
        if reserved is not None:
            for request in self._backlog.others(blocked.request):
                placed = room.place(request, but=reserved)
                if not isinstance(placed, Blocked):
                    self._backlog.take(request)
                    return self._selected(request, placed)
                if not blocked.others and not request.can_wait:
                    blocked.others = (placed,)
        return blocked

    def remove(self, request: Request, now: float) -> None:
        self._backlog.take(request, is_served=False)

    def charge(self, request: Request, service: ServiceTokens, now: float, *, final: bool) -> None:
        expected = request.progress.output_tokens_expected
        if self._predict_output and not final and service.output < expected:
            service = ServiceTokens(service.prompt, round(expected), service.cached)
        self._backlog.charge(request, self._cost(service))
        if final:
            self._end(request, service, now)

    def _end(self, request: Request, service: ServiceTokens, now: float) -> None:
        """A dispatched request ended, and received this much."""
        self._backlog.end(request)

    def explain(self, flow: Flow, now: float) -> dict[str, float]:
        return self._backlog.explain(flow)

    def __len__(self) -> int:
        return len(self._backlog)


class Vtc(CounterOrder):
    """Which flow has received least service for its weight?"""

    def __init__(self, params: VtcParams | None = None, *, flows_max: int = 10_000) -> None:
        params = params or VtcParams()
        backlog = Backlog(flows_max=flows_max, windows=(params.window_tokens, params.window_tokens))
        super().__init__(params, flows_max, backlog, params.charges(), predict_output=params.predict_output)
