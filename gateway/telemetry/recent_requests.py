"""The latest ended requests, from which an operator's view of the present is made.

Metrics are sums since the start. The service that tenants receive and the time that they wait now are read from the
latest ends. A ring of fixed size holds them, so a request costs one entry. The slowest request of each tenant and
minute is kept for longer, so that no flood makes the gateway forget why a tenant was slow.
"""

from __future__ import annotations

import time
from collections import OrderedDict, deque
from collections.abc import Iterable, Iterator
from itertools import islice, takewhile
from typing import Final

from gateway.telemetry.ends import EndedRequest, OwnMinute, took_s
from gateway.telemetry.record import Outcome, RequestRecord

WINDOW_S: Final = 60.0
ENDS_MAX: Final = 8192
MINUTE_S: Final = 60.0
OUTPUT_WEIGHT: Final = 2.0
"""Weight of a generated token where the policy charges nothing; a prompt token counts 1."""


class RecentRequests:
    """The latest ends of requests that asked for admission."""

    def __init__(self, ends_max: int = ENDS_MAX) -> None:
        self._ends: deque[EndedRequest] = deque(maxlen=ends_max)
        self._ends_max = ends_max
        self._epoch_s = time.time() - time.monotonic()
        self._minutes: OrderedDict[tuple[str, float], OwnMinute] = OrderedDict()
        """Sums by tenant and minute, as of the last fold; half as many as ends."""
        self._fold_at = self._folding = max(1, ends_max // 4)
        """Count at which the ends since the last fold are added to their minutes: many at a time are cheap."""
        self.count = 0
        """Number of all ends, those included that are no longer kept."""

    def ended(self, record: RequestRecord) -> None:
        request = record.request
        if request is None or not record.pool:
            return
        service = record.service
        self._add(EndedRequest(
            record.pool, record.tenant, request.weight, record.outcome, record.reason, record.dispatched_s,
            record.ended_s, record.queue_s, service_of(request.progress.charged, service.prompt, service.output),
            record.id, record.app, record.model, record.backend, record.waited_s, record.first_token_s, service.prompt,
            service.output,
        ))  # fmt: skip

    def within(self, now: float, window_s: float = WINDOW_S) -> tuple[list[EndedRequest], float]:
        """Return the ends within the window, the latest first, and the seconds that they cover."""
        found = list(self.ended_since(now - window_s))
        if len(found) < self._ends_max:
            return found, window_s
        return found, max(1.0, now - found[-1].ended_s)

    def ended_since(self, since_s: float) -> Iterator[EndedRequest]:
        """Yield the ends since this time, the latest first."""
        return takewhile(lambda end: end.ended_s >= since_s, reversed(self._ends))

    def latest_after(self, known: int) -> list[EndedRequest]:
        """Return the ends after the first `known`, the latest last. If there were fewer, `known` counts an earlier
        process's ends, and all are returned.
        """
        return self.latest(self.count - known if known <= self.count else self.count)[::-1]

    def add_reported(self, ends: Iterable[EndedRequest]) -> None:
        """Add the ends that other processes report, the latest last."""
        for end in ends:
            self._add(end)

    def _add(self, end: EndedRequest) -> None:
        self.count += 1
        self._ends.append(end)
        if self.count >= self._fold_at:
            self._fold()

    def _fold(self) -> None:
        """Add the ends since the last call to the minutes of their tenants."""
        new = self.latest_after(self._fold_at - self._folding)
        self._fold_at = self.count + self._folding
        minutes, epoch_s = self._minutes, self._epoch_s
        for end in new:
            at_s = (epoch_s + end.dispatched_s - end.queue_s) // MINUTE_S * MINUTE_S
            one = minutes.get((end.tenant, at_s))
            if one is None:
                one = minutes[end.tenant, at_s] = OwnMinute(at_s, end)
                if len(minutes) > max(1, self._ends_max // 2):
                    minutes.popitem(last=False)
            one.requests += 1
            one.queue_s += end.queue_s
            if end.outcome != Outcome.COMPLETED:
                one.not_served += 1
                one.reason = end.reason
            if took_s(end) > took_s(one.slowest):
                one.slowest = end

    def minutes_of(self, tenant: str) -> list[OwnMinute]:
        """Return the remembered minutes of one tenant, the earliest first."""
        self._fold()
        return sorted([one for (name, _), one in self._minutes.items() if name == tenant], key=lambda one: one.at_s)

    def latest(self, count: int) -> list[EndedRequest]:
        """Return the latest ends, the latest first."""
        return list(islice(reversed(self._ends), count))


def service_of(charged: float, prompt_tokens: int, output_tokens: int) -> float:
    """Return the service received: the policy's charge, or weighted tokens where it charges nothing."""
    return charged or prompt_tokens + OUTPUT_WEIGHT * output_tokens
