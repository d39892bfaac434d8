"""A request of a simulation: how it arrives, and what becomes of it."""

from __future__ import annotations

from dataclasses import dataclass, field

from policies.request import NO_CLAIM, Claim, Flow, Request

IMPOSSIBLE = "context_length_exceeded"
"""Outcome of a request longer than the model's context, which the gateway refuses unseen."""


@dataclass(frozen=True, slots=True)
class Arrival:
    """A request of the workload. `output_tokens` is the true length of the answer; the gateway knows only the
    maximum."""

    id: str
    flow: Flow
    arrived_s: float
    prompt_tokens: int
    output_tokens: int
    output_tokens_max: int = 4096
    weight: float = 1.0
    streamed: bool = True
    body_bytes: int = 0
    system_tokens: int = 0
    claim: Claim = NO_CLAIM
    cancel_after_tokens: int | None = None
    """Output tokens after which the client hangs up; None reads to the end."""
    prefix: tuple[int, ...] = ()
    """Chained hashes of the prompt's blocks, in the engine's block size."""
    context: tuple[int, ...] = ()
    """Chained hashes of prompt and answer together, all cached by the engine at the end; () for the prompt alone."""
    is_wrong: bool = False
    """True if the engine finds the request invalid (400, 413, 422, 500) and answers at once with an error."""

    def request(self) -> Request:
        """Return the gateway's view of the request."""
        return Request(
            self.id, self.flow, self.weight, self.prompt_tokens, self.output_tokens_max, self.arrived_s,
            streamed=self.streamed, body_bytes=self.body_bytes, system_tokens=self.system_tokens, claim=self.claim,
            prefix=self.prefix,
        )  # fmt: skip


@dataclass(slots=True, eq=False)
class Record:
    """Outcome of a request, with times at the gateway. None for events that did not happen."""

    arrival: Arrival
    dispatched_s: float | None = None
    """Time of the last dispatch that the engine accepted."""
    token_s: list[float] = field(default_factory=list)
    """Times at which the output tokens passed the gateway."""
    finished_s: float | None = None
    outcome: str = ""
    """"completed", "cancelled" by its client, "lost" with its gateway, "wrong", or the reason of its rejection."""
    retry_after_s: float = 0.0
    """Retry-After of its rejection."""
    preemptions: int = 0
    refusals: int = 0
    cached_tokens: int = 0
    """Prompt tokens found in the engine's cache."""
    gateway: int = 0
    """Index of the gateway that received it."""

    @property
    def ttft_s(self) -> float | None:
        """Time from arrival to first token in seconds."""
        return self.token_s[0] - self.arrival.arrived_s if self.token_s else None
