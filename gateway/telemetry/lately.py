"""Which requests ended within the last minute? What an operator's view of the present is made from.

Metrics are sums since the start. Who receives how much just now, and how long tenants wait just now, is read from the
latest ends. They are kept in a ring of fixed size, so a request costs one entry in it.
"""

from __future__ import annotations

from collections import deque
from typing import Final, NamedTuple

from gateway.telemetry.record import Record

__all__ = ["WINDOW_S", "End", "Lately", "service_of"]

WINDOW_S: Final = 60.0
ENDS_MAX: Final = 8192
OUTPUT_WEIGHT: Final = 2.0
"""What a generated token counts where the policy charges nobody; a prompt token counts 1."""


class End(NamedTuple):
    """How did one request end? Times on the monotonic clock."""

    pool: str
    tenant: str
    weight: float
    outcome: str
    reason: str
    dispatched_s: float
    """When its engine got it; when it ended, if none did."""
    ended_s: float
    queue_s: float
    service: float
    """What its tenant was charged, in the unit of the policy."""


class Lately:
    """The latest ends of requests that asked for admission."""

    def __init__(self) -> None:
        self._ends: deque[End] = deque(maxlen=ENDS_MAX)

    def ended(self, record: Record) -> None:
        request = record.request
        if request is None:
            return
        self._ends.append(
            End(
                record.pool,
                record.tenant,
                request.weight,
                record.outcome,
                record.reason,
                record.dispatched_s,
                record.ended_s,
                record.queue_s,
                service_of(request.progress.charged, record.service.prompt, record.service.output),
            )
        )

    def within(self, now: float) -> tuple[list[End], float]:
        """The ends within the window, the latest first, and how long a time they cover in seconds."""
        found: list[End] = []
        for end in reversed(self._ends):
            if end.ended_s < now - WINDOW_S:
                return found, WINDOW_S
            found.append(end)
        if len(found) < ENDS_MAX:
            return found, WINDOW_S
        return found, max(1.0, now - found[-1].ended_s)


def service_of(charged: float, prompt_tokens: int, output_tokens: int) -> float:
    """What was received, as the policy charges it; where it charges nobody, in tokens."""
    return charged or prompt_tokens + OUTPUT_WEIGHT * output_tokens
