"""What traffic comes to a simulation, and what became of it? The values that experiments read."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

from policies.admission.decisions import Decision
from policies.request import NO_CLAIM, Claim, Flow, Request

IMPOSSIBLE = "context_length_exceeded"
"""The outcome of a request that is longer than the model's context: the gateway refuses it unseen."""
LOST = "lost"
"""The outcome of a request whose gateway died."""


@dataclass(frozen=True, slots=True)
class Arrival:
    """One request of the workload. `output_tokens` is what the model will say; the gateway knows only the maximum."""

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
    """The client hangs up when it has seen this many output tokens. None: it reads to the end."""
    prefix: tuple[int, ...] = ()
    """Chained hashes of the prompt's blocks, of the engine's own block size."""
    context: tuple[int, ...] = ()
    """The same of the prompt and its answer together; the engine has all of it cached at the end. (): the prompt
    alone."""
    is_wrong: bool = False
    """The engine finds the request itself wrong (400, 413, 422, 500): it answers at once with an error."""

    def request(self) -> Request:
        """What the gateway makes of it."""
        return Request(
            self.id, self.flow, self.weight, self.prompt_tokens, self.output_tokens_max, self.arrived_s,
            streamed=self.streamed, body_bytes=self.body_bytes, system_tokens=self.system_tokens, claim=self.claim,
            prefix=self.prefix,
        )  # fmt: skip


@dataclass(slots=True, eq=False)
class Record:
    """What became of one request? Times as the gateway sees them; None: it did not come to that."""

    arrival: Arrival
    dispatched_s: float | None = None
    """The last dispatch; a refused one does not count."""
    token_s: list[float] = field(default_factory=list)
    """When each output token passed the gateway."""
    finished_s: float | None = None
    outcome: str = ""
    """"completed", "cancelled" by its client, "lost" with its gateway, "wrong", or why it was rejected."""
    retry_after_s: float = 0.0
    """The Retry-After of its rejection."""
    preemptions: int = 0
    refusals: int = 0
    cached_tokens: int = 0
    """Of the prompt, found in the engine's cache."""
    gateway: int = 0
    """Which of several gateways it came to."""

    @property
    def first_token_s(self) -> float | None:
        return self.token_s[0] if self.token_s else None

    @property
    def ttft_s(self) -> float | None:
        """From arrival to first token, in seconds."""
        return self.token_s[0] - self.arrival.arrived_s if self.token_s else None


class EngineEvent(NamedTuple):
    """One call of the admission engine: enough to make it again. `arrived` carries the `Arrival`."""

    now: float
    method: str
    args: tuple[object, ...]


@dataclass(slots=True, eq=False)
class Run:
    """Everything that happened, in order."""

    records: dict[str, Record] = field(default_factory=dict)
    decisions: list[tuple[float, Decision]] = field(default_factory=list)
    events: list[EngineEvent] = field(default_factory=list)
    waiting_max: int = 0
    """Most requests that ever waited inside one engine, as of the end of a step."""
    ended_s: float = 0.0
