"""What does an engine report about itself, how is its capacity judged, and how much may this gateway use?"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from policies.settings import setting


@dataclass(frozen=True, slots=True)
class CapacitySettings:
    """Settings that decide how full the engines of a pool are kept."""

    waiting_target: int = setting(
        2,
        "Requests that may wait inside one engine before it counts as full. Twice as many are sent to find its slots.",
        least=0,
        most=1000,
    )
    kv_ceiling: float = setting(
        0.96,
        "Share of an engine's KV cache up to which requests are dispatched, their expected growth included. More fills "
        "the cache better, and the engine preempts more.",
        least=0.5,
        most=1,
    )
    max_concurrency: int | None = setting(
        None,
        "Most requests in flight at an engine, whatever its metrics say. Default: by metrics, else found by trial.",
        kind=int,
        least=1,
        most=1_000_000,
    )
    gauge_trust_s: float = 1.0
    retry_backoff_s: float = 0.1
    retry_backoff_s_max: float = 5.0


@dataclass(frozen=True, slots=True)
class Gauges:
    """Numbers that an engine reported. None if the engine did not report a number: neither zero nor full.

    `taken_s`: when a page was asked for, so that nothing dispatched later is in it, or the end of a step (monotonic).
    """

    taken_s: float
    running: int | None = None
    waiting: int | None = None
    kv_usage: float | None = None
    """Fraction 0..1 of the KV blocks in use by live requests."""
    kv_capacity_tokens: int | None = None
    block_size: int | None = None
    preemptions_total: int | None = None
    prompt_tokens_total: int | None = None
    """Prompt tokens processed since the engine started. A smaller number than before means a restart."""
    is_step: bool = False
    """The engine sent these numbers itself right after a step, so none is older than that step."""
    scheduled_tokens: int | None = None
    """Tokens that the last step computed, of prompts and of answers."""
    scheduled_tokens_max: int | None = None
    """Largest number of tokens that one step computes."""
    max_num_seqs: int | None = None
    deferred: int | None = None
    """Requests that wait in the engine for something other than room, such as an adapter, a grammar or a transfer."""
    output_tokens_total: int | None = None

    @property
    def waiting_for_room(self) -> int:
        return max(0, (self.waiting or 0) - (self.deferred or 0))


class EngineFacts(NamedTuple):
    """Facts about an engine that comes into service, which no gauge reports."""

    slots: int | None
    """Sequences that the engine runs side by side."""
    is_other_kind: bool
    """The engine is of another kind than the engine before it under this name."""


class Grant(NamedTuple):
    """A gateway's part of an engine that several gateways share, and what the other gateways use of the engine now."""

    sequences: int
    kv_tokens: int
    sequences_elsewhere: int = 0
    kv_tokens_elsewhere: int = 0
    sharers: int = 1
    """Gateways with requests running or waiting there, this one included."""
