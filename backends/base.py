"""What does a backend say of itself, and what does an engine adapter have to know?"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol


@dataclass(slots=True, init=False)
class Usage:
    """What did one request really cost? As the engine reports it, in tokens. None: it did not say, or said nothing that
    can be a count."""

    prompt_tokens: int | None
    output_tokens: int | None
    cached_tokens: int

    def __init__(self, prompt_tokens: int | None, output_tokens: int | None, cached_tokens: int = 0) -> None:
        self.prompt_tokens = prompt_tokens
        self.output_tokens = output_tokens
        self.cached_tokens = cached_tokens


@dataclass(frozen=True, slots=True)
class BackendSnapshot:
    """What did a backend's gauges say at one moment?

    Every field but the time may be None: the engine did not say. Absent is neither zero nor full.
    `taken_s` is the monotonic time at which the scrape was *sent*, so that nothing dispatched later is in it.
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
    """Prompt tokens processed since it started: less than before means that it has restarted."""
    is_step: bool = False
    """Did the engine say this itself, right after a step? Then nothing here is older than it, and the fields below
    are facts. A page of metrics leaves them None."""
    free_blocks: int | None = None
    total_blocks: int | None = None
    scheduled_tokens: int | None = None
    """Tokens that the last step computed, of prompts and of answers."""
    scheduled_tokens_max: int | None = None
    """The most that one step computes."""
    max_num_seqs: int | None = None
    deferred: int | None = None
    """Requests that wait in the engine for something else than room, such as an adapter, a grammar or a transfer."""
    output_tokens_total: int | None = None


class Adapter(Protocol):
    """How does one kind of engine name its gauges, and what does its refusal look like?"""

    name: str
    metrics_paths: tuple[str, ...]
    """Paths to scrape, cheapest first; an empty answer falls through to the next. () = no metrics."""
    steps_path: str | None
    """Where the engine says after each step what it holds, if it can. None: it cannot."""
    takes_cache_salt: bool
    """Does it keep the cached blocks of requests with different `cache_salt` apart?"""
    health_path: str
    """Answers 200 when the engine is well."""

    def snapshot(self, text: str, taken_s: float) -> BackendSnapshot | None:
        """Read one metrics page; None when it holds nothing this adapter knows."""

    def is_refusal(self, status: int, body: bytes) -> bool:
        """Is this answer backpressure (put the request back, unbilled) rather than an error of the request?"""
