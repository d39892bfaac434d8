"""FairServe: least-served first, calls of open interactions before others, and starts throttled only under overload.

The order is that of WSC (`orders.wsc`), and calls inside an open interaction are preferred: of the tenants whose
counters are within `window_tokens` of the least one, those with such a call go first, and inside a tenant those of
the users that are within `window_calls` normal calls. Cached prompts go first within the same window, so a window can
be used once. Service received within the window counts, so keeping interactions open does not raise anyone's fair
share. Starts beyond a configured limit are rejected as described in `policies.limits.throttle`. Without a limit,
nothing is counted for it.

Bound, with U of VTC between tenants and U' of WSC between flows: service over any interval in which two are backlogged
differs by at most 2 (U + window). Proof sketch in docs/policies/fairserve.md.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from policies.limits.throttle import Throttle, ThrottleSettings
from policies.orders.order import Order
from policies.orders.vtc import CounterOrder
from policies.orders.wsc import Wsc, WscParams
from policies.request import Flow, Pressure, Rejection, RejectReason, Request, ServiceTokens
from policies.settings import setting


@dataclass(frozen=True, slots=True)
class FairServeParams(WscParams):
    """Settings of `FairServe`: those of `Wsc`, the throttle, and whether starts wait for the working set.

    Attributes:
        throttle: limits at the start of an interaction, which apply while the KV cache is overloaded.
    """

    throttle: ThrottleSettings = field(default_factory=ThrottleSettings)
    working_set: bool = setting(
        True, "Hold starts while the contexts of open interactions fill the KV cache (docs/working-sets.md)."
    )


class FairServe(Wsc):
    """The order of `Wsc`, in which calls inside interactions go first and starts are throttled under overload."""

    def __init__(self, params: FairServeParams | None = None, *, flows_max: int = 10_000) -> None:
        params = params or FairServeParams()
        super().__init__(params, flows_max=flows_max)
        self.admits_wholes = params.working_set
        self.throttle = None if params.throttle.is_off else Throttle(params.throttle, members_max=flows_max)
        """Limits at the start of interactions; None if none is configured."""
        self.counts = self.throttle.counts if self.throttle is not None else {}

    def share_state(self, other: CounterOrder) -> None:
        """Share the throttle too: its limits count over all queues of a pool."""
        super().share_state(other)
        if isinstance(other, FairServe):
            self.throttle = other.throttle

    def take_over(self, before: Order) -> None:
        super().take_over(before)
        if isinstance(before, FairServe) and self.throttle is not None and before.throttle is not None:
            self.throttle.take_over(before.throttle)
            self.counts = self.throttle.counts

    def find_rejection(self, request: Request, now: float, pressure: Pressure) -> Rejection | None:
        return self.throttle.find_rejection(request, now, pressure) if self.throttle is not None else None

    def push(self, request: Request, now: float, *, front: bool = False) -> None:
        progress = request.progress
        # A start whose dispatch failed counts in the working set already, and does not wait for it again.
        is_inside = progress.context is not None or (progress.inside and not progress.parked)
        beyond = False
        if self.throttle is not None:
            beyond = self.throttle.is_beyond(request, now) if front else self.throttle.count(request, now)
        # A call beyond a limit is not rejected inside its interaction, but does not go first. A start that returns
        # after a rejection by the working set does.
        goes_first = (is_inside and not beyond) or progress.came_back is RejectReason.WORKING_SET
        self._queue(request, front=front, is_inside=is_inside, goes_first=goes_first)

    def _end(self, request: Request, service: ServiceTokens, now: float) -> None:
        self._backlog.end(request)
        if self.throttle is not None:
            self.throttle.settle(request, service, now)

    def explain(self, flow: Flow, now: float) -> dict[str, float]:
        numbers = super().explain(flow, now)
        return numbers | self.throttle.explain(flow, now) if self.throttle is not None else numbers
