"""How did a request end, and what did somebody change meanwhile? As processes say it to one another."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple


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


class Mark(NamedTuple):
    """What did somebody change, and when (on the monotonic clock)?"""

    at_s: float
    text: str
    pool: str = ""
    """"": all of them."""
