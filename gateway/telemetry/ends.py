"""Ended requests, in the form in which processes exchange them."""

from __future__ import annotations

from collections.abc import Mapping

import msgspec


# Made for each request: a named tuple takes four times as long.
class EndedRequest(msgspec.Struct, array_like=True, gc=False):
    """An ended request. Times on the monotonic clock."""

    pool: str
    tenant: str
    weight: float
    outcome: str
    reason: str
    dispatched_s: float
    """Time of dispatch to the engine; time of the end if it was never dispatched."""
    ended_s: float
    queue_s: float
    service: float
    """Charge in the unit of the policy; weighted tokens where the policy charges nothing (`service_of`)."""
    request_id: str
    app: str
    model: str
    backend: str
    """Engine that had the request last; "" if none did."""
    waited_s: Mapping[str, float]
    """Wait in seconds by obstacle."""
    first_token_s: float | None
    """Seconds from arrival to the first token; None if none was seen."""
    prompt_tokens: int
    output_tokens: int


class OwnMinute(msgspec.Struct):
    """Sums of one tenant's requests that came within one minute."""

    at_s: float
    """Begin of the minute, in seconds since the epoch."""
    slowest: EndedRequest
    requests: int = 0
    queue_s: float = 0.0
    not_served: int = 0
    reason: str = ""
    """Reason of the latest request that was not served."""


def took_s(end: EndedRequest) -> float:
    return end.ended_s - end.dispatched_s + end.queue_s
