"""What does an engine say of itself, and how is its capacity to be judged?"""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import ceil

__all__ = ["CapacitySettings", "Gauges"]


@dataclass(frozen=True, slots=True)
class CapacitySettings:
    """How is capacity judged? Shares are of the KV capacity and of the slots."""

    waiting_target: int = 2
    kv_ceiling: float = 0.98
    headroom: float = 0.05
    concurrency_max: int | None = None
    gauge_trust_s: float = 1.0
    retry_backoff_s: float = 0.1
    retry_backoff_s_max: float = 5.0
    share: float = 1.0
    """So much of each backend is ours, and so much of what it says of itself; other gateways own the rest."""


@dataclass(frozen=True, slots=True)
class Gauges:
    """What a backend said of itself at `taken_s`; None: it did not say."""

    taken_s: float
    running: int | None = None
    waiting: int | None = None
    kv_usage: float | None = None
    kv_capacity_tokens: int | None = None
    block_size: int | None = None
    preemptions_total: int | None = None

    def share(self, share: float) -> Gauges:
        """As a backend of this share of the size would say it."""
        if share == 1.0:
            return self
        running, waiting, tokens = self.running, self.waiting, self.kv_capacity_tokens
        return replace(
            self,
            running=None if running is None else ceil(running * share),
            waiting=None if waiting is None else ceil(waiting * share),
            kv_capacity_tokens=None if tokens is None else int(tokens * share),
        )
