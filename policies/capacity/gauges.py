"""What does an engine report about itself, how is its capacity judged, and how much of it may this gateway use?"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

__all__ = ["Allowance", "CapacitySettings", "Gauges"]


@dataclass(frozen=True, slots=True)
class CapacitySettings:
    """How is capacity judged? `headroom` is a fraction of the KV capacity and of the slots."""

    waiting_target: int = 2
    kv_ceiling: float = 0.98
    headroom: float = 0.05
    concurrency_max: int | None = None
    gauge_trust_s: float = 1.0
    retry_backoff_s: float = 0.1
    retry_backoff_s_max: float = 5.0


@dataclass(frozen=True, slots=True)
class Gauges:
    """What an engine reported at `taken_s`; None: it did not report this."""

    taken_s: float
    running: int | None = None
    waiting: int | None = None
    kv_usage: float | None = None
    kv_capacity_tokens: int | None = None
    block_size: int | None = None
    preemptions_total: int | None = None
    prompt_tokens_total: int | None = None
    is_step: bool = False
    """The engine said this itself, right after a step: nothing here is older than that step, and what follows are
    facts."""
    free_blocks: int | None = None
    total_blocks: int | None = None
    scheduled_tokens: int | None = None
    """Tokens that the last step computed, of prompts and of answers."""
    scheduled_tokens_max: int | None = None
    """The most that one step computes."""
    max_num_seqs: int | None = None


class Allowance(NamedTuple):
    """How much of one engine may this gateway use where others use it too, and what do they use there now?"""

    sequences: int
    kv_tokens: int
    sequences_elsewhere: int = 0
    kv_tokens_elsewhere: int = 0
    sharers: int = 1
    """Gateways with requests running or waiting there, this one included."""
