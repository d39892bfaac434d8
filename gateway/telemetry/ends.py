"""How did a request end, and what did somebody change meanwhile? As processes say it to one another."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import msgspec


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
    request_id: str
    app: str
    model: str
    backend: str
    """The engine that had it last; "": none did."""
    waited_s: Mapping[str, float]
    """What held it back, in seconds by obstacle."""
    first_token_s: float | None
    """From arrival; None: none was seen."""
    prompt_tokens: int
    output_tokens: int


class OwnMinute(msgspec.Struct):
    """The requests of one tenant that came within one minute."""

    at_s: float
    """When the minute begins, since the epoch."""
    slowest: End
    requests: int = 0
    queue_s: float = 0.0
    not_served: int = 0
    reason: str = ""
    """Why the latest of those was not served."""

    def add(self, other: OwnMinute) -> None:
        """Count further requests of the minute."""
        self.requests += other.requests
        self.queue_s += other.queue_s
        self.not_served += other.not_served
        self.reason = other.reason or self.reason
        if took_s(other.slowest) > took_s(self.slowest):
            self.slowest = other.slowest


def took_s(end: End) -> float:
    return end.ended_s - end.dispatched_s + end.queue_s


class Mark(NamedTuple):
    """What did somebody change, and when (on the monotonic clock)?"""

    at_s: float
    text: str
    pool: str = ""
    """"": all of them."""
